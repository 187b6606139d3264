"""What `benchmarks/gpu.py` does once it knows its options: compile, run the stages, sum up, write down."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu import exactness, precompile, random_models
from gpu.attention_speed import AttentionSpeed
from gpu.compilations import Compilations
from gpu.device import Gpu
from gpu.engine_speed import PEER_ROW, EngineSpeed
from gpu.rows import Row, table
from gpu.sizes import H200, QUICK, TOY, Sizes
from gpu.stages import Unit, run_stage, say, unit_seconds
from gpu.step_speed import StepSpeed
from gpu.transformers_speed import GENERATE_BATCH_ROW, TransformersSpeed

# in the order of their worth; at most so many seconds each
STAGES = {"exactness": 120.0, "attention": 75.0, "step": 90.0, "engine": 125.0, "peers": 120.0}
PRECOMPILE_S = 120.0
PEERS_TARGET = 3.0
NO_GPU = 2
# what is left of the limit for the table
_CLOSING_S = 5.0


def run(args: argparse.Namespace, stages: Sequence[str]) -> int:
    """0 where exactness held, 1 where it did not, 2 where there is no GPU."""
    started = time.time()
    gpu = Gpu(args.interpret)
    sizes = TOY if args.interpret else QUICK if args.quick else H200
    facts = _in_a_process(gpu.facts)
    if facts is None:
        say(
            "no NVIDIA GPU that torch can use was found: this measures one (--interpret runs it on the CPU, for a test)"
        )
        return NO_GPU
    say(f"{facts['device']}: {', '.join(stages)}; at most {args.seconds_limit:.0f} s")
    report: dict[str, Any] = {
        "command": [sys.executable, *sys.argv],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "is_interpreted": args.interpret,
        "is_quick": args.quick,
        **facts,
        "versions": _versions(),
        "seeds": {"weights": random_models.SEED, "requests": 0},
    }
    if not args.interpret:
        report["compiled"] = _precompile(sizes, gpu, args.quick, stages, facts["capability"])
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="noria-gpu-") as folder:
        for stage in stages:
            left = started + args.seconds_limit - _CLOSING_S - time.time()
            if left < 10 and not args.interpret:
                rows.append(Row(stage, "the whole stage", note=f"{max(0, left):.0f} s were left of --seconds-limit"))
                continue
            make = _stage(stage, sizes, gpu, args.quick)
            seconds = left if args.interpret else min(STAGES[stage], left)
            found = run_stage(stage, make, seconds, Path(folder))
            # what it takes in the interpreter reaches and misses nothing
            rows += [replace(row, target=None) for row in found] if args.interpret else found
            report.setdefault("unit_seconds", {})[stage] = unit_seconds(Path(folder), stage)
            _write(args.output, report, [*rows, *_ratios(rows)], started)
    rows += _ratios(rows, has_target=not args.interpret)
    _write(args.output, report, rows, started)
    print(f"\n{table(rows)}\n", flush=True)
    checks = [row for row in rows if row.stage == "exactness"]
    is_held = all(row.is_exact for row in checks)
    if checks:
        say("exactness held" if is_held else "exactness did not hold, or was not all looked at")
    say(f"{time.time() - started:.0f} s" + (", and no time here means anything" if args.interpret else ""))
    return 0 if is_held else 1


def _stage(
    stage: str, sizes: Sizes, gpu: Gpu, is_quick: bool
) -> Callable[[], tuple[Iterable[Unit], Callable[[], None]]]:
    def units() -> Iterable[Unit]:
        compilations = Compilations(stage)
        yield from {
            "exactness": lambda: exactness.units(sizes, gpu, is_quick),
            "attention": lambda: AttentionSpeed(sizes, gpu).units(),
            "step": lambda: StepSpeed(sizes, gpu, is_quick).units(),
            "engine": lambda: EngineSpeed(sizes, gpu).units(),
            "peers": lambda: TransformersSpeed(sizes, gpu).units(),
        }[stage]()
        if compilations.num_kernels:
            yield Unit("kernels", lambda: [compilations.row()], 0)

    return lambda: (units(), gpu.synchronize)


def _precompile(sizes: Sizes, gpu: Gpu, is_quick: bool, stages: Sequence[str], capability: str) -> dict[str, Any]:
    tasks = precompile.tasks(sizes, gpu, is_quick, stages)
    if not tasks:
        return {}
    started = time.time()
    found = _in_a_process(lambda: precompile.precompile(tasks, int(capability.replace(".", "")), PRECOMPILE_S)) or []
    problems = {task.name: task.error for task in found if task.error}
    num_kernels = sum(len(task.kernels) for task in found)
    seconds = time.time() - started
    say(
        f"compiled: {num_kernels} kernels in {seconds:.0f} s on {len(os.sched_getaffinity(0))} cores, "
        f"{sum(task.seconds for task in found):.0f} s of one; {len(tasks) - len(found)} of {len(tasks)} tasks left"
    )
    for name, problem in problems.items():
        say(f"not compiled ahead: {name}: {problem}")
    return {"kernels": num_kernels, "seconds": seconds, "tasks": {t.name: t.seconds for t in found}, "errors": problems}


def _in_a_process(compute: Callable[[], Any]) -> Any:
    """What it returns, None where it raised or died. Nothing here touches the GPU itself: what is forked could not."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def send() -> None:
        try:
            sender.send(compute())
        except (RuntimeError, AssertionError) as error:
            print(error, file=sys.stderr, flush=True)

    process = context.Process(target=send)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()


def _ratios(rows: Sequence[Row], has_target: bool = True) -> list[Row]:
    """Of figures that two stages have."""
    values = {row.name: row.value for row in rows if row.value}
    ours, theirs = values.get(PEER_ROW), values.get(GENERATE_BATCH_ROW)
    if ours is None or theirs is None:
        return []
    return [Row("peers", "in-flight over generate_batch", ours / theirs, "x", PEERS_TARGET if has_target else None)]


def _write(path: Path | None, report: dict[str, Any], rows: Sequence[Row], started: float) -> None:
    if path is not None:
        content = {**report, "seconds": round(time.time() - started, 1), "rows": [row.document() for row in rows]}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found
