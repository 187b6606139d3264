"""Whether the Triton kernels are exact on this GPU, and how near they come to what it can do.

    python benchmarks/gpu.py [--output FILE] [--quick] [--only exactness,attention] [--seconds-limit 480]

From a checkout: nothing of Noria need be installed, nothing is downloaded, and all weights are random. docs/gpu.md says
what is measured and how. Exits with 0 where exactness held, 1 where it did not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("exactness", "attention", "step", "engine", "peers")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    unknown = [name for name in args.only or () if name not in STAGES]
    if unknown:
        parser.error(f"--only: there is no {unknown[0]!r}; there are {', '.join(STAGES)}")
    if args.output is not None:
        try:
            args.output.touch()
        except OSError as error:
            parser.error(f"--output {args.output} cannot be written: {error.strerror}")
    # read where kernels are defined
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.path[:0] = [str(Path(__file__).resolve().parent)]
    sys.path += [str(ROOT / "backend_src"), str(ROOT / "client")]
    from gpu.command import run

    return run(args, [stage for stage in STAGES if args.only is None or stage in args.only])


def _names(text: str) -> list[str]:
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, metavar="FILE", help="for all figures, as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer points and dtypes, two or three minutes")
    parser.add_argument("--only", type=_names, metavar="STAGE,STAGE", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--seconds-limit", type=float, default=480.0, metavar="S", help="of all (default: 480)")
    parser.add_argument(
        "--interpret", action="store_true", help="everything once at toy sizes on the CPU: a test of this script"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
