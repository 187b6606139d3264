"""A profile as tables and as JSON. Knows nothing of how it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.table import Table

from noria.config import EngineConfig

if TYPE_CHECKING:
    from noria.profiling.floor import MachineLimits, Work
    from noria.profiling.profiler import Profile, ProfiledCase

# profiler.WHOLE_STEP, whose module imports torch
_STEP = "step"
_RATIOS = {"ratio": "median", "fastest_ratio": "fastest"}


def head_lines(profile: Profile, config: EngineConfig, environment: Mapping[str, Any]) -> list[str]:
    """environment: `machine`, `busy_cores_before` and `busy_cores_after`."""
    machine, best, usual = environment["machine"], profile.limits, profile.median_limits
    peaks = [_peak(profile.weight_dtype, best.weight_macs_per_s, usual.weight_macs_per_s)]
    if profile.head_dtype != profile.weight_dtype:
        peaks.append(_peak(profile.head_dtype, best.head_macs_per_s, usual.head_macs_per_s))
    if best.weight_macs_per_s != best.attention_macs_per_s:
        peaks.append(_peak("float32", best.attention_macs_per_s, usual.attention_macs_per_s))
    before, after = environment["busy_cores_before"], environment["busy_cores_after"]
    return [
        f"{machine['cpu']['model']}, {machine['num_cores']} cores, num_threads {profile.num_threads}; others took "
        f"{before:.2f} cores before, {after:.2f} after",
        f"{config.model}, {profile.kernels} kernels",
        f"weights {profile.weight_dtype}, of the head {profile.head_dtype}, {profile.weight_bytes / 1e6:.1f} MB a step"
        f"; KV {profile.kv_dtype}, {profile.kv_bytes_per_token:.0f} bytes a token",
        f"limits, the best of {len(profile.cases[0].runs)} rounds and in brackets the median: reads "
        f"{best.bytes_per_s / 1e9:.1f} GB/s ({usual.bytes_per_s / 1e9:.1f}); multiplies, 1e9 a second: "
        + ", ".join(peaks),
    ]


def _peak(name: str, best: float, usual: float) -> str:
    return f"{name} {best / 1e9:.1f} ({usual / 1e9:.1f})"


def time_table(profile: Profile) -> Table:
    """A row a case: what the step takes, and its parts."""
    table = Table(
        title="Where the time of a step goes, ms",
        caption="Medians, each of its own: parts need not add up exactly. engine: scheduling and text, measured apart.",
        box=SIMPLE,
    )
    table.add_column("")
    for heading in (_STEP, "least", *profile.parts):
        table.add_column(heading, justify="right")
    for case in profile.cases:
        parts = (case.median_s(part) for part in profile.parts)
        table.add_row(case.case.name, *map(_ms, (case.median_s(_STEP), case.fastest.whole, *parts)))
    return table


def floor_table(profile: Profile) -> Table:
    """A row a case: the step, and each part that has a floor and was measured."""
    table = Table(
        title="Beside the floor, ms: measured / floor = ratio (ratio of the fastest run)",
        caption="R: the floor is reading the bytes; M: it is the multiply-adds.",
        box=SIMPLE,
    )
    table.add_column("")
    parts = [_STEP, *(part for part in profile.cases[0].work if part in profile.parts)]
    for heading in parts:
        table.add_column(heading, justify="right")
    for case in profile.cases:
        table.add_row(case.case.name, *(_against_floor(case, part, profile.limits) for part in parts))
    return table


def _against_floor(case: ProfiledCase, part: str, limits: MachineLimits) -> str:
    work, usual_s = case.work_of(part), case.median_s(part)
    floor_s = limits.floor_s(work)
    letter = "R" if limits.read_s(work) >= limits.compute_s(work) else "M"
    ratio, fastest_ratio = usual_s / floor_s, case.fastest.seconds(part) / floor_s
    return f"{_ms(usual_s)} / {_ms(floor_s)} {letter} = {ratio:.2f} ({fastest_ratio:.2f})"


def _ms(seconds: float) -> str:
    """Three digits, or all before the point."""
    milliseconds = seconds * 1e3
    num_decimals = sum(milliseconds < limit for limit in (100, 10, 1))
    return f"{milliseconds:.{num_decimals}f}"


def profile_json(profile: Profile) -> dict[str, Any]:
    """Times in ms. Runs are kept one by one, their parts too."""
    return {
        "kernels": profile.kernels,
        "num_threads": profile.num_threads,
        "weights": {
            "dtype": profile.weight_dtype,
            "head_dtype": profile.head_dtype,
            "bytes_per_step": profile.weight_bytes,
        },
        "kv_cache": {"dtype": profile.kv_dtype, "bytes_per_token": profile.kv_bytes_per_token},
        "limits": _limits_json(profile.limits),
        "median_limits": _limits_json(profile.median_limits),
        "cases": [_case_json(case, profile) for case in profile.cases],
    }


def _limits_json(limits: MachineLimits) -> dict[str, float]:
    return {
        "read_bytes_per_s": limits.bytes_per_s,
        "weight_macs_per_s": limits.weight_macs_per_s,
        "attention_macs_per_s": limits.attention_macs_per_s,
        "head_macs_per_s": limits.head_macs_per_s,
    }


def _case_json(profiled: ProfiledCase, profile: Profile) -> dict[str, Any]:
    case = profiled.case
    # of torch's operators linear layers and attention have a floor, but were timed as one
    parts = dict.fromkeys([*profile.parts, *profiled.work])
    return {
        "name": case.name,
        "num_sequences": case.num_rows,
        "num_tokens": case.num_rows * case.num_tokens,
        "num_cached_tokens": case.num_cached,
        _STEP: _part_json(profiled, _STEP, profile),
        "parts": {part: _part_json(profiled, part, profile) for part in parts},
        "runs": [
            {"step_ms": run.whole * 1e3, "parts_ms": {part: seconds * 1e3 for part, seconds in run.parts.items()}}
            for run in profiled.runs
        ],
    }


def _part_json(profiled: ProfiledCase, part: str, profile: Profile) -> dict[str, Any]:
    """What was measured, the floor, and the ratios of the two, as far as there are such."""
    is_measured, has_floor = part in (_STEP, *profile.parts), part in (_STEP, *profiled.work)
    entry: dict[str, Any] = {}
    if is_measured:
        entry |= {"median_ms": profiled.median_s(part) * 1e3, "fastest_ms": profiled.fastest.seconds(part) * 1e3}
    if has_floor:
        entry |= _floor_json(profiled.work_of(part), profile.limits)
    if is_measured and has_floor:
        entry |= {name: entry[f"{kind}_ms"] / entry["floor_ms"] for name, kind in _RATIOS.items()}
    return entry


def _floor_json(work: Work, limits: MachineLimits) -> dict[str, Any]:
    return {
        "bytes_read": work.num_bytes,
        "weight_macs": work.num_weight_macs,
        "attention_macs": work.num_attention_macs,
        "head_macs": work.num_head_macs,
        "read_ms": limits.read_s(work) * 1e3,
        "compute_ms": limits.compute_s(work) * 1e3,
        "floor_ms": limits.floor_s(work) * 1e3,
    }
