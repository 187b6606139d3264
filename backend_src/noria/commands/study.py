"""`noria study`: what is known of batching policies from papers and issues, found again in the simulator and drawn."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from noria.commands.common import say
from noria.commands.workers import worker_processes
from noria.errors import ConfigError
from noria.simulation.studies.catalogue import all_studies
from noria.simulation.studies.plots import draw_study
from noria.simulation.studies.report import to_json, to_markdown
from noria.simulation.studies.study import Study
from noria.simulation.trace import read_rows
from noria.timeline.picture import check_can_draw
from noria_bench.lengths import EmpiricalLength, LengthLaw


def add_study(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    names = ", ".join(all_studies({}))
    parser = subparsers.add_parser(
        "study",
        help="find known results on batching again in the simulator",
        description=f"Simulates {names}; writes a picture of each, and all numbers, into DIR. Nothing of it depends on "
        "this machine or on chance.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these (default: all): {names}")
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="output lengths of an Azure or Mooncake trace beside the laws of the ratio; may be repeated",
    )
    parser.add_argument("--output", type=Path, default=Path("study"), metavar="DIR", help="default: ./study")
    parser.set_defaults(run=_run_study)


def _run_study(args: argparse.Namespace) -> int:
    # before a minute of simulation, not after
    check_can_draw()
    studies = all_studies({path.stem: _output_lengths(path) for path in args.trace})
    for name in args.names:
        if name not in studies:
            raise ConfigError(f"NAME must be one of {', '.join(studies)}, not {name!r}")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {args.output} cannot be made: {error.strerror}") from None
    for path in _write(_simulate({name: studies[name] for name in args.names or studies}), args.output):
        print(path)
    return 0


def _output_lengths(path: Path) -> LengthLaw:
    lengths = [row.num_output_tokens for row in read_rows(path) if row.num_output_tokens is not None]
    if not lengths:
        raise ConfigError(f"--trace: {path} does not say how many tokens answers have")
    return EmpiricalLength(lengths)


def _simulate(studies: Mapping[str, Callable[[], Study]]) -> list[Study]:
    """Each in a process of its own, as many at a time as there are cores."""
    start = time.monotonic()
    done = []
    with worker_processes(most=len(studies)) as pool:
        for name, running in {name: pool.apply_async(study) for name, study in studies.items()}.items():
            done.append(running.get())
            say(f"{name}, after {time.monotonic() - start:.0f} s: {' '.join(done[-1].findings)}")
    return done


def _write(studies: Sequence[Study], folder: Path) -> list[Path]:
    """The files written."""
    paths = []
    sections = ["# Studies\n\nBy the simulator: the scheduler that serves, under a model of what steps cost.\n"]
    for study in studies:
        pictures = [folder / f"{study.name}.svg", folder / f"{study.name}.png"]
        draw_study(study, pictures)
        sections.append(to_markdown(study, pictures[0].name))
        paths += pictures
    summary = {study.name: to_json(study) for study in studies}
    paths += [folder / "studies.md", folder / "studies.json"]
    paths[-2].write_text("\n".join(sections), encoding="utf-8")
    paths[-1].write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return paths
