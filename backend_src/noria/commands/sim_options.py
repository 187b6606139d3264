"""What the commands that simulate share: their arguments, and the costs, engine and requests that those amount to.

Starts nothing and loads no model: a calibration file says of the model what a simulation needs to know.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from noria.commands.common import add_engine_arguments, engine_config, server_options
from noria.config import EngineConfig, default_cache_dir
from noria.errors import ConfigError
from noria.presets import PRESETS
from noria.serving.server import ServerOptions, check_mode
from noria.simulation.analytic import CHIPS, MODEL_SHAPES, AnalyticCostModel
from noria.simulation.cost_model import MeasuredCostModel
from noria.simulation.requests import SimRequest, make_requests, with_shared_prefix
from noria.simulation.trace import read_trace_requests
from noria_bench import length_laws
from noria_bench.arrivals import all_at_once, gamma
from noria_bench.errors import BenchError
from noria_bench.lengths import LengthLaw, draw_lengths
from noria_bench.workload import seed_workload

GIB = 2**30
ANALYTIC = "analytic:"
DEFAULT_NUM_REQUESTS = 32
DEFAULT_PROMPT_TOKENS = "lognormal:128:0.8:2048"


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    """The flag that `load_cost_model` reads."""
    parser.add_argument(
        "--costs",
        metavar="FILE|analytic:CHIP:MODEL",
        help="how long steps take: what `noria calibrate` wrote (default: its file for this model), or the bound from "
        f"data sheets; chips are {', '.join(CHIPS)}, models {', '.join(MODEL_SHAPES)}",
    )


def add_simulated_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `simulated_config` reads, beside those of the costs."""
    add_engine_arguments(parser)
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), help="schedule as another system does, under the keys of --engine"
    )
    parser.add_argument("--num-kv-blocks", type=count, metavar="N", help="of the KV cache (default: what fits)")


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `load_requests` reads; --concurrency is the caller's."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload",
        default="seed",
        metavar="seed|FILE.json|LAW",
        help="the lengths of `noria bench seed` (default); a JSON list of requests with the fields of SimRequest; "
        f"or output lengths by a law: {length_laws.LAW_FORMS}",
    )
    group.add_argument(
        "--prompt-tokens", metavar="LAW", help=f"prompt lengths beside a law (default: {DEFAULT_PROMPT_TOKENS})"
    )
    group.add_argument("--trace", type=Path, metavar="FILE", help="lengths and arrivals: an Azure or Mooncake trace")
    group.add_argument(
        "--trace-speed", type=float, default=1.0, metavar="X", help="arrivals come X times as fast (default: 1)"
    )
    group.add_argument(
        "--num-requests",
        type=count,
        metavar="N",
        help=f"default: {DEFAULT_NUM_REQUESTS}, or all of a file's",
    )
    group.add_argument(
        "--rate", type=float, metavar="R", help="Poisson arrivals, R a second (default: all at once, or as in the file)"
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="CV", help="of the gaps between arrivals; above 1 come bursts"
    )
    group.add_argument("--scale", type=float, default=1.0, help="multiplies prompt and output lengths (default: 1)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: 0)")
    group.add_argument(
        "--shared-prefix", metavar="TOKENS[:SHARE]", help="a share of the prompts (default: all) begins alike"
    )
    group.add_argument(
        "--concurrency", type=count, metavar="N", help="requests under way at a time (default: no limit)"
    )


