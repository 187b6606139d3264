"""What the runs of a comparison come to: medians, ranges and ratios, as Markdown.

A ratio is taken within a repeat, whose runs followed each other, so that what drifts on the machine meets both sides;
stated is the median of the repeats' ratios.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

# a run's record: peer, slots, repeat, and either `error` or what `protocol.main` printed
Run = Mapping[str, Any]
SINGLES = {"batch1_tokens_per_s": "batch 1, decode tokens/s", "prefill_tokens_per_s": "prefill, prompt tokens/s"}


def values(runs: Iterable[Run], peer: str, slots: int | None, key: str) -> dict[int, float]:
    """By repeat. slots: None takes any; a repeat measures what does not depend on it once."""
    return {
        run["repeat"]: run[key]
        for run in runs
        if run["peer"] == peer and slots in (None, run["slots"]) and run.get(key) is not None
    }


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """Median over the repeats that both have; None where there is none."""
    common = sorted(ours.keys() & theirs.keys())
    return median(ours[repeat] / theirs[repeat] for repeat in common) if common else None


def markdown(runs: Sequence[Run], peers: Sequence[str], noria: Sequence[str], failures: Mapping[str, str]) -> str:
    """Tables of useful output tokens/s, one row for each peer and number of slots, and of what is measured alone.

    peers: all of them, in order. noria: those that others are compared with. failures: of peers that could not be
    installed, why.
    """
    slots = sorted({run["slots"] for run in runs})
    empty = [""] * (2 + len(noria))
    heads = [f"{name} is" for name in noria]
    lines = [*_head(["peer", "slots", "useful output tokens/s", "TTFT s", "ICL ms", *heads])]
    for one in slots:
        for peer in peers:
            own = values(runs, peer, one, "output_tokens_per_s")
            if own:
                ttft, icl = (values(runs, peer, one, key) for key in ("ttft_median_s", "icl_median_s"))
                extra = [_median(ttft), _median({repeat: 1000 * value for repeat, value in icl.items()})]
                lines.append(_row([peer, str(one), _range(own), *extra, *_ratios(runs, noria, one, own)]))
            elif peer not in failures:
                lines.append(_row([peer, str(one), f"failed: {_errors(runs, peer, one)}", *empty]))
    lines += [_row([peer, "", f"not installed: {why}", *empty]) for peer, why in failures.items()]
    for key, title in SINGLES.items():
        lines += ["", *_head(["peer", title, *heads])]
        for peer in peers:
            own = values(runs, peer, None, key)
            if own:
                lines.append(_row([peer, _range(own), *_ratios(runs, noria, None, own, key)]))
    return "\n".join([*lines, "", *_settings(runs, peers)]) + "\n"


def _ratios(
    runs: Sequence[Run],
    noria: Sequence[str],
    slots: int | None,
    theirs: Mapping[int, float],
    key: str = "output_tokens_per_s",
) -> list[str]:
    found = (ratio(values(runs, name, slots, key), theirs) for name in noria)
    return ["" if one is None else f"{one:.2f} x" for one in found]


def _settings(runs: Sequence[Run], peers: Sequence[str]) -> list[str]:
    """Of each peer's first run that went well."""
    lines = []
    for peer in peers:
        run = next((run for run in runs if run["peer"] == peer and "error" not in run), None)
        if run is not None:
            parts = [f"{name} {version}" for name, version in run["versions"].items()]
            parts += [f"{key} {value}" for key, value in run["settings"].items()]
            parts += [f"{name}={value}" for name, value in run["variables"].items()]
            lines.append(f"- {peer}: {', '.join(parts)}")
    busiest = max((max(run["busy_cores_before"], run["busy_cores_after"]) for run in runs), default=0.0)
    return [*lines, f"- others took at most {busiest:.2f} cores before or after a run"]


def _errors(runs: Sequence[Run], peer: str, slots: int) -> str:
    return "; ".join(dict.fromkeys(run["error"] for run in runs if run["peer"] == peer and run["slots"] == slots))


def _range(by_repeat: Mapping[int, float]) -> str:
    found = list(by_repeat.values())
    return f"{median(found):.1f} ({min(found):.1f} to {max(found):.1f})"


def _median(by_repeat: Mapping[int, float]) -> str:
    return f"{median(by_repeat.values()):.3g}" if by_repeat else ""


def _head(cells: Sequence[str]) -> list[str]:
    return [_row(cells), _row(["---"] * len(cells))]


def _row(cells: Sequence[str]) -> str:
    # what a log says must not end a cell
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
