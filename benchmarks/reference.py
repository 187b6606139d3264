"""The reference report: the seed mix in the three modes, and how much in-flight gains as output lengths spread.

    python benchmarks/reference.py [--output docs/results/reference] [--scale 0.5] [--repeat 3]

Writes a folder for each result, with its raw records, report.html and report.md over all of them, and slots.svg. On two
cores it takes about half an hour. Nothing else should run meanwhile; the report says what did.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from noria.cli import main as noria

SLO = "cpu"
# output laws with one mean and a growing coefficient of variation: none, about 0.29, 0.66 and 1
MEAN = 40
LAWS = {
    "constant": f"constant:{MEAN}",
    "uniform": f"uniform:{MEAN // 2}:{3 * MEAN // 2}",
    "exponential": f"exponential:{3 * MEAN}:{3 * MEAN}",
    "lognormal": f"lognormal:{MEAN}:1:{8 * MEAN}",
}
PROMPTS = "constant:32"
INTERRUPTED = 130


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/results/reference"), metavar="DIR")
    parser.add_argument("--scale", default="0.5", help="of the seed mix's lengths (default: 0.5)")
    parser.add_argument("--repeat", default="3", metavar="N", help="of the seed mix (default: 3)")
    parser.add_argument("--num-requests", default="32", metavar="N", help="of each run (default: 32)")
    args = parser.parse_args()
    if args.output.exists():
        if not (args.output / "seed-mix" / "result.json").exists():
            raise SystemExit(f"{args.output} exists, and is no earlier reference")
        shutil.rmtree(args.output)
    args.output.mkdir(parents=True)
    results = [args.output / "seed-mix"]
    seed_mix = ["--modes", "static,dynamic,inflight", "--repeat", args.repeat, "--scale", args.scale, "--slo", SLO]
    code = noria(["bench", "seed", *seed_mix, "--num-requests", args.num_requests, "--output", str(results[0])])
    for name, law in LAWS.items():
        results.append(args.output / name)
        lengths = [law, "--prompt-tokens", PROMPTS, "--num-requests", args.num_requests]
        if code != INTERRUPTED:
            code |= noria(["bench", *lengths, "--modes", "static,inflight", "--output", str(results[-1])])
    if code == INTERRUPTED:
        return code
    traces = args.output / "slots"
    noria(["trace", "--num-requests", "24", "--scale", "0.15", "--output", str(traces)])
    # where the report looks for it; the recordings themselves are large
    shutil.move(traces / "slots.svg", results[0] / "slots.svg")
    shutil.rmtree(traces)
    files = ["--output", str(args.output / "report.html"), "--markdown", str(args.output / "report.md")]
    return code | noria(["report", *map(str, results), *files, "--title", "Noria: reference report"])


if __name__ == "__main__":
    sys.exit(main())
