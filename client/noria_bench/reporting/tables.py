"""Tables as data: what stands in them, whatever they are then written as. Texts are plain, not escaped for anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from noria_bench.records import Outcome
from noria_bench.reporting import figures as catalogue
from noria_bench.reporting.comparison import Comparison
from noria_bench.reporting.figures import BY_KEY, NOTHING, Figure, number
from noria_bench.reporting.intervals import Estimate
from noria_bench.reporting.loaded import Family, Setting, Source
from noria_bench.reporting.text import label_name, plain
from noria_bench.results import Capacity, Run

# of a setting, for one line in a table of many
_OVERVIEW = (
    *("output_tokens_per_s", "input_tokens_per_s", "ttft_median_s", "ttft_p95_s", "tpot_median_s", "tpot_p95_s"),
    *(
        "e2e_p95_s",
        "queue_p95_s",
        "triton_queue_s",
        "good_requests_per_s",
        "good_share",
        "slot_utilisation",
        "mean_batch",
    ),
    *("kv_usage_max", "num_preemptions"),
)
_OF_CLASS = (
    *("num_requests", "num_finished", "output_tokens_per_s", "input_tokens_per_s", "ttft_median_s", "ttft_p95_s"),
    *("ttft_p99_s", "tpot_median_s", "tpot_p95_s", "tpot_p99_s", "max_gap_p99_s", "e2e_p95_s", "good_share"),
)
_OUTCOMES = ("num_cancelled", "num_rejected", "num_expired", "num_failed", "num_aborted")


@dataclass(frozen=True, slots=True)
class Table:
    """header: of each column. num_headers: so many first columns name the row; the others hold figures."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_headers: int = 1
    has_text: bool = False


def side_by_side(settings: Sequence[Setting], names: Sequence[str], caption: str, is_compact: bool = True) -> Table:
    """A column for each setting. Where it has several valid runs, its figures are their means.

    is_compact: median, p95 and p99 in one row. Rows without any figure are left out.
    """
    rows = [
        ("useful output tokens/s", _cells(settings, BY_KEY["output_tokens_per_s"])),
        *([_times(settings, names)] if len(settings) > 1 else []),
        *((BY_KEY[key].title, _cells(settings, BY_KEY[key])) for key in ("input_tokens_per_s", "slot_utilisation")),
        *((figure.title, _cells(settings, figure)) for figure in catalogue.SERVER if figure.key in _SERVER_ROWS),
        *_latency_rows(settings, is_compact),
        (title(BY_KEY["triton_queue_s"]), _cells(settings, BY_KEY["triton_queue_s"])),
        *((BY_KEY[key].title, _cells(settings, BY_KEY[key])) for key in ("good_requests_per_s", "good_share")),
        ("wall time s", _cells(settings, BY_KEY["wall_s"])),
        ("requests, done / cancelled / failed / all", [_requests(setting) for setting in settings]),
        *([("valid runs of all", [_num_valid(one) for one in settings])] if _is_worth_counting(settings) else []),
    ]
    filled = [(name, *cells) for name, cells in rows if any(cell != NOTHING for cell in cells)]
    errors = dict.fromkeys(error for setting in settings for run in setting.runs for error in run.summary.all.errors)
    for error in errors:
        counts = [sum(run.summary.all.errors.get(error, 0) for run in setting.runs) for setting in settings]
        filled.append((plain(error), *map(str, counts)))
    return Table(caption, ("", *(_heading(*pair) for pair in zip(names, settings, strict=True))), tuple(filled))


_SERVER_ROWS = {
    *("mean_batch", "kv_waste", "kv_usage_mean", "kv_usage_max", "num_preemptions", "num_recomputed_tokens"),
    "prefix_hit_rate",
}


