"""The running model instance: Triton's calls go in, parsed requests go to the engine, replies to the writer."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from noria.config import EngineConfig
from noria.config_sources import ENVIRONMENT_VARIABLE, load_engine_config, own_parameters
from noria.engine.build import EngineParts, build_engine
from noria.engine.engine_loop import EngineLoop
from noria.engine.outputs import StepReport
from noria.errors import ConfigError, EngineFailure, InvalidRequest, NoriaError
from noria.sequence import Request
from noria.serving.held_replies import HeldReplies
from noria.serving.machine import check_shm
from noria.serving.metric_names import MetricNames
from noria.serving.metrics_publisher import MetricsPublisher
from noria.serving.parent_watch import watch_parent
from noria.serving.prompt import PromptEncoder
from noria.serving.reply import Reply
from noria.serving.response_writer import ResponseWriter
from noria.serving.sinks import DecoupledSink, UnarySink, refuse
from noria.serving.triton_io import ParsedRequest, parse_request
from noria.serving.triton_metrics import TritonMetrics
from noria.serving.unload_watch import UnloadWatch

log = logging.getLogger(__name__)

ENGINE_STOP_S = 15.0
WRITER_STOP_S = 10.0
METRICS_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class ServingMode:
    """How Triton calls this model, read from its config.

    is_closed: `execute` returns when its batch is over, so that Triton's queue, delay and preferred sizes form batches.
    """

    is_decoupled: bool
    is_closed: bool
    is_batched: bool


class GenerationService:
    """`execute` on Triton's thread; the engine, the writer and the metrics' publisher on their own."""

    def __init__(
        self, parts: EngineParts, config: EngineConfig, mode: ServingMode, model_name: str, model_version: str
    ) -> None:
        self._parts = parts
        self._mode = mode
        self._encoder = PromptEncoder(parts.tokenizer, parts.limits.max_prompt_len)
        self._request_ids = itertools.count(1)
        self._batch_ids = itertools.count(1)
        self._writer = ResponseWriter(
            abort=lambda request_ids: self._loop.abort(request_ids),
            held=HeldReplies(
                config.max_unsent_bytes,
                config.slow_reader_timeout_s,
                pause=lambda request_ids: self._loop.pause(request_ids),
                resume=lambda request_ids: self._loop.resume(request_ids),
            ),
            stream_interval=config.stream_interval,
            is_unloading=UnloadWatch(model_name).is_unloading,
            decode_token=lambda token_id: parts.tokenizer.decode([token_id], skip_special_tokens=False),
        )
        stats = parts.engine.stats()
        levels = tuple(level.level for level in stats.levels)
        names = MetricNames(model_name, model_version, config.batching_mode, levels)
        self._publisher = MetricsPublisher(TritonMetrics(names), stats)
        self._loop = EngineLoop(parts.engine, self._deliver)
        self._publisher.start()
        self._writer.start()
        self._loop.start()

    @classmethod
    def start(
        cls, model_config: dict[str, Any], model_name: str, model_version: str, engine_json: Path
    ) -> GenerationService:
        """Load the model and start the threads. Raises ConfigError."""
        logging.basicConfig(level=logging.INFO, format="noria %(levelname)s %(name)s: %(message)s")
        config, mode = read_configs(model_config, engine_json, os.environ.get(ENVIRONMENT_VARIABLE))
        check_numpy(np.__version__)
        watch_parent()
        try:
            check_shm()
        except ConfigError as error:
            # the launcher refuses to start; here Triton has what it needs for now, so say it and go on
            log.warning("%s", error)
        parts = build_engine(config, progress=log.info)
        return cls(parts, config, mode, model_name, model_version)

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer what is bad at once, submit the rest as one call. Waits for the answers if the batch is closed."""
        sink_type = DecoupledSink if self._mode.is_decoupled else UnarySink
        sinks = [sink_type(request) for request in requests]
        batch_id = next(self._batch_ids)
        parts: list[Request] = []
        for request, sink in zip(requests, sinks, strict=True):
            try:
                parsed = parse_request(request, self._encoder, self._parts.limits, self._mode.is_batched)
                if parsed.options.is_streamed and not self._mode.is_decoupled:
                    raise InvalidRequest("stream must be false, or be left out: this model's config is not decoupled")
                engine_requests = self._engine_requests(parsed, batch_id)
            except NoriaError as error:
                refuse(sink, error)
                self._publisher.count_invalid()
                continue
            except Exception as error:
                log.exception("a request could not be read")
                refuse(sink, EngineFailure(f"the request could not be read: {error}"))
                continue
            reply = Reply(parsed.options, engine_requests, [row.prompt_text for row in parsed.rows], parsed.n)
            self._writer.register(reply, sink)
            parts += engine_requests
        if parts:
            self._submit(parts)
        if self._mode.is_closed:
            for sink in sinks:
                sink.done.wait()
        return [sink.response for sink in sinks if isinstance(sink, UnarySink)] or None

    def close(self) -> None:
        """End what is live with an error and stop both threads, in a bounded time."""
        log.info("closing")
        if not self._loop.stop(ENGINE_STOP_S):
            log.error("the engine did not stop within %.0f s", ENGINE_STOP_S)
        if not self._writer.stop(WRITER_STOP_S):
            log.error("the response writer did not stop within %.0f s", WRITER_STOP_S)
        if not self._publisher.stop(METRICS_STOP_S):
            log.error("the metrics were not all published within %.0f s", METRICS_STOP_S)
        log.info("closed")

    def _deliver(self, report: StepReport) -> None:
        """On the engine's thread."""
        self._publisher.deliver(report)
        if report.outputs:
            self._writer.deliver(report)

    def _submit(self, requests: Sequence[Request]) -> None:
        try:
            self._loop.submit(requests)
        except EngineFailure as error:
            self._writer.fail([request.request_id for request in requests], error)

    def _engine_requests(self, parsed: ParsedRequest, batch_id: int) -> list[Request]:
        now = time.monotonic()
        return [
            Request(
                request_id=next(self._request_ids),
                prompt_token_ids=row.prompt_token_ids,
                params=row.params,
                seed=seed,
                stop_token_ids=self._stop_token_ids(
                    parsed_ignore_eos=row.params.ignore_eos, own=row.params.stop_token_ids
                ),
                deadline=None if parsed.timeout_s is None else now + parsed.timeout_s,
                batch_id=batch_id,
            )
            for row in parsed.rows
            for seed in _seeds(row.params.seed, parsed.n)
        ]

    def _stop_token_ids(self, parsed_ignore_eos: bool, own: tuple[int, ...]) -> frozenset[int]:
        eos = () if parsed_ignore_eos else self._parts.eos_token_ids
        return frozenset(eos) | frozenset(own)