def count(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def load_cost_model(args: argparse.Namespace, config: EngineConfig) -> AnalyticCostModel | MeasuredCostModel:
    """Raises ConfigError; where this machine has not been calibrated it says how to."""
    if args.costs is not None and args.costs.startswith(ANALYTIC):
        return _analytic(args.costs)
    path = default_costs_path(config) if args.costs is None else Path(args.costs)
    if args.costs is None and not path.is_file():
        raise ConfigError(
            f"how long a step of {config.model} in {config.dtype} takes on this machine has not been measured: run "
            "`noria calibrate` with the same --model and --engine, or give --costs a file or analytic:CHIP:MODEL"
        )
    return MeasuredCostModel.load(path)


def default_costs_path(config: EngineConfig) -> Path:
    """Where `noria calibrate` writes what it measures with this model."""
    cache = Path(config.cache_dir) if config.cache_dir else default_cache_dir()
    return cache / "calibration" / f"{Path(config.model).stem}-{config.dtype}.json"


def _analytic(text: str) -> AnalyticCostModel:
    chip, _, model = text.removeprefix(ANALYTIC).partition(":")
    if chip not in CHIPS or model not in MODEL_SHAPES:
        raise ConfigError(
            f"--costs must be analytic:CHIP:MODEL with a chip of {', '.join(CHIPS)} and a model of "
            f"{', '.join(MODEL_SHAPES)}, not {text!r}"
        )
    return AnalyticCostModel(CHIPS[chip], MODEL_SHAPES[model])


def simulated_options(args: argparse.Namespace) -> ServerOptions:
    """Those of a server with the simulated engine. Raises ConfigError."""
    options = server_options(args)
    given = {"preset": args.preset, "num_kv_blocks": args.num_kv_blocks}
    return replace(options, engine=dict(options.engine) | {k: v for k, v in given.items() if v is not None})


def simulated_config(args: argparse.Namespace, mode: str) -> tuple[EngineConfig, int]:
    """The configuration that a server in this mode would load, and the KV blocks that it would have.

    The configuration's num_host_blocks is as many as there would be: 0 where nothing is swapped. Raises ConfigError.
    """
    options = replace(simulated_options(args), mode=mode)
    check_mode(options.repository, mode)
    config = engine_config(options)
    cost_model = load_cost_model(args, config)
    num_blocks, num_host_blocks = config.num_kv_blocks, config.num_host_blocks
    if num_blocks is None:
        num_blocks = _num_blocks(cost_model, config, has_own_size="kv_cache_gib" in options.engine)
    if config.preemption != "swap" or config.batching_mode != "inflight":
        num_host_blocks = 0
    elif num_host_blocks is None:
        num_host_blocks = int(config.swap_space_gib * GIB / (_kv_bytes_per_token(cost_model) * config.block_size))
    return replace(config, num_host_blocks=num_host_blocks), num_blocks


def _num_blocks(cost_model: AnalyticCostModel | MeasuredCostModel, config: EngineConfig, has_own_size: bool) -> int:
    """has_own_size: kv_cache_gib was asked for, and not just this machine's default."""
    if isinstance(cost_model, AnalyticCostModel) and not has_own_size:
        try:
            return cost_model.num_kv_blocks(config.block_size)
        except ValueError as error:
            raise ConfigError(f"--costs: {error}; or state --num-kv-blocks") from None
    # as runtime.build: one block of the memory is for padding rows
    num_blocks = int(config.kv_cache_gib * GIB / (_kv_bytes_per_token(cost_model) * config.block_size)) - 1
    if num_blocks < 1:
        raise ConfigError(f"kv_cache_gib ({config.kv_cache_gib}) does not hold a block of this model")
    return num_blocks


def _kv_bytes_per_token(cost_model: AnalyticCostModel | MeasuredCostModel) -> float:
    if isinstance(cost_model, AnalyticCostModel):
        return cost_model.model.kv_bytes_per_token
    try:
        return float(cost_model.origin["kv_bytes_per_token"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            "the costs do not say what a token takes in the KV cache (origin.kv_bytes_per_token): state --num-kv-blocks"
        ) from None


def load_requests(args: argparse.Namespace) -> list[SimRequest]:
    """What is asked for, by arrival. Raises ConfigError."""
    if args.trace_speed != 1 and args.trace is None:
        raise ConfigError("--trace-speed needs --trace")
    if args.prompt_tokens is not None and (args.trace is not None or not _is_law(args.workload)):
        raise ConfigError("--prompt-tokens needs a --workload that is a law of lengths: the others have their own")
    try:
        requests = _requests(args)
        if args.shared_prefix is not None:
            requests = with_shared_prefix(requests, *_shared_prefix(args.shared_prefix), args.seed)
        return requests
    except ValueError as error:
        raise ConfigError(f"workload: {error}") from None


def _is_law(workload: str) -> bool:
    return workload != "seed" and not workload.endswith(".json")


def _shared_prefix(text: str) -> tuple[int, float]:
    num_tokens, _, share = text.partition(":")
    try:
        return int(num_tokens), float(share or 1)
    except ValueError:
        raise ConfigError(f"--shared-prefix takes TOKENS or TOKENS:SHARE, not {text!r}") from None


def _requests(args: argparse.Namespace) -> list[SimRequest]:
    if args.trace is not None:
        requests = read_trace_requests(args.trace, speed=args.trace_speed, limit=args.num_requests)
    elif args.workload == "seed":
        items = seed_workload(args.num_requests or DEFAULT_NUM_REQUESTS, args.scale, args.seed).items
        requests = [SimRequest(0.0, item.num_prompt_tokens, item.max_tokens) for item in items]
    elif args.workload.endswith(".json"):
        requests = _read_requests(Path(args.workload))[: args.num_requests]
    else:
        num = args.num_requests or DEFAULT_NUM_REQUESTS
        prompts = draw_lengths(parse_law(args.prompt_tokens or DEFAULT_PROMPT_TOKENS), num, args.seed)
        # not with the prompts' seed: the lengths would go together
        outputs = draw_lengths(parse_law(args.workload), num, args.seed + 1)
        requests = make_requests(all_at_once(num), prompts, outputs)
    if args.workload != "seed" or args.trace is not None:
        requests = [_scaled(request, args.scale) for request in requests]
    if args.rate is None:
        return requests
    arrivals_s = gamma(len(requests), args.rate, args.burstiness, args.seed + 2)
    return [replace(request, arrival_s=arrival_s) for request, arrival_s in zip(requests, arrivals_s, strict=True)]


def parse_law(text: str) -> LengthLaw:
    """Raises ConfigError naming the laws there are."""
    try:
        return length_laws.parse_law(text)
    except BenchError as error:
        raise ConfigError(str(error)) from None


def _scaled(request: SimRequest, scale: float) -> SimRequest:
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a finite number above 0, not {scale}")
    prompt, output = (max(1, round(n * scale)) for n in (request.num_prompt_tokens, request.num_output_tokens))
    max_tokens = None if request.max_tokens is None else max(output, round(request.max_tokens * scale))
    ids = request.prompt_token_ids
    if ids is not None:
        # what prompts share is scaled with them
        ids = tuple(ids[min(int(place / scale), len(ids) - 1)] for place in range(prompt))
    return replace(
        request, num_prompt_tokens=prompt, num_output_tokens=output, max_tokens=max_tokens, prompt_token_ids=ids
    )


def _read_requests(path: Path) -> list[SimRequest]:
    """[{"num_prompt_tokens": 100, "num_output_tokens": 20, "arrival_s": 0.5}, ...]"""
    valid = [entry.name for entry in fields(SimRequest) if entry.name != "prompt_token_ids"]
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--workload: cannot read {path}: {error.strerror}") from None
    try:
        entries: list[dict[str, Any]] = json.loads(text)
        return [SimRequest(**{"arrival_s": 0.0} | entry) for entry in entries]
    except (ValueError, TypeError) as error:
        reason = str(error).removeprefix("SimRequest.__init__() ")
        raise ConfigError(f"{path} must be a JSON list of objects of {', '.join(valid)}: {reason}") from None
