"""How long a step takes, by a formula whose coefficients were measured on one machine with one model.

Knows nothing of how they were measured (`fit` finds them), nor of the batch's history: equal shapes cost the same.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from noria.config_sources import decode_object
from noria.errors import ConfigError
from noria.scheduler_output import SchedulerOutput
from noria.simulation.step_shape import StepShape

FORMAT = "noria-cost-model"
VERSION = 1


class CostModel(Protocol):
    """Seconds that the model would take for what the scheduler decided."""

    def step_time_s(self, output: SchedulerOutput) -> float: ...


@dataclass(frozen=True, slots=True)
class MeasuredCostModel:
    """A step's seconds as a sum over its shape (see `StepShape`).

    constant_s: of every step. linear_table: (num_tokens, seconds) by growing num_tokens: what the linear layers take on
        top, on straight lines between the entries, the last line going on beyond the end.
    per_decode_row_s, per_decode_context_s: attention of a one-token row, and of each cached token that it reads.
    per_prefill_pair_s: attention of one query token to one token, in longer rows.
    per_sampled_row_s: LM head and sampling. per_block_copy_s: a block to the host pool or back.
    median_relative_error: of the fit on its own samples; None if it was not fitted.
    origin: what was measured, for people; and kv_bytes_per_token, by which a simulation of the same model sizes its
        cache. Empty for a formula that was written by hand.
    """

    linear_table: tuple[tuple[int, float], ...]
    constant_s: float = 0.0
    per_decode_row_s: float = 0.0
    per_decode_context_s: float = 0.0
    per_prefill_pair_s: float = 0.0
    per_sampled_row_s: float = 0.0
    per_block_copy_s: float = 0.0
    median_relative_error: float | None = None
    origin: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_table(self.linear_table)
        for name in _COEFFICIENTS:
            _check_seconds(name, getattr(self, name))
        if self.median_relative_error is not None:
            _check_seconds("median_relative_error", self.median_relative_error)

    def step_time_s(self, output: SchedulerOutput) -> float:
        return self.seconds_of(StepShape.of(output))

    def seconds_of(self, shape: StepShape) -> float:
        return (
            self.constant_s
            + self._linear_s(shape.num_tokens)
            + self.per_decode_row_s * shape.num_decode_rows
            + self.per_decode_context_s * shape.num_decode_context
            + self.per_prefill_pair_s * shape.num_prefill_pairs
            + self.per_sampled_row_s * shape.num_sampled_rows
            + self.per_block_copy_s * shape.num_block_copies
        )

    def _linear_s(self, num_tokens: int) -> float:
        table = self.linear_table
        if len(table) == 1 or num_tokens <= table[0][0]:
            return table[0][1]
        # the entry at whose left the line begins; the last line is also the one beyond the end
        left = min(bisect_right(table, (num_tokens, math.inf)), len(table) - 1) - 1
        (start, start_s), (end, end_s) = table[left], table[left + 1]
        return start_s + (end_s - start_s) * (num_tokens - start) / (end - start)

    def scaled(self, factor: float) -> MeasuredCostModel:
        """Every step takes `factor` times as long."""
        coefficients: dict[str, Any] = {name: factor * getattr(self, name) for name in _COEFFICIENTS}
        table = tuple((num_tokens, factor * seconds) for num_tokens, seconds in self.linear_table)
        return replace(self, linear_table=table, **coefficients)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; `from_dict` reads it back."""
        return {
            "format": FORMAT,
            "version": VERSION,
            **asdict(self),
            "linear_table": [list(entry) for entry in self.linear_table],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MeasuredCostModel:
        """Raises ConfigError naming the field and what is valid."""
        if values.get("format") != FORMAT or values.get("version") != VERSION:
            raise ConfigError(
                f"format and version must be {FORMAT!r} and {VERSION}, "
                f"not {values.get('format')!r:.100} and {values.get('version')!r:.100}"
            )
        own = {name: value for name, value in values.items() if name not in ("format", "version")}
        valid = [entry.name for entry in fields(cls)]
        for name in own:
            if name not in valid:
                raise ConfigError(f"unknown field {name!r}; valid are {', '.join(valid)}")
        if not isinstance(own.get("origin", {}), dict):
            raise ConfigError(f"origin must be an object, not {own['origin']!r:.100}")
        return cls(**own | {"linear_table": _table_from(own.get("linear_table"))})

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> MeasuredCostModel:
        """Raises ConfigError naming the file and the field."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"--costs: cannot read {path}: {reason}") from None
        values = decode_object(str(path), text)
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


_COEFFICIENTS = tuple(entry.name for entry in fields(MeasuredCostModel) if entry.name.endswith("_s"))


def _table_from(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, list) or not all(isinstance(entry, list) and len(entry) == 2 for entry in value):
        raise ConfigError(f"linear_table must be a list of [num_tokens, seconds], not {value!r:.100}")
    return tuple((num_tokens, seconds) for num_tokens, seconds in value)


def _check_table(table: tuple[tuple[int, float], ...]) -> None:
    if not table:
        raise ConfigError("linear_table must have at least one entry of num_tokens and seconds")
    for place, (num_tokens, seconds) in enumerate(table):
        if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or num_tokens < 1:
            raise ConfigError(f"linear_table[{place}]: num_tokens must be a whole number from 1, not {num_tokens!r}")
        _check_seconds(f"linear_table[{place}]: seconds", seconds)
        if place and (num_tokens <= table[place - 1][0] or seconds < table[place - 1][1]):
            raise ConfigError(f"linear_table[{place}]: num_tokens must grow by entry, and seconds not shrink")


def _check_seconds(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be a finite number from 0, not {value!r:.100}")
