"""Puts an engine together from its configuration: model, tokenizer, cache, scheduler. The only place that knows all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from noria.config import EngineConfig
from noria.engine.engine import Engine
from noria.engine.metrics import StatsCounter
from noria.engine.request_limits import RequestLimits, request_limits
from noria.engine.trace import StepTrace
from noria.errors import ConfigError
from noria.models.model_store import resolve_model
from noria.models.tokenizer import Tokenizer, load_tokenizer
from noria.runtime.build import build_runner
from noria.scheduling.build import build_scheduler


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine and what a caller needs to make requests for it."""

    engine: Engine
    tokenizer: Tokenizer
    limits: RequestLimits
    eos_token_ids: tuple[int, ...]


def build_engine(config: EngineConfig, progress: Callable[[str], None]) -> EngineParts:
    """Find, convert if need be, and load the model; size the cache; run the largest step once. Raises ConfigError.

    progress: told in a sentence what is being done.
    """
    model_dir = resolve_model(
        config.model, Path(config.cache_dir) if config.cache_dir else None, config.dtype, progress
    )
    progress(f"loading {model_dir}")
    runner = build_runner(config, model_dir)
    tokenizer = load_tokenizer(model_dir)
    model, num_blocks = runner.decoder.config, runner.cache.num_blocks
    limits = request_limits(config, model.max_position_embeddings, num_blocks * config.block_size, model.vocab_size)
    try:
        runner.warm_up(config.max_num_seqs, config.max_num_batched_tokens)
    except RuntimeError as error:
        raise ConfigError(
            f"a first step of max_num_batched_tokens ({config.max_num_batched_tokens}) tokens or max_num_seqs "
            f"({config.max_num_seqs}) rows failed, most often for want of memory: {error}"
        ) from error
    scheduler = build_scheduler(config, num_blocks, num_host_blocks=runner.num_host_blocks)
    trace = StepTrace(Path(config.trace_path), config, num_blocks) if config.trace_path else None
    runs_ahead = config.run_ahead and config.batching_mode == "inflight" and runner.can_run_ahead
    counter = StatsCounter(num_blocks, config.block_size)
    engine = Engine(scheduler, runner, tokenizer, counter, trace=trace, ahead=runner if runs_ahead else None)
    host_blocks = f", {runner.num_host_blocks} in the host pool" if runner.num_host_blocks else ""
    progress(
        f"ready: {num_blocks} KV blocks of {config.block_size} tokens{host_blocks}, {config.max_num_seqs} slots, "
        f"{config.dtype}"
    )
    return EngineParts(engine, tokenizer, limits, model.eos_token_ids or tokenizer.eos_token_ids)
