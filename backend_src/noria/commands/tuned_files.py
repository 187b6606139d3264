"""The files of a tuned configuration: engine.json and config.pbtxt as the server reads them, and what was predicted."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from noria.commands.sim_options import simulated_options
from noria.config import EngineConfig, PriorityClass
from noria.errors import ConfigError
from noria.simulation.batch_former import DynamicBatching
from noria.simulation.trial import Measurement
from noria.simulation.tuner import TuningResult


def write_tuned_files(
    result: TuningResult, args: argparse.Namespace, original: EngineConfig, num_blocks: int
) -> list[Path]:
    """Into args.output. original: the configuration whose knobs were tuned. Raises ConfigError."""
    best = result.best
    config = replace(original, preset=None, num_kv_blocks=num_blocks, **best.knobs)
    if best.batching is not None:
        config = replace(config, max_num_batched_tokens=best.config.max_num_batched_tokens)
    source = simulated_options(args).repository / "llm" / "configs" / f"{config.batching_mode}.pbtxt"
    texts = {
        "engine.json": json.dumps(engine_json(config, best.knobs), indent=2) + "\n",
        "config.pbtxt": model_config(source, best.batching, f"noria tune --slo {args.slo}"),
        "tuned.json": json.dumps(predicted_json(result, args), indent=2) + "\n",
    }
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (args.output / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {args.output} cannot be written: {error.strerror}") from None
    return [args.output / name for name in texts]


def check_output(folder: Path) -> None:
    """Before a minute of search, without leaving a trace of it. Raises ConfigError if the folder cannot be made."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(f"--output {folder} cannot be written: {existing} is no folder that may be written to")


def engine_json(config: EngineConfig, stated: Collection[str]) -> dict[str, Any]:
    """The keys that are not at their defaults, and those in `stated`; `load_engine_config` makes an equal configuration
    of them."""
    default = EngineConfig()
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    changed = {name: value for name, value in values.items() if name in stated or value != getattr(default, name)}
    if config.priority_classes:
        changed["priority_classes"] = {
            str(level): _without_none(entry) for level, entry in config.priority_classes.items()
        }
    return changed


def model_config(path: Path, batching: DynamicBatching | None, origin: str) -> str:
    """A mode's config.pbtxt with the sizes and the delay of `batching`. Raises ConfigError if it cannot be read."""
    from google.protobuf import text_format  # type: ignore[import-untyped]
    from tritonclient.grpc import model_config_pb2

    try:
        config = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if batching is not None:
        config.max_batch_size = batching.max_batch_size
        config.dynamic_batching.preferred_batch_size[:] = batching.preferred_batch_sizes
        config.dynamic_batching.max_queue_delay_microseconds = round(1e6 * batching.max_queue_delay_s)
    return f"# Written by {origin}\n{text_format.MessageToString(config)}"


def predicted_json(result: TuningResult, args: argparse.Namespace) -> dict[str, Any]:
    workload = {
        name: getattr(args, name)
        for name in ("workload", "prompt_tokens", "num_requests", "scale", "seed", "shared_prefix", "burstiness")
    }
    return {
        "slo": args.slo,
        "workload": {"trace": args.trace and str(args.trace), **workload},
        "costs": args.costs,
        "configuration": str(result.best),
        "requests_per_s": result.rate,
        "highest_requests_per_s_by_seed": list(result.rates),
        "seconds_by_seed": [dict(run.figures) for run in result.winner],
        "front": [_run_json(run) for run in result.front],
    }


def _run_json(run: Measurement) -> Mapping[str, Any]:
    return {
        "requests_per_s": run.trial.rate,
        "configuration": str(run.trial.candidate),
        "engine": run.trial.candidate.knobs,
        "seconds": dict(run.figures),
    }


def _without_none(entry: PriorityClass) -> dict[str, Any]:
    return {name: value for name, value in asdict(entry).items() if value is not None}
