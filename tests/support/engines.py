"""Engines without weights: a runner whose next token is a hash of the history, and short ways to make requests.

The fake runner keeps what a real cache would keep, in the blocks it is told, so that a wrong block table, a lost block
or a token computed twice shows as a wrong output.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

from noria.config import EngineConfig
from noria.sampling_params import SamplingParams
from noria.scheduler_output import RowFailure, SampledToken, ScheduledSequence, SchedulerOutput, StepResult
from noria.scheduling.build import build_scheduler
from noria.scheduling.scheduler import Scheduler
from noria.sequence import Request

VOCAB_SIZE = 256
_request_ids = itertools.count(1)


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
