"""`noria tune`: which configuration keeps a service-level objective at the highest rate, and its files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from noria.commands.common import MODES, engine_config, say
from noria.commands.sim_options import (
    add_cost_arguments,
    add_simulated_engine_arguments,
    add_workload_arguments,
    load_cost_model,
    load_requests,
    simulated_config,
    simulated_options,
)
from noria.commands.tuned_files import check_output, write_tuned_files
from noria.commands.workers import worker_processes
from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.simulation.requests import SimRequest
from noria.simulation.trial import Bench, Measurement, time_alone
from noria.simulation.tuner import Tuner, TuningResult
from noria.simulation.tuning_space import TuningSpace
from noria_bench.slo import KEYS, parse_slo

DEFAULT_NUM_REQUESTS = 500


def add_tune(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "tune",
        help="find the configuration that keeps an SLO at the highest rate",
        description="Searches the scheduler's knobs, and the other batching modes, in the simulator for the "
        "configuration that keeps the SLO at the highest rate of requests. Writes engine.json, config.pbtxt and the "
        "predicted figures (tuned.json), or refuses, saying why, when none keeps it.",
    )
    parser.add_argument(
        "--slo", required=True, metavar="KEY=SECONDS,...", help=f"such as ttft_p95=2,tpot_p95=0.25; {', '.join(KEYS)}"
    )
    parser.add_argument("--modes", default=",".join(MODES), metavar="M,M", help=f"to try; default: {','.join(MODES)}")
    add_cost_arguments(parser)
    add_simulated_engine_arguments(parser)
    add_workload_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("tuned"), metavar="DIR", help="default: ./tuned")
    parser.set_defaults(run=_run_tune)


def _run_tune(args: argparse.Namespace) -> int:
    slo = parse_slo(args.slo)
    modes = args.modes.split(",")
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(f"--modes must be of {', '.join(MODES)}, not {mode!r}")
    bases = {mode: simulated_config(args, mode) for mode in modes}
    configs = {mode: config for mode, (config, _) in bases.items()}
    num_blocks = bases[modes[0]][1]
    requests = _requests(args)
    check_output(args.output)
    cost_model = load_cost_model(args, configs[modes[0]])
    space = TuningSpace(configs, num_blocks, requests)
    bench = Bench(
        requests,
        slo,
        cost_model,
        num_blocks,
        alone_s=time_alone(requests, space.starts()[0], num_blocks, cost_model),
        num_host_blocks=max(config.num_host_blocks or 0 for config in configs.values()),
        burstiness=args.burstiness,
    )
    with worker_processes(most=64) as pool:
        result = Tuner(space, bench, pool.map, say).run()
    _print(result)
    original = _original_config(args, result.best.config.batching_mode)
    for path in write_tuned_files(result, args, original, num_blocks):
        print(path)
    say(
        "to serve it, put engine.json into the model repository's llm/1, config.pbtxt into llm/configs as tuned.pbtxt, "
        "and run noria serve --mode tuned"
    )
    return 0


def _requests(args: argparse.Namespace) -> list[SimRequest]:
    if args.rate is not None or args.concurrency is not None:
        raise ConfigError("tune looks for the rate itself: leave out --rate and --concurrency")
    is_drawn = args.trace is None and not args.workload.endswith(".json")
    if args.num_requests is None and is_drawn:
        args.num_requests = DEFAULT_NUM_REQUESTS
    requests = load_requests(args)
    if not requests:
        raise ConfigError("workload: there must be at least one request")
    return requests


def _original_config(args: argparse.Namespace, mode: str) -> EngineConfig:
    """As it would be loaded, without what the simulation has worked out for itself."""
    return engine_config(replace(simulated_options(args), mode=mode))


def _print(result: TuningResult) -> None:
    low, high = min(result.rates), max(result.rates)
    console = Console(width=None if os.isatty(1) else 160)
    console.print(_front_table(result.front))
    console.print(
        f"{result.rate:.3g} requests/s keep the SLO under {len(result.rates)} seeds ({low:.3g} to {high:.3g} alone), "
        f"found in {result.num_trials} simulations:\n{result.best}",
        highlight=False,
    )


def _front_table(front: Sequence[Measurement]) -> Table:
    table = Table(title="Rate against latency: none of these is beaten in all three")
    for name in ("requests/s", "TTFT p95, s", "TPOT p95, s"):
        table.add_column(name, justify="right")
    table.add_column("configuration")
    for run in front:
        figures = [f"{run.figures[key]:.3f}" for key in ("ttft_p95", "tpot_p95")]
        table.add_row(f"{run.trial.rate:.3f}", *figures, str(run.trial.candidate))
    return table
