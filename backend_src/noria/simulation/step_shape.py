"""What a step's duration depends on: how many tokens of which kind it computes. Knows no machine and no seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from noria.scheduler_output import SchedulerOutput


class StepShape(NamedTuple):
    """Counts over the rows of one step. A row of one token is a decode row, whether it is a prompt's last, a sequence's
    next or a finished row's padding: they are computed alike. Longer rows are prefill.

    num_tokens: through the linear layers. num_sampled_rows: through the LM head and the sampler.
    num_decode_context, num_prefill_context: tokens whose keys and values are read, summed over the rows of each kind.
    num_prefill_pairs: query tokens times the tokens that each attends to, in prefill rows.
    num_block_copies: blocks swapped out or in.
    """

    num_tokens: int
    num_decode_rows: int = 0
    num_decode_context: int = 0
    num_prefill_tokens: int = 0
    num_prefill_context: int = 0
    num_prefill_pairs: int = 0
    num_sampled_rows: int = 0
    num_block_copies: int = 0

    @classmethod
    def of(cls, output: SchedulerOutput) -> StepShape:
        rows = [(len(row.token_ids), row.num_computed_tokens, row.sampling is not None) for row in output.rows]
        return cls.of_rows(rows, len(output.block_copies))

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, int, bool]], num_block_copies: int = 0) -> StepShape:
        """rows: of each how many tokens it computes, how many came before them, and whether one is drawn after them."""
        num_decode_rows = num_decode_context = num_sampled_rows = 0
        num_prefill_tokens = num_prefill_context = num_prefill_pairs = 0
        for num_new_tokens, num_before, is_sampled in rows:
            if num_new_tokens == 1:
                num_decode_rows += 1
                num_decode_context += num_before + 1
            else:
                num_prefill_tokens += num_new_tokens
                num_prefill_context += num_before + num_new_tokens
                num_prefill_pairs += num_new_tokens * num_before + num_new_tokens * (num_new_tokens + 1) // 2
            num_sampled_rows += is_sampled
        return cls(
            num_decode_rows + num_prefill_tokens,
            num_decode_rows,
            num_decode_context,
            num_prefill_tokens,
            num_prefill_context,
            num_prefill_pairs,
            num_sampled_rows,
            num_block_copies,
        )


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step."""

    shape: StepShape
    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, not {self.seconds}")
