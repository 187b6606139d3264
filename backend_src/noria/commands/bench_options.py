"""What `noria bench` was asked for: its flags, and the same as data that a result keeps and a replay reads."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from noria.commands.bench_servers import Candidate
from noria.commands.common import MODES
from noria_bench.errors import BenchError
from noria_bench.slo import PRESETS, parse_slo
from noria_bench.workload_file import load_workload, parse_workload
from noria_bench.workload_spec import WorkloadSpec
from noria_client.cli import positive
from noria_client.client import DEFAULT_MODEL, PROTOCOLS

DEFAULT_OUTPUT = Path("bench-results")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """All that decides what is measured; where the result goes is not among it.

    workload: as in its file; workload_source: the name it was given by. candidates: label, mode and engine overrides of
    each. sweep: lowest and highest rate; probe_s: how long requests come at each rate tried.
    slo: of the classes that have none of their own. url, metrics_url, http_url: of a server that runs already.
    """

    workload: Mapping[str, Any]
    workload_source: str
    candidates: Sequence[Mapping[str, Any]]
    num_repeats: int = 1
    seed: int = 0
    scale: float = 1.0
    rate: float | None = None
    concurrency: int | None = None
    num_requests: int | None = None
    slo: str | None = None
    sweep: Sequence[float] | None = None
    probe_s: float = 60.0
    resolution: float = 0.1
    timeout_s: float | None = None
    protocol: str = "grpc"
    model: str = DEFAULT_MODEL
    has_exact_prompts: bool = True
    url: str | None = None
    http_url: str | None = None
    metrics_url: str | None = None
    is_reloading: bool = False
    has_engine_alone: bool = False
    keeps_records: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BenchOptions:
        """Raises BenchError for what `to_json` did not write."""
        unknown = set(values) - {entry.name for entry in fields(cls)}
        if unknown:
            raise BenchError(f"--replay: this version does not know the argument {min(unknown)!r} of the result")
        return cls(**values)

    def spec(self) -> WorkloadSpec:
        return parse_workload(self.workload, self.workload_source)

    def variants(self) -> list[Candidate]:
        return [Candidate(**candidate) for candidate in self.candidates]


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `bench_options` reads, beside those of the engine."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "workload",
        nargs="?",
        default="seed",
        metavar="WORKLOAD",
        help="seed (default), a file (.yaml, .json; see docs/workloads.md), a trace (.csv, .jsonl), or a law of output "
        "lengths such as exponential:128:512",
    )
    group.add_argument("--prompt-tokens", metavar="LAW", help="prompt lengths beside a law of output lengths")
    group.add_argument("--num-requests", type=positive(int), metavar="N", help="instead of the workload's")
    group.add_argument(
        "--scale", type=positive(float), default=1.0, help="multiplies prompt and output lengths (default: 1)"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of all that is drawn; repeats count up from it"
    )
    group.add_argument(
        "--common-words", action="store_true", help="prompts of common words, without the served model's tokenizer"
    )
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=positive(int), metavar="N", help="a closed loop with N requests under way")
    load.add_argument(
        "--rate", type=positive(float), metavar="R", help="an open loop: R requests a second, as the workload says"
    )
    load.add_argument(
        "--slo", metavar="KEY=S,...", help=f"objectives, such as {PRESETS['cpu']}, or {', '.join(PRESETS)}"
    )
    load.add_argument(
        "--sweep", metavar="LOW:HIGH", help="find the highest rate between these that keeps --slo, for each mode"
    )
    load.add_argument(
        "--probe-seconds", type=positive(float), default=60.0, metavar="S", help="of each rate (default: 60)"
    )
    load.add_argument(
        "--resolution",
        type=positive(float),
        default=0.1,
        metavar="X",
        help="of the sweep: stop within this share (default: 0.1)",
    )
    load.add_argument("--timeout", type=positive(float), metavar="S", help="the server ends a request after so long")
    load.add_argument("--protocol", choices=PROTOCOLS, default="grpc", help="default: grpc")
    compared = parser.add_argument_group("what is compared")
    compared.add_argument(
        "--modes", default=None, metavar="M,M", help=f"of {', '.join(MODES)} (default: inflight), in turn"
    )
    compared.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME[@MODE]:KEY=VALUE,...",
        help="a configuration of its own, over --engine (mode: inflight); may be repeated",
    )
    compared.add_argument(
        "--engine-alone", action="store_true", help="at the end, the in-flight engine without a server, too"
    )
    compared.add_argument("--repeat", type=positive(int), default=1, metavar="N", help="each so often (default: 1)")
    compared.add_argument(
        "--reload", action="store_true", help="one server that loads its model anew, rather than a server for each run"
    )
    compared.add_argument(
        "--url", metavar="HOST:PORT", help="gRPC of a server that runs; with --modes it must control models explicitly"
    )
    compared.add_argument("--http-url", metavar="HOST:PORT", help="of that server (default: its host, port 8000)")
    compared.add_argument("--metrics-url", metavar="HOST:PORT", help="of that server (default: its host, port 8002)")
    result = parser.add_argument_group("result")
    result.add_argument(
        "--output", type=Path, metavar="DIR", help=f"a new directory (default: {DEFAULT_OUTPUT}/ and the time)"
    )
    result.add_argument(
        "--no-records", action="store_true", help="keep the summaries only, not each token's time stamp"
    )
    result.add_argument("--replay", type=Path, metavar="RESULT", help="run what made this result again")


def bench_options(args: argparse.Namespace) -> BenchOptions:
    """What was typed, checked as far as it can be without a server. Raises BenchError."""
    if args.rate is not None and args.concurrency is not None:
        raise BenchError("--rate makes an open loop and --concurrency a closed one: give one of them")
    sweep = None if args.sweep is None else _sweep(args.sweep)
    if sweep is not None and (args.rate is not None or args.concurrency is not None):
        raise BenchError("--sweep looks for the rate itself: leave out --rate and --concurrency")
    if sweep is not None and args.slo is None:
        raise BenchError(f"--sweep needs --slo: what is to be kept, such as {PRESETS['cpu']}")
    if args.engine_alone and (args.url or sweep or args.rate or args.concurrency):
        raise BenchError("--engine-alone sends all at once: leave out --url, --sweep, --rate and --concurrency")
    if args.url is None and (args.http_url or args.metrics_url):
        raise BenchError("--http-url and --metrics-url are of the server that --url names")
    for name in ("url", "http_url", "metrics_url"):
        value = getattr(args, name)
        if value is not None and not re.fullmatch(r"[^/\s]+:\d+", value):
            raise BenchError(f"--{name.replace('_', '-')} takes HOST:PORT, not {value!r}")
    if args.url is not None and args.reload:
        raise BenchError("--reload is of a server that is started: one that runs is reloaded when --modes are given")
    if args.url is not None and not (args.modes or args.variant) and (args.engine or args.model):
        raise BenchError("--engine and --model are of servers that load a config; one that runs is measured as it is")
    host = (args.url or "").rpartition(":")[0]
    spec = load_workload(args.workload, args.prompt_tokens)
    if args.engine_alone and spec.arrivals.is_open:
        raise BenchError("--engine-alone sends all at once, which this workload does not")
    if args.slo is not None and "queue_mean" in parse_slo(args.slo).limits_s:
        raise BenchError("--slo: of the queue the server tells p50, p95 and p99, no mean")
    return BenchOptions(
        workload=dict(spec.document),
        workload_source=args.workload,
        candidates=[asdict(candidate) for candidate in _candidates(args)],
        num_repeats=args.repeat,
        seed=args.seed,
        scale=args.scale,
        rate=args.rate,
        concurrency=args.concurrency,
        num_requests=args.num_requests,
        slo=args.slo,
        sweep=sweep,
        probe_s=args.probe_seconds,
        resolution=args.resolution,
        timeout_s=args.timeout,
        protocol=args.protocol,
        has_exact_prompts=not args.common_words,
        url=args.url,
        http_url=args.http_url or (f"{host}:8000" if args.url else None),
        metrics_url=args.metrics_url or (f"{host}:8002" if args.url else None),
        is_reloading=args.reload,
        has_engine_alone=args.engine_alone,
        keeps_records=not args.no_records,
    )


def _candidates(args: argparse.Namespace) -> list[Candidate]:
    """Empty for a server that runs as it is."""
    modes = args.modes.split(",") if args.modes else []
    if not modes and not args.variant and args.url is None:
        modes = ["inflight"]
    candidates = [Candidate(mode, mode, {}) for mode in modes] + [_variant(text) for text in args.variant]
    labels = [candidate.label for candidate in candidates]
    if len(set(labels)) < len(labels):
        raise BenchError(f"--modes and --variant must have different names, not {', '.join(labels)}")
    return candidates


def _variant(text: str) -> Candidate:
    """`swap:preemption=swap,num_host_blocks=64`, or `narrow@static:` and so on."""
    head, separator, overrides = text.partition(":")
    name, _, mode = head.partition("@")
    pairs = [part.partition("=") for part in overrides.split(",") if part]
    is_name = bool(name) and all(char.isalnum() or char in "-_." for char in name)
    if not separator or not is_name or any(not equals or not key for key, equals, _ in pairs):
        raise BenchError(
            f"--variant takes NAME[@MODE]:KEY=VALUE,... with a name of letters, digits and -_., not {text!r}"
        )
    return Candidate(name, mode or "inflight", {key: _value(value) for key, _, value in pairs})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _sweep(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        rates = float(low), float(high)
    except ValueError:
        rates = (math.nan, math.nan)
    if not 0 < rates[0] < rates[1] < math.inf:
        raise BenchError(f"--sweep takes LOW:HIGH in requests a second with 0 < LOW < HIGH, not {text!r}")
    return rates