def overview(family: Family) -> Table:
    """A row for each setting, with its intervals."""
    figures = [BY_KEY[key] for key in _OVERVIEW]
    rows = [
        (
            family.name(source, setting),
            str(setting.load),
            _num_valid(setting),
            *(_with_interval(figure, setting.estimate(figure)) for figure in figures),
            str(sum(run.summary.all.num_errors for run in setting.runs)),
        )
        for source, setting in family.pairs
    ]
    header = ("label", "load", "valid runs", *map(title, figures), "failed requests")
    return _without_empty_columns(Table("Every label under every load", header, tuple(rows), num_headers=2))


def each_run(source: Source, figures: Sequence[Figure], caption: str) -> Table:
    rows = [
        (plain(run.name, 60), _status(run), *(figure.text(figure.read(run, run.summary.all)) for figure in figures))
        for run in source.result.runs
    ]
    return _without_empty_columns(Table(caption, ("run", "status", *map(title, figures)), tuple(rows)))


def each_class(source: Source) -> Table | None:
    """None where all requests are of one class."""
    if all(len(run.summary.classes) < 2 for run in source.result.runs):
        return None
    figures = [BY_KEY[key] for key in _OF_CLASS]
    rows = [
        (
            plain(run.name, 60),
            plain(name, 60),
            *(figure.text(figure.read(run, one)) for figure in figures),
            str(one.num_errors),
        )
        for run in source.result.runs
        for name, one in run.summary.classes.items()
    ]
    header = ("run", "class", *map(title, figures), "failed")
    return _without_empty_columns(Table("Each class of requests", header, tuple(rows), num_headers=2))


def errors(source: Source) -> Table | None:
    """What kept requests from finishing, as the server or the client said it."""
    rows = [
        (plain(run.name, 60), str(count), plain(error))
        for run in source.result.runs
        for error, count in sorted(run.summary.all.errors.items(), key=lambda item: -item[1])
    ]
    return Table("Errors", ("run", "requests", "message"), tuple(rows), has_text=True) if rows else None


def outcomes(source: Source) -> Table:
    figures = [BY_KEY[key] for key in ("num_requests", "num_finished", *_OUTCOMES)]
    return each_run(source, figures, "How requests ended")


def comparison_rows(comparison: Comparison) -> Table:
    header = ("", comparison.base, comparison.other, "ratio", "95% interval", "verdict", "interval from")
    rows = [
        (
            title(row.figure),
            row.figure.text(row.base),
            row.figure.text(row.other),
            NOTHING if row.ratio is None else number(row.ratio.value),
            interval_text(row.ratio),
            row.verdict,
            row.method,
        )
        for row in comparison.rows
    ]
    return Table(f"{comparison.other} over {comparison.base}, {comparison.load}", header, tuple(rows))


def capacities(sources: Sequence[Source]) -> Table | None:
    rows = [
        (
            f"{source.name}: {label_name(one.label)}" if len(sources) > 1 else label_name(one.label),
            plain(one.slo, 100),
            capacity_text(one),
            _capacity_interval(one),
            plain(one.broken_by or NOTHING, 100),
            str(one.num_runs),
        )
        for source in sources
        for one in source.result.capacities
    ]
    header = ("label", "SLO", "requests/s", "95% interval", "broken first by", "runs")
    return Table("Capacity: the highest rate that keeps the SLO", header, tuple(rows)) if rows else None


def _capacity_interval(capacity: Capacity) -> str:
    if capacity.rate is None:
        return NOTHING
    text = interval_text(Estimate(capacity.rate, capacity.low, capacity.high))
    return text if capacity.num_repeats > 1 or text == NOTHING else f"{text} (bracket of one repeat)"


def capacity_text(capacity: Capacity) -> str:
    if capacity.rate is None:
        return "none: broken at the lowest rate tried"
    return ("" if capacity.is_bounded else "at least ") + number(capacity.rate)


def interval_text(estimate: Estimate | None) -> str:
    if estimate is None or estimate.low is None or estimate.high is None:
        return NOTHING
    return f"{number(estimate.low)} to {number(estimate.high)}"


