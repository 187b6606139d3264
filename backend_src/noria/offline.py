"""The engine without a server, under the client's workload: the difference to a served run is what serving costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields, replace

from noria.config import EngineConfig
from noria.engine.build import EngineParts, build_engine
from noria.engine.outputs import EngineStats
from noria.errors import NoriaError, Overloaded
from noria.sampling_params import SamplingParams, sampling_params_from
from noria.sequence import Request
from noria_bench.engine_counters import EngineCounters
from noria_bench.measurement import WARM_UP_PROMPT, WARM_UP_TOKENS
from noria_bench.plain_run import plain_run
from noria_bench.records import Chunk, Outcome, RequestRecord
from noria_bench.results import Run
from noria_bench.workload import WorkItem, Workload

MODE_NAME = "engine alone"


def run_offline(
    config: EngineConfig, workload: Workload, progress: Callable[[str], None]
) -> tuple[Run, list[RequestRecord]]:
    """All items at once through the engine in this process, in the mode of `config`, without due times and cancels.

    Raises ConfigError.
    """
    parts = build_engine(config, progress)
    warm_up = replace(sampling_params_from(workload.sampling), max_tokens=WARM_UP_TOKENS)
    _run(parts, [_request(parts, config, 0, WARM_UP_PROMPT, warm_up)])
    before = parts.engine.stats()
    requests = [
        _request(parts, config, index, item.prompt, _sampling(workload, item))
        for index, item in enumerate(workload.items, start=1)
    ]
    records = [
        replace(record, index=index, request_class=item.request_class, is_warm_up=item.is_warm_up)
        for index, (record, item) in enumerate(zip(_run(parts, requests), workload.items, strict=True))
    ]
    parts.engine.close()
    counters = _counters(parts.engine.stats()) - _counters(before)
    return plain_run(MODE_NAME, records, counters), records


def _sampling(workload: Workload, item: WorkItem) -> SamplingParams:
    return replace(sampling_params_from({**workload.sampling, **item.sampling}), max_tokens=item.max_tokens)


def _request(parts: EngineParts, config: EngineConfig, index: int, prompt: str, params: SamplingParams) -> Request:
    token_ids = tuple(parts.tokenizer.encode(prompt))
    parts.limits.check(token_ids, params)
    stop_token_ids = frozenset() if params.ignore_eos else frozenset(parts.eos_token_ids)
    # in a closed mode, batches of consecutive items, as Triton would form them
    batch_id = (index - 1) // config.max_num_seqs
    return Request(index, token_ids, params, seed=params.seed or 0, stop_token_ids=stop_token_ids, batch_id=batch_id)


def _run(parts: EngineParts, requests: list[Request]) -> list[RequestRecord]:
    engine = parts.engine
    chunks: dict[int, list[Chunk]] = {request.request_id: [] for request in requests}
    ended: dict[int, tuple[float, NoriaError | None]] = {}
    sent_s = time.monotonic()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        now = time.monotonic()
        for output in engine.take_outputs():
            if output.tokens:
                chunks[output.request_id].append(Chunk(now, len(output.tokens)))
            if output.finish_reason is not None:
                ended[output.request_id] = (now, output.error)
    return [_record(request, sent_s, chunks[request.request_id], *ended[request.request_id]) for request in requests]


def _record(
    request: Request, sent_s: float, chunks: list[Chunk], ended_s: float, error: NoriaError | None
) -> RequestRecord:
    outcome = Outcome.REJECTED if isinstance(error, Overloaded) else Outcome.FAILED
    return RequestRecord(
        index=request.request_id,
        sent_s=sent_s,
        ended_s=ended_s,
        num_input_tokens=len(request.prompt_token_ids),
        chunks=tuple(chunks),
        error=None if error is None else str(error),
        outcome=Outcome.FINISHED if error is None else outcome,
    )


def _counters(stats: EngineStats) -> EngineCounters:
    renamed = {f"requests_{end}": f"num_{end}" for end in ("finished", "failed", "rejected", "expired", "cancelled")}
    renamed["generation_tokens"] = "num_generated_tokens"
    names = [f.name for f in fields(EngineCounters)]
    return EngineCounters(**{name: getattr(stats, renamed.get(name, f"num_{name}")) for name in names})
