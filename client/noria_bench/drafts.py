"""Draws the requests of one class, all but their texts and times. Knows nothing of other classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from noria_bench.chance import stream
from noria_bench.document import MAX_WHOLE
from noria_bench.errors import BenchError
from noria_bench.lengths import LengthLaw
from noria_bench.traces import TraceRow, measured, read_trace, within
from noria_bench.workload_spec import ClassSpec, TraceSource


@dataclass(frozen=True, slots=True)
class Draft:
    """prefix_group: of the class's shared prefixes; None has a prompt of its own. row: what it is a replay of."""

    num_prompt_tokens: int
    max_tokens: int
    cancel_after_tokens: int | None = None
    prefix_group: int | None = None
    row: TraceRow | None = None


def read_rows(one: ClassSpec, count_tokens: Callable[[str], int], limit: int | None) -> list[TraceRow]:
    """The trace of a class that has one: the first `limit` requests within its bounds, or all. Raises BenchError."""
    source = _source(one)
    has_own_outputs = one.output_tokens is None
    rows = measured(read_trace(source.path, source.format), count_tokens, has_own_outputs)
    kept = list(islice(within(rows, source.max_prompt_tokens, source.max_output_tokens, source.is_clipping), limit))
    if not kept:
        raise BenchError(f"{source.path}: no request is within max_prompt_tokens and max_output_tokens")
    if one.shared_prefix is not None and any(row.prompt is not None or row.hash_ids for row in kept):
        raise BenchError(f"class {one.name}: shared_prefix is not for {source.path}, which says what its prompts share")
    return kept


def recorded_times(one: ClassSpec, rows: Sequence[TraceRow]) -> list[float]:
    """When the rows came. Raises BenchError where the trace does not say."""
    times = [row.arrival_s for row in rows if row.arrival_s is not None]
    if len(times) < len(rows):
        raise BenchError(f"{_source(one).path} does not say when requests came: give arrivals.law another value")
    return times


def draw_class(one: ClassSpec, num: int, rows: Sequence[TraceRow] | None, seed: int, scale: float) -> list[Draft]:
    """The first `num` requests of a class. rows: of its trace, if it has one. Raises BenchError if they are too few."""
    if rows is not None and num > len(rows):
        raise BenchError(f"{_source(one).path} holds {len(rows)} requests within bounds; the workload needs {num}")
    prompts = [row.num_prompt_tokens or 1 for row in rows[:num]] if rows is not None else []
    outputs = [row.num_output_tokens or 1 for row in rows[:num]] if rows is not None else []
    if one.prompt_tokens is not None:
        prompts = _lengths(one.prompt_tokens, num, seed, "prompt_tokens", one.name)
    if one.output_tokens is not None:
        outputs = _lengths(one.output_tokens, num, seed, "output_tokens", one.name)
    max_tokens = [scaled(output, scale) for output in outputs]
    cancels = _cancels(one, max_tokens, seed, scale)
    groups = _prefix_groups(one, num, seed)
    return [
        Draft(
            num_prompt_tokens=scaled(prompts[place], scale),
            max_tokens=max_tokens[place],
            cancel_after_tokens=cancels[place],
            prefix_group=groups[place],
            row=None if rows is None else rows[place],
        )
        for place in range(num)
    ]


def scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))


def _source(one: ClassSpec) -> TraceSource:
    assert one.trace is not None
    return one.trace


def _lengths(law: LengthLaw, num: int, seed: int, *names: str) -> list[int]:
    try:
        lengths = [int(length) for length in law.draw(num, stream(seed, *names))]
    except (ValueError, OverflowError) as error:
        raise BenchError(f"{names[0]}: {error}") from None
    if max(lengths, default=0) > MAX_WHOLE:
        raise BenchError(f"{names[0]}: a length must be at most {MAX_WHOLE} tokens, not {max(lengths)}")
    return lengths


def _cancels(one: ClassSpec, max_tokens: Sequence[int], seed: int, scale: float) -> list[int | None]:
    """After how many tokens each is cancelled; none after its last, as it has ended then."""
    num = len(max_tokens)
    if one.cancels is None:
        return [None] * num
    is_cancelled = stream(seed, "cancel", one.name).random(num) < one.cancels.share
    after = _lengths(one.cancels.after_tokens, num, seed, "cancel.after_tokens", one.name)
    return [
        (min(scaled(tokens, scale), most - 1) or None) if cancelled else None
        for tokens, most, cancelled in zip(after, max_tokens, is_cancelled, strict=True)
    ]


def _prefix_groups(one: ClassSpec, num: int, seed: int) -> list[int | None]:
    prefix = one.shared_prefix
    if prefix is None:
        return [None] * num
    is_sharing = stream(seed, "shared_prefix", one.name).random(num) < prefix.share
    groups = stream(seed, "prefix_group", one.name).integers(prefix.num_groups, size=num)
    return [int(group) if sharing else None for group, sharing in zip(groups, is_sharing, strict=True)]