def title(figure: Figure) -> str:
    """With its unit, where the title does not say it."""
    return f"{figure.title} {figure.unit.value}" if figure.unit.value in ("s", "ms") else figure.title


def _status(run: Run) -> str:
    if run.is_interrupted:
        return "interrupted"
    return "valid" if run.is_valid else "invalid"


def _num_valid(setting: Setting) -> str:
    return f"{sum(run.is_valid for run in setting.runs)} of {len(setting.runs)}"


def _is_worth_counting(settings: Sequence[Setting]) -> bool:
    return any(len(setting.runs) > 1 or not setting.is_valid for setting in settings)


def _heading(name: str, setting: Setting) -> str:
    if setting.is_valid:
        return name
    return f"{name} ({'interrupted' if all(run.is_interrupted for run in setting.runs) else 'invalid'})"


def _cells(settings: Sequence[Setting], figure: Figure) -> list[str]:
    return [figure.text(setting.mean(figure)) for setting in settings]


def _times(settings: Sequence[Setting], names: Sequence[str]) -> tuple[str, list[str]]:
    """Of the repeats that both have, where there are any: others sent other requests."""
    figure = BY_KEY["output_tokens_per_s"]
    repeats = [{(run.repeat, run.seed): run for run in setting.counted} for setting in settings]
    cells = []
    for setting, of_setting in zip(settings, repeats, strict=True):
        common = [key for key in repeats[0] if key in of_setting]
        base, other = settings[0].mean(figure), setting.mean(figure)
        if common:
            base = replace(settings[0], runs=tuple(repeats[0][key] for key in common)).mean(figure)
            other = replace(setting, runs=tuple(of_setting[key] for key in common)).mean(figure)
        cells.append(f"{other / base:.2f}" if other and base else NOTHING)
    is_same = all(of_setting.keys() == repeats[0].keys() for of_setting in repeats)
    return f"tokens/s, times {names[0]}" + ("" if is_same else " (same repeats)"), cells


def _latency_rows(settings: Sequence[Setting], is_compact: bool) -> list[tuple[str, list[str]]]:
    rows: list[tuple[str, list[str]]] = []
    figures = (*catalogue.LATENCY, *catalogue.QUEUE)
    size = len(catalogue.PERCENTILES)
    for group in (figures[start : start + size] for start in range(0, len(figures), size)):
        name, unit = group[0].title.partition(",")[0], group[0].unit.value
        columns = [_cells(settings, figure) for figure in group]
        if is_compact:
            triples = [
                NOTHING if set(cells) == {NOTHING} else " / ".join(cells) for cells in zip(*columns, strict=True)
            ]
            rows.append((f"{name} {unit}, {' / '.join(catalogue.PERCENTILES)}", triples))
        else:
            rows += [
                (f"{name} {unit}, {key}", cells) for key, cells in zip(catalogue.PERCENTILES, columns, strict=True)
            ]
    return rows


def _requests(setting: Setting) -> str:
    """Of all its runs, valid or not."""
    read: tuple[Callable[[Run], int], ...] = (
        lambda run: run.summary.all.num_finished,
        lambda run: run.summary.all.outcomes.get(Outcome.CANCELLED.value, 0),
        lambda run: run.summary.all.num_errors,
        lambda run: run.summary.all.num_requests,
    )
    return " / ".join(str(sum(one(run) for run in setting.runs)) for one in read)


def _with_interval(figure: Figure, estimate: Estimate | None) -> str:
    if estimate is None:
        return NOTHING
    text = figure.text(estimate.value)
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ± {figure.text((estimate.high - estimate.low) / 2)}"


def _without_empty_columns(table: Table) -> Table:
    kept = [
        place
        for place in range(len(table.header))
        if place < table.num_headers or any(row[place] != NOTHING for row in table.rows)
    ]
    return Table(
        table.caption,
        tuple(table.header[place] for place in kept),
        tuple(tuple(row[place] for place in kept) for row in table.rows),
        table.num_headers,
        table.has_text,
    )
