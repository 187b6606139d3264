"""Noria's engine beside Transformers, llama.cpp and vLLM, on the same cores, model and requests.

    python benchmarks/peers.py --output DIR [--slots 1,4,8,16,32] [--repeat 3] [--noria NAME:KEY=VALUE,...]

Each peer gets an environment of its own with pinned packages, on first use, which takes minutes: llama.cpp is compiled.
Runs go round robin, one process at a time. Nothing else should run meanwhile; the table says what others took.
docs/peers.md has each peer's settings and why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.installing import InstallError, install
from peers.noria_engine import engine_config
from peers.protocol import Task
from peers.registry import PEERS, PeerSpec, noria_variant, with_variables
from peers.running import run_peer
from peers.summary import markdown
from peers.workload import make_workload, write_workload
from rich.console import Console

from noria.config import EMBEDDED_MODEL
from noria.errors import ConfigError
from noria.models.model_store import embedded_model_path, resolve_model
from noria_bench.environment import machine
from noria_bench.errors import BenchError

ROOT = Path(__file__).parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        noria = [noria_variant(text) for text in args.noria or ["float32:"]]
        _check_names([*noria, *PEERS])
        specs = _chosen(with_variables([*noria, *PEERS], args.variables), args.only)
        for spec in specs:
            if spec.is_noria:
                # a wrong key is better known before an hour of others' runs
                engine_config(max(args.slots), args.num_threads, spec.options)
        gguf = embedded_model_path()
        model = resolve_model(EMBEDDED_MODEL, None, "float32", console.print)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        made = {"seed": args.seed, "scale": args.scale, "prompt_scale": args.prompt_scale}
        workload = make_workload(vocab_size, args.num_requests, **made)
    except (BenchError, ConfigError, ValueError) as error:
        raise SystemExit(str(error)) from None
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "workload.json"
    write_workload(path, workload, **made)
    task = Task(str(path.resolve()), args.slots[0], args.num_threads, str(model), str(gguf))
    comparison = _Comparison(args.output, args.venvs.resolve(), task, specs, made)
    comparison.install(console)
    for repeat in range(args.repeat):
        for slots in args.slots:
            for spec in specs:
                comparison.run(
                    spec, repeat, slots, has_singles=slots == args.slots[0], timeout_s=args.timeout, console=console
                )
    print(comparison.table(), end="")
    return 1 if comparison.has_failures else 0


class _Comparison:
    """The runs so far, written down after each, so that an interrupted one is not lost."""

    def __init__(
        self, output: Path, venvs: Path, task: Task, specs: Sequence[PeerSpec], workload: Mapping[str, Any]
    ) -> None:
        self._output, self._venvs, self._task, self._specs = output, venvs, task, specs
        self._facts = {"machine": machine(), "num_threads": task.num_threads, "workload": dict(workload)}
        self._failures: dict[str, str] = {}
        self._runs: list[dict[str, Any]] = []

    @property
    def has_failures(self) -> bool:
        return bool(self._failures) or any("error" in run for run in self._runs)

    def install(self, console: Console) -> None:
        for spec in self._specs:
            try:
                install(spec, self._venvs, console.print)
            except InstallError as error:
                self._failures[spec.name] = str(error)
                console.print(f"{spec.name}: not installed: {error}", markup=False)

    def run(
        self, spec: PeerSpec, repeat: int, slots: int, has_singles: bool, timeout_s: float, console: Console
    ) -> None:
        if spec.name in self._failures:
            return
        values = {"slots": slots, "options": dict(spec.options), "has_singles": has_singles}
        task = Task(**{**vars(self._task), **values})
        logs = self._output / "logs"
        logs.mkdir(exist_ok=True)
        result = run_peer(spec, task, self._venvs, logs / f"{repeat}-{slots}-{spec.name}.log", timeout_s)
        self._runs.append({"peer": spec.name, "repeat": repeat, "slots": slots, **result})
        said = result.get("error") or f"{result['output_tokens_per_s']:.1f} tokens/s in {result['seconds']:.1f} s"
        console.print(f"{repeat + 1}. {spec.name}, {slots} slots: {said}", markup=False)
        content = {**self._facts, "not_installed": self._failures, "runs": self._runs}
        (self._output / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (self._output / "table.md").write_text(self.table(), encoding="utf-8")

    def table(self) -> str:
        noria = [spec.name for spec in self._specs if spec.is_noria]
        return markdown(self._runs, [spec.name for spec in self._specs], noria, self._failures)


def _check_names(specs: Sequence[PeerSpec]) -> None:
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"--noria: names must differ: {', '.join(names)}")


def _chosen(specs: Sequence[PeerSpec], only: str | None) -> list[PeerSpec]:
    """Raises ValueError for a name that there is not."""
    names = [spec.name for spec in specs]
    wanted = names if only is None else only.split(",")
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise ValueError(f"--only: there is no {unknown[0]!r}; there are {', '.join(names)}")
    return [spec for spec in specs if spec.name in wanted]


def _slots(text: str) -> list[int]:
    slots = [int(word) for word in text.split(",")]
    if min(slots) < 1:
        raise ValueError
    return slots


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="for results, logs and the table")
    parser.add_argument("--venvs", type=Path, default=ROOT / ".peers", metavar="DIR", help="the peers' environments")
    parser.add_argument("--only", metavar="NAME,NAME", help="of the peers and variants, which are noria-NAME")
    parser.add_argument("--noria", action="append", metavar="NAME:KEY=VALUE,...", help="a variant; may be repeated")
    parser.add_argument(
        "--variables", action="append", default=[], metavar="PEER:NAME=VALUE,...", help="of a peer's environment"
    )
    parser.add_argument("--slots", type=_slots, default=[16], metavar="N,N", help="sequences in a step (default: 16)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N")
    parser.add_argument("--num-requests", type=int, default=32, metavar="N")
    parser.add_argument("--scale", type=float, default=1.0, help="of the output lengths")
    parser.add_argument("--prompt-scale", type=float, default=1.0, help="of the prompts' lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="of one run (default: 1800)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
