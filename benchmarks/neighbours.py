"""How long decode steps take beside processes that never wait: their median, p95, p99 and maximum.

    python benchmarks/neighbours.py [--neighbours 0,1,2] [--batch 8] [--context 300] [--steps 480] [--engine KEY=VALUE]

Each neighbour is a Python process in an endless loop. All numbers of them come in turn, in rounds, so that a pace that
drifts meets all alike. A team of threads that wait for each other in a loop takes many times longer beside one: this is
the measurement of it. About a minute on two cores with the embedded model. With kernels=torch set
OMP_WAIT_POLICY=PASSIVE, as the server does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from subprocess import Popen

import numpy as np

from noria.commands.common import add_engine_arguments, check_can_write, engine_config, say, server_options
from noria.errors import ConfigError
from noria.models.model_store import resolve_model
from noria.profiling.cases import case_step, check_cases, decode_case
from noria.runtime.build import build_runner
from noria.runtime.model_runner import ModelRunner
from noria.scheduler_output import SchedulerOutput
from noria_bench.environment import busy_cores, machine

NUM_ROUNDS = 4
# before the steps that count: the neighbours start, and the threads find their cores
SETTLE_S = 0.3
NUM_UNCOUNTED = 3
# ends with this process, whatever ends that
NEIGHBOUR = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
PERCENTILES = {"median_ms": 50, "p95_ms": 95, "p99_ms": 99, "max_ms": 100}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--neighbours", type=_counts, default=(0, 1, 2), metavar="N,N", help="processes")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences in a step")
    parser.add_argument("--context", type=int, default=300, metavar="TOKENS", help="of each sequence")
    parser.add_argument("--steps", type=int, default=480, metavar="N", help="of each number of neighbours")
    add_engine_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every step's time")
    options = parser.parse_args(arguments)
    try:
        for name in ("batch", "steps"):
            if getattr(options, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, not {getattr(options, name)}")
        if options.context < 0:
            raise ConfigError(f"--context must be at least 0, not {options.context}")
        if options.json:
            check_can_write("--json", options.json)
        config = engine_config(server_options(options))
        cache_dir = Path(config.cache_dir) if config.cache_dir else None
        runner = build_runner(config, resolve_model(config.model, cache_dir, config.dtype, say))
        case = decode_case(options.batch, options.context)
        check_cases([case], runner)
    except ConfigError as error:
        parser.error(str(error))
    others_before = busy_cores()
    step_s = measure(runner, case_step(case, runner, 0.0), options.neighbours, options.steps)
    result = {count: _summary(times) for count, times in step_s.items()}
    print(
        f"{config.model}: {options.batch} sequences of {options.context} tokens, weight_quantization "
        f"{config.weight_quantization}, kv_cache_dtype {config.kv_cache_dtype}, {options.steps} steps each; others "
        f"took {others_before:.2f} cores before, {busy_cores():.2f} after"
    )
    print("| neighbours | " + " | ".join(name.replace("_ms", ", ms") for name in PERCENTILES) + " |")
    print("|---|" + "---:|" * len(PERCENTILES))
    for count, summary in result.items():
        print(f"| {count} | " + " | ".join(f"{summary[name]:.1f}" for name in PERCENTILES) + " |")
    if options.json:
        runs = {count: [seconds * 1e3 for seconds in times] for count, times in step_s.items()}
        content = {"machine": machine(), "engine": asdict(config), "summary": result, "steps_ms": runs}
        options.json.write_text(json.dumps(content, indent=1))
    return 0


def measure(
    runner: ModelRunner, step: SchedulerOutput, counts: Sequence[int], num_steps: int
) -> dict[int, list[float]]:
    """Seconds of num_steps steps beside each number of neighbours."""
    step_s: dict[int, list[float]] = {count: [] for count in counts}
    for index in range(NUM_ROUNDS):
        for count, times in step_s.items():
            with neighbours(count):
                for _ in range(NUM_UNCOUNTED):
                    runner.execute(step)
                while len(times) < num_steps * (index + 1) // NUM_ROUNDS:
                    begin_s = time.perf_counter()
                    runner.execute(step)
                    times.append(time.perf_counter() - begin_s)
    return step_s


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes in an endless loop, until the end of the block."""
    with ExitStack() as stack:
        for _ in range(count):
            process = Popen([sys.executable, "-c", NEIGHBOUR])
            stack.callback(process.wait)
            stack.callback(process.kill)
        time.sleep(SETTLE_S)
        yield


def _summary(times_s: Sequence[float]) -> dict[str, float]:
    return {name: float(np.percentile(times_s, percent)) * 1e3 for name, percent in PERCENTILES.items()}


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(word) for word in text.split(","))
    if min(counts) < 0:
        raise argparse.ArgumentTypeError(f"must be numbers of processes, not {text}")
    return tuple(dict.fromkeys(counts))


if __name__ == "__main__":
    sys.exit(main())
