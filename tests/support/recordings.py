"""Recorded traces for tests: of real schedulers over the hash runner, a second a step, and made up step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from noria.config import EngineConfig
from noria.engine.trace import RowKind, StepTrace
from noria.scheduler_output import SchedulerOutput
from noria.scheduling.build import build_scheduler
from noria.sequence import Request
from noria.timeline.recorded_trace import RecordedEnd, RecordedRow, RecordedStep, RecordedTrace
from support.engines import HashRunner

# (request id, num_computed_tokens, num_tokens, kind)
Row = tuple[int, int, int, RowKind]


def record_run(
    path: Path, requests: Sequence[Request], num_blocks: int = 64, num_host_blocks: int = 0, **settings: object
) -> list[SchedulerOutput]:
    """Runs the requests to their end and records it; what the scheduler decided. Step n lasts from n to n + 1."""
    defaults = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, "prefix_caching": False}
    config = EngineConfig(**(defaults | settings))  # type: ignore[arg-type]
    scheduler = build_scheduler(config, num_blocks, num_host_blocks)
    runner = HashRunner(num_blocks, config.block_size, num_host_blocks)
    trace = StepTrace(path, config, num_blocks)
    for request in requests:
        scheduler.add(request)
    outputs = []
    while scheduler.has_work:
        now = float(len(outputs))
        output = scheduler.schedule(now)
        result = runner.execute(output)
        trace.record_step(output, now, now + 1)
        for update in scheduler.update(output, result):
            if update.finish_reason is not None:
                trace.record_end(update.request_id, update.finish_reason, now + 1)
        outputs.append(output)
    trace.close()
    return outputs


def make_step(
    index: int, rows: Sequence[Row], preempted: Sequence[int] = (), admitted: Sequence[int] = (), **counts: int
) -> RecordedStep:
    """The step from second `index` to the next."""
    fields = {name: 0 for name in RecordedStep.__dataclass_fields__ if name.startswith("num_")} | counts
    return RecordedStep(
        step=index + 1,
        started_s=float(index),
        ended_s=index + 1.0,
        rows=tuple(RecordedRow(*row) for row in rows),
        admitted_request_ids=tuple(admitted),
        preempted_request_ids=tuple(preempted),
        swapped_out_request_ids=(),
        **fields,
    )


def make_trace(
    steps: Sequence[RecordedStep], ends: Sequence[RecordedEnd] = (), max_num_seqs: int = 2, mode: str = "inflight"
) -> RecordedTrace:
    return RecordedTrace(mode, max_num_seqs, num_blocks=64, block_size=4, steps=tuple(steps), ends=tuple(ends))
