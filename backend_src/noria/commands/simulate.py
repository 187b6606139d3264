"""`noria simulate`: the scheduler under a model of this machine's step times, or of another machine's.

Prints what `noria bench` measures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from noria.commands.common import MODES
from noria.commands.sim_options import (
    add_cost_arguments,
    add_simulated_engine_arguments,
    add_workload_arguments,
    count,
    load_cost_model,
    load_requests,
    simulated_config,
)
from noria.commands.sim_report import SimulatedMode, simulated_run, simulation_table, write_json
from noria.commands.validation import check_can_validate, run_validation
from noria.errors import ConfigError
from noria.simulation.autoscaling import Autoscaling
from noria.simulation.fleet import LeastOutstandingTokens, RoundRobin, Router, run_fleet
from noria.simulation.replica import Replica
from noria.simulation.requests import SimRequest
from noria.simulation.simulator import Simulator
from noria_bench.reporting.terminal import comparison_table
from noria_bench.slo import Objectives, parse_slo

ROUTERS: dict[str, type[Router]] = {"round_robin": RoundRobin, "least_tokens": LeastOutstandingTokens}


def add_simulate(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "simulate",
        help="predict what the batching modes cost, without running the model",
        description="Replays a workload in virtual time: the real scheduler, with a formula for how long steps take, "
        "which `noria calibrate` fits to this machine. Prints what `noria bench` would measure.",
    )
    parser.add_argument("--modes", default=",".join(MODES), metavar="M,M", help=f"default: {','.join(MODES)}")
    add_cost_arguments(parser)
    add_simulated_engine_arguments(parser)
    add_workload_arguments(parser)
    parser.add_argument("--replicas", type=count, default=1, metavar="N", help="engines behind a router (default: 1)")
    parser.add_argument("--router", choices=ROUTERS, default="round_robin", help="default: round_robin")
    parser.add_argument(
        "--autoscale",
        metavar="KEY=VALUE,...",
        help=f"a rule for more and fewer replicas: {', '.join(f.name for f in fields(Autoscaling))}",
    )
    parser.add_argument(
        "--slo",
        metavar="KEY=SECONDS,...",
        help="ttft_p95=2,tpot_p95=0.1 for instance: also counts the requests that keep such latencies",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON, too")
    parser.add_argument(
        "--validate",
        action="store_true",
        help="serve the workload for real, too, and print predicted against measured: takes minutes",
    )
    parser.set_defaults(run=_run_simulate)


def _run_simulate(args: argparse.Namespace) -> int:
    modes = args.modes.split(",")
    if args.validate:
        check_can_validate(args)
        return run_validation(args, modes)
    objectives = parse_slo(args.slo).objectives() if args.slo else None
    if args.burstiness != 1 and args.rate is None:
        raise ConfigError("--burstiness needs --rate: it is of the gaps between arrivals")
    requests = load_requests(args)
    if not requests:
        raise ConfigError("workload: it holds no request")
    simulated = [_simulate(args, mode, requests, objectives) for mode in modes]
    console = Console()
    console.print(comparison_table([mode.run for mode in simulated]))
    console.print(simulation_table(simulated))
    if args.json is not None:
        write_json(args.json, [mode.to_json() for mode in simulated])
    return 0


def _simulate(
    args: argparse.Namespace, mode: str, requests: Sequence[SimRequest], objectives: Objectives | None
) -> SimulatedMode:
    config, num_blocks = simulated_config(args, mode)
    cost_model = load_cost_model(args, config)
    start_s = time.perf_counter()
    if args.replicas == 1 and args.autoscale is None:
        simulator = Simulator(config, num_blocks, cost_model, num_host_blocks=config.num_host_blocks or 0)
        result = simulator.run(requests, args.concurrency)
        replica_seconds = result.wall_s
    else:

        def build_replica(number: int) -> Replica:
            host = config.num_host_blocks or 0
            return Replica(config, num_blocks, cost_model, num_host_blocks=host, number=number)

        if args.concurrency is not None:
            raise ConfigError("--concurrency is for one replica")
        autoscaling = None if args.autoscale is None else parse_autoscaling(args.autoscale)
        fleet = run_fleet(requests, build_replica, args.replicas, ROUTERS[args.router](), autoscaling)
        result, replica_seconds = fleet.simulation, fleet.replica_seconds
    wall_s = time.perf_counter() - start_s
    return SimulatedMode(simulated_run(mode, result, objectives), wall_s, replica_seconds)


def parse_autoscaling(text: str) -> Autoscaling:
    """Raises ConfigError naming the key and what is valid."""
    types = {entry.name: int if entry.name.endswith("replicas") else float for entry in fields(Autoscaling)}
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in types:
            raise ConfigError(f"--autoscale: unknown key {key!r}; valid are {', '.join(types)}")
        try:
            values[key] = types[key](value)
        except ValueError:
            raise ConfigError(f"--autoscale: {key} must be a number, not {value!r}") from None
    if "max_replicas" not in values:
        raise ConfigError("--autoscale needs max_replicas=N")
    if not values.keys() & {"max_waiting", "max_running_tokens", "max_kv_share"}:
        raise ConfigError("--autoscale needs something to act on: max_waiting, max_running_tokens or max_kv_share")
    try:
        return Autoscaling(**values)
    except ValueError as error:
        raise ConfigError(f"--autoscale: {error}") from None
