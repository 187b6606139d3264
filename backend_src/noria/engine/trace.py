"""Writes what every step did to a file, one line of JSON a step, for `noria trace` to draw.

Counts and ids only, never a token or a text. Knows no clock (times are arguments) and nothing of pictures:
`timeline.recorded_trace` reads the file back.

    {"format": "noria trace", "version": 1, "mode": "inflight", "max_num_seqs": 8, ...}
    {"step": 1, "start": 7.1, "end": 7.2, "rows": [[1, 0, 30, 1]], "running": 1, "allocated": 2, ...}
    {"request": 1, "end": 9.3, "reason": "length"}

A row is [request_id, num_computed_tokens, num_tokens, RowKind]. Counts of 0 and empty lists are left out. A step
begins where the one before it ended, if that is later than its own launch, so that steps do not overlap.
"""

from __future__ import annotations

import json
import logging
from enum import IntEnum
from pathlib import Path

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.scheduler_output import ScheduledSequence, SchedulerOutput
from noria.sequence import FinishReason

log = logging.getLogger(__name__)

FORMAT = "noria trace"
VERSION = 1

# some 250 steps of 8 rows
_BUFFER_BYTES = 2**16


class RowKind(IntEnum):
    """What a row was there for: more known tokens follow it, a token is drawn from it, or it only fills its slot: it
    was finished before, in a closed batch, or had ended by the time the step was launched."""

    CHUNK = 0
    DRAW = 1
    PADDING = 2


class StepTrace:
    """The file, which is overwritten, for as long as an engine runs. Lines reach it some steps late, or at `close`.

    A file that cannot be written any more (a full disk) ends the recording, not the engine.
    """

    def __init__(self, path: Path, config: EngineConfig, num_blocks: int) -> None:
        """num_blocks: of the KV cache. Raises ConfigError if the file cannot be made."""
        try:
            self._file = path.open("w", encoding="utf-8", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise ConfigError(f"trace_path must be a file that can be written, not {path}: {error.strerror}") from None
        self._encode = json.JSONEncoder(separators=(",", ":")).encode
        header = {
            "format": FORMAT,
            "version": VERSION,
            "mode": config.batching_mode,
            "max_num_seqs": config.max_num_seqs,
            "num_blocks": num_blocks,
            "block_size": config.block_size,
        }
        self._write(header)

    def record_step(
        self, output: SchedulerOutput, started_s: float, ended_s: float, late_request_ids: tuple[int, ...] = ()
    ) -> None:
        """One step. late_request_ids: whose rows were computed for nothing.

        started_s, ended_s: on the engine's clock, when the scheduler had been asked and the step before was over, and
        when the runner had answered.
        """
        num_swapped_in = sum(copy.is_swap_in for copy in output.block_copies)
        counts_and_lists = {
            "running": output.num_running,
            "waiting": output.num_waiting,
            "allocated": output.num_allocated_blocks,
            "cached": output.num_cached_blocks,
            "admitted": output.admitted_request_ids,
            "preempted": output.preempted_request_ids,
            "swapped_out": output.swapped_out_request_ids,
            "blocks_in": num_swapped_in,
            "blocks_out": len(output.block_copies) - num_swapped_in,
            "prefix_hits": output.num_prefix_hit_tokens,
            "lost": output.num_lost_tokens,
        }
        line: dict[str, object] = {
            "step": output.step,
            "start": round(started_s, 6),
            "end": round(ended_s, 6),
            "rows": [
                (row.request_id, row.num_computed_tokens, len(row.token_ids), _row_kind(row, late_request_ids))
                for row in output.rows
            ],
        }
        line.update((key, value) for key, value in counts_and_lists.items() if value)
        self._write(line)

    def record_end(self, request_id: int, reason: FinishReason, now: float) -> None:
        """A request got its last output, in a step or between two."""
        self._write({"request": request_id, "end": round(now, 6), "reason": reason.value})

    def close(self) -> None:
        """Write what is still held back. Nothing is recorded afterwards."""
        try:
            self._file.close()
        except OSError as error:
            log.error("the trace could not be written: %s", error)

    def _write(self, line: dict[str, object]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(self._encode(line) + "\n")
        except OSError as error:
            log.error("the trace ends here: %s", error)
            self.close()


def _row_kind(row: ScheduledSequence, late_request_ids: tuple[int, ...]) -> int:
    if row.is_padding or row.request_id in late_request_ids:
        return RowKind.PADDING.value
    return RowKind.CHUNK.value if row.sampling is None else RowKind.DRAW.value
