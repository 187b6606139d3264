"""Engines without weights: a runner whose next token is a hash of the history, and short ways to make requests.

The fake runner keeps what a real cache would keep, in the blocks it is told, so that a wrong block table, a lost block
or a token computed twice shows as a wrong output.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from noria.config import EngineConfig
from noria.sampling_params import SamplingParams
from noria.scheduler_output import PLACEHOLDER, RowFailure, SampledToken, ScheduledSequence, SchedulerOutput, StepResult
from noria.scheduling.build import build_scheduler
from noria.scheduling.scheduler import Scheduler
from noria.sequence import Request

VOCAB_SIZE = 256
_request_ids = itertools.count(1)

AGEING_S = 20.0
# settings to draw any combination from
POLICIES: dict[str, st.SearchStrategy[Any]] = {
    "admission": st.sampled_from(["max_utilization", "guaranteed_no_evict"]),
    "admission_headroom": st.sampled_from([0.0, 0.15, 0.5]),
    "insertion": st.sampled_from(["immediate", "waiting_served_ratio"]),
    "waiting_served_ratio": st.sampled_from([0.3, 1.2]),
    "max_waiting_tokens": st.sampled_from([0, 5]),
    "max_batch_total_tokens": st.sampled_from([None, 40, 100]),
    "max_num_batched_tokens": st.sampled_from([3, 6, 100]),
    "max_prefill_tokens": st.sampled_from([None, 1, 4]),
    "chunked_prefill": st.booleans(),
    "prefill_batching": st.sampled_from(["mixed", "separate"]),
    "prefill_order": st.sampled_from(["fcfs", "equal_progress"]),
    "preemption": st.sampled_from(["recompute", "swap"]),
    "max_preemptions": st.sampled_from([0, 1, 4]),
    "prefix_caching": st.booleans(),
    "priority_ageing_s": st.sampled_from([None, AGEING_S]),
    "fair_share": st.booleans(),
}


def next_token(history: Sequence[int]) -> int:
    """The token that follows `history`, whatever else is in the batch."""
    return hashlib.sha256(repr(list(history)).encode()).digest()[0] % VOCAB_SIZE


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    history = list(prompt)
    for _ in range(num_tokens):
        history.append(next_token(history))
    return history[len(prompt) :]


class HashRunner:
    """Reads its history back from the blocks, as attention would.

    failing: request ids whose rows are to fail. What they write is poison: whoever reads it fails too.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self._block_size = block_size
        self._blocks: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._host_blocks: list[list[int | None]] = [[None] * block_size for _ in range(num_host_blocks)]
        self.failing: set[int] = set()
        self.outputs: list[SchedulerOutput] = []

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.outputs.append(output)
        for copy in output.block_copies:
            if copy.is_swap_in:
                self._blocks[copy.target] = list(self._host_blocks[copy.source])
            else:
                self._host_blocks[copy.target] = list(self._blocks[copy.source])
        result: StepResult = {}
        for row in output.rows:
            if not row.is_padding:
                self._compute(row, result)
        return result

    def _compute(self, row: ScheduledSequence, result: StepResult) -> None:
        has_failed = row.request_id in self.failing
        for position, token_id in enumerate(row.token_ids, start=row.num_computed_tokens):
            block = self._blocks[row.block_table[position // self._block_size]]
            block[position % self._block_size] = None if has_failed else token_id
        if row.sampling is None:
            return
        length = row.num_computed_tokens + len(row.token_ids)
        history = [token for block in row.block_table for token in self._blocks[block]][:length]
        if None in history:
            result[row.request_id] = RowFailure("not finite")
        else:
            result[row.request_id] = SampledToken(next_token(history))  # type: ignore[arg-type]


@dataclass
class FakePendingStep:
    outcome: StepResult | Exception
    is_taken: bool = False

    def result(self) -> StepResult:
        assert not self.is_taken
        self.is_taken = True
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class AheadHashRunner(HashRunner):
    """Computes a step when it is submitted, as a device does that reads its input then and works in order; only it
    knows the tokens of the step before, and raises KeyError for a placeholder of anybody who was not drawn there.

    refuses: the next submit raises, and nothing is computed. breaks: the next step fails when its result is taken; its
    copies are not made, and what its rows write is poison. lost: ids of rows of such steps, and of those that were
        submitted after one that breaks before its result was taken.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        super().__init__(num_blocks, block_size, num_host_blocks)
        self.refuses = self.breaks = False
        self.num_placeholders = 0
        self.lost: set[int] = set()
        self._last = FakePendingStep({}, is_taken=True)
        # None where the row failed
        self._drawn: dict[int, int | None] = {}

    def submit(self, output: SchedulerOutput) -> FakePendingStep:
        ids = {row.request_id for row in output.rows}
        if not self._last.is_taken and isinstance(self._last.outcome, Exception):
            self.lost |= ids
        if self.refuses:
            self.refuses = False
            self.lost |= ids
            raise RuntimeError("out of memory")
        rows = tuple(self._filled_in(row) for row in output.rows)
        if self.breaks:
            self.failing |= ids
            self.lost |= ids
            for copy in output.block_copies:
                blocks = self._blocks if copy.is_swap_in else self._host_blocks
                blocks[copy.target] = [None] * self._block_size
            output = replace(output, block_copies=())
        result = self.execute(replace(output, rows=rows))
        self._drawn = {
            request_id: one.token_id if isinstance(one, SampledToken) else None for request_id, one in result.items()
        }
        has_failed, self.breaks = self.breaks, False
        self._last = FakePendingStep(RuntimeError("illegal access") if has_failed else result)
        return self._last

    def _filled_in(self, row: ScheduledSequence) -> ScheduledSequence:
        *known, last = row.token_ids
        assert PLACEHOLDER not in known
        assert row.sampling is None or PLACEHOLDER not in row.sampling.output_token_ids, "a penalty needs the value"
        if last != PLACEHOLDER:
            return row
        self.num_placeholders += 1
        return replace(row, token_ids=[*known, self._drawn[row.request_id]])  # type: ignore[list-item]


def make_request(
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 4,
    *,
    batch_id: int = 0,
    deadline: float | None = None,
    stop_token_ids: Sequence[int] = (),
    **params: object,
) -> Request:
    return Request(
        request_id=next(_request_ids),
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),  # type: ignore[arg-type]
        seed=0,
        stop_token_ids=frozenset(stop_token_ids),
        deadline=deadline,
        batch_id=batch_id,
    )


def make_scheduler(num_blocks: int = 64, num_host_blocks: int = 0, **config: object) -> Scheduler:
    settings = {"batching_mode": "inflight", "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64} | config
    return build_scheduler(EngineConfig(**settings), num_blocks, num_host_blocks)  # type: ignore[arg-type]


def step(scheduler: Scheduler, runner: HashRunner) -> SchedulerOutput:
    """One turn of the wheel; checks integrity before and after the result is taken in."""
    output = scheduler.schedule()
    scheduler.check_integrity()
    scheduler.update(output, runner.execute(output))
    scheduler.check_integrity()
    return output