def _seeds(seed: int | None, n: int) -> list[int]:
    """One for each answer to a prompt; the first is the request's own, so that n does not change it."""
    first = secrets.randbits(64) if seed is None else seed
    return [(first + index) % 2**64 for index in range(n)]


def check_numpy(version: str) -> None:
    """Raises ConfigError for a numpy with which string tensors arrive damaged: Triton's stub was built for numpy 1."""
    if int(version.split(".")[0]) >= 2:
        raise ConfigError(f"numpy must be below 2 in Triton's stub, not {version}: pip install 'numpy<2'")


def read_configs(
    model_config: dict[str, Any], engine_json: Path, environment: str | None
) -> tuple[EngineConfig, ServingMode]:
    """The engine's configuration and how Triton will call it. Raises ConfigError where the two contradict."""
    parameters = {key: value["string_value"] for key, value in model_config.get("parameters", {}).items()}
    config = load_engine_config(engine_json, own_parameters(parameters), environment)
    max_batch_size = model_config.get("max_batch_size", 0)
    is_closed = config.batching_mode != "inflight"
    mode = ServingMode(
        is_decoupled=bool(model_config.get("model_transaction_policy", {}).get("decoupled", False)),
        is_closed=is_closed,
        is_batched=max_batch_size > 0,
    )
    if is_closed and max_batch_size:
        # the batch that Triton forms is the batch that runs, so its size is set in one place, the pbtxt
        config = replace(
            config,
            max_num_seqs=max_batch_size,
            max_num_batched_tokens=max(config.max_num_batched_tokens, max_batch_size),
        )
    if not is_closed and not mode.is_decoupled:
        raise ConfigError("batching_mode inflight needs model_transaction_policy { decoupled: true }")
    groups = model_config.get("instance_group", [])
    num_instances = sum(group.get("count", 1) * max(1, len(group.get("gpus", []))) for group in groups)
    if num_instances > 1:
        raise ConfigError(f"instance_group must have one instance, not {num_instances}: each would load its own model")
    return config, mode
