"""`benchmarks/soak.py`: its options, the run from the server's start to its end, and what is told of it."""

from __future__ import annotations

import argparse
import json
import math
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from noria.commands.common import (
    add_engine_arguments,
    check_can_write,
    engine_config,
    prepare_model,
    say,
    server_options,
)
from noria.errors import ConfigError, EngineFailure, NoriaError
from noria.serving.machine import free_ports
from noria.serving.server import RunningServer, ServerOptions
from noria.timeline.recorded_trace import read_trace
from noria_bench.environment import busy_cores, machine
from noria_client.errors import ServerError
from soak.load import Job
from soak.report import grown, held_table, steps_table
from soak.running import Counts, RunningLoad
from soak.samples import MIN_FINISHED, Sample, Sampler, left_over
from soak.steps import decode_times, step_times

# that a growth can be told
MIN_SAMPLES = 5
IDLE_S = 2.0
INTERRUPTED = 130
NUM_LOG_LINES = 15


@dataclass
class Soak:
    """What came of it. samples: of the time under load, the first one before it; idle: at rest afterwards, if it came
    to that. problems: what should not have been. steps_ms: see `steps.decode_times`."""

    samples: list[Sample] = field(default_factory=list)
    idle: Sample | None = None
    problems: list[str] = field(default_factory=list)
    steps_ms: dict[int, list[float]] = field(default_factory=dict)
    busy_cores_before: float = 0.0
    busy_cores_after: float | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        _check(args)
        options = server_options(args)
        prepare_model(options)
    except ConfigError as error:
        parser.error(str(error))
    # a plain kill or a closed terminal stops the server and the load in order, as Ctrl-C does
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        soak = run(args, options)
    except KeyboardInterrupt:
        say("interrupted; server and load have been stopped")
        return INTERRUPTED
    except NoriaError as error:
        say(str(error))
        return 1
    _report(args, options, soak)
    for problem in soak.problems:
        say(problem)
    return 1 if soak.problems else 0


def run(args: argparse.Namespace, options: ServerOptions) -> Soak:
    """Raises NoriaError if the server does not start."""
    soak = Soak()
    with tempfile.TemporaryDirectory(prefix="noria-soak-") as name:
        log_path = Path(name) / "server.log"
        # one of the user's own is kept
        trace_path = Path(str(options.engine.get("trace_path") or Path(name) / "steps.jsonl"))
        http, grpc, metrics = free_ports(options.host, (0, 0, 0))
        own = replace(
            options,
            engine={**options.engine, "trace_path": str(trace_path)},
            http_port=http,
            grpc_port=grpc,
            metrics_port=metrics,
        )
        with RunningServer(own, log_path) as server:
            try:
                _load_and_watch(args, server, soak)
            except (EngineFailure, ServerError) as error:
                lines = log_path.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
                soak.problems.append("\n".join([f"{error}; the server's log ends with", *lines]))
        try:
            # the server has written the last steps when it ended
            soak.steps_ms = decode_times(read_trace(trace_path).steps)
        except ConfigError as error:
            # one that was killed has said little, and why it was is known
            soak.problems += [] if soak.problems else [str(error)]
    return soak


def _load_and_watch(args: argparse.Namespace, server: RunningServer, soak: Soak) -> None:
    """Raises EngineFailure or ServerError when the server is no more; what was seen before is in `soak`."""
    shares = (args.cancel_share, args.invalid_share, args.reconnect_share)
    job = Job(server.grpc_url, args.concurrency, args.seconds, args.seed, *shares)
    sampler = Sampler(server.pid, server.metrics_address)
    soak.busy_cores_before = busy_cores()
    soak.samples.append(sampler.sample(0.0, Counts()))
    with RunningLoad(job) as load:
        begin_s = time.monotonic()
        try:
            # one when it has ended would be of a server without clients, which comes later
            while not load.wait(begin_s + len(soak.samples) * args.every - time.monotonic()):
                soak.samples.append(sampler.sample(time.monotonic() - begin_s, load.counts))
        finally:
            soak.problems += load.problems
    time.sleep(IDLE_S)
    soak.idle = sampler.sample(time.monotonic() - begin_s, load.counts)
    soak.problems += left_over(soak.idle)
    soak.busy_cores_after = busy_cores()


def _report(args: argparse.Namespace, options: ServerOptions, soak: Soak) -> None:
    config = engine_config(options)
    last = soak.samples[-1] if soak.samples else None
    if last is not None and last.time_s > 0:
        after = "" if soak.busy_cores_after is None else f", {soak.busy_cores_after:.2f} after"
        print(
            f"{config.model}, {options.mode}: {args.concurrency} clients for {last.time_s:.0f} s, "
            f"{last.counts.output_tokens / last.time_s:.1f} tokens/s; weight_quantization "
            f"{config.weight_quantization}, kv_cache_dtype {config.kv_cache_dtype}, seed {args.seed}; others took "
            f"{soak.busy_cores_before:.2f} cores before{after}\n"
        )
        print(held_table(soak.samples, soak.idle), end="\n\n")
    if soak.steps_ms:
        print(steps_table(soak.steps_ms))
    if args.json:
        content = {
            "machine": machine(),
            "mode": options.mode,
            "engine": asdict(config),
            "load": {name: getattr(args, name) for name in _LOAD_OPTIONS},
            "growth": grown(soak.samples),
            "steps": {num: asdict(step_times(times)) for num, times in soak.steps_ms.items()},
            **asdict(soak),
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


_LOAD_OPTIONS = ("concurrency", "seconds", "every", "seed", "cancel_share", "invalid_share", "reconnect_share")


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    if args.concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, not {args.concurrency}")
    if not (args.every > 0 and math.isfinite(args.every)):
        raise ConfigError(f"--every must be seconds above 0, not {args.every}")
    if not (math.isfinite(args.seconds) and args.seconds >= (MIN_SAMPLES - 1) * args.every):
        raise ConfigError(
            f"--seconds must be at least {MIN_SAMPLES - 1} times --every ({args.every}), not {args.seconds}"
        )
    for name in ("cancel_share", "invalid_share", "reconnect_share"):
        if not 0 <= getattr(args, name) <= 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be from 0 to 1, not {getattr(args, name)}")
    if args.cancel_share + args.invalid_share >= 1:
        raise ConfigError("--cancel-share and --invalid-share must be less than 1 together: some requests must finish")
    if args.json:
        check_can_write("--json", args.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="soak.py",
        description="Whether a server under load grows, and how steady its steps are.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        metavar="S",
        help=f"of load; growth is told from {MIN_FINISHED} answers on",
    )
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="clients, a connection each")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="between two samples")
    parser.add_argument("--cancel-share", type=float, default=0.15, help="of requests that are left midway")
    parser.add_argument("--invalid-share", type=float, default=0.05, help="of requests that must be refused")
    parser.add_argument(
        "--reconnect-share", type=float, default=0.1, help="of requests after which the client connects anew"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is sent")
    parser.add_argument("--mode", default="inflight", metavar="NAME", help="a config of the repository")
    add_engine_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every sample and every step's time")
    return parser
