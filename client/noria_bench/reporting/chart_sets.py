"""Which charts a report shows of which results. What has nothing to show is left out."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from itertools import count

from noria_bench.reporting.bar_charts import bars_of, capacity_bars, slot_bars
from noria_bench.reporting.charts import Chart, goodput_against_load, throughput_against_latency
from noria_bench.reporting.figures import BY_KEY
from noria_bench.reporting.loaded import Family, Source
from noria_bench.reporting.palette import Palette
from noria_bench.reporting.ratio import RatioPoint
from noria_bench.reporting.ratio_chart import ratio_curve
from noria_bench.reporting.request_charts import distribution, requests_over_time, shown_under
from noria_bench.reporting.series_chart import over_time

# the lowest, one in between, the highest
_MAX_LOADS_OF_DISTRIBUTIONS = 3


def summary_charts(
    sources: Sequence[Source], points: Sequence[RatioPoint], palette: Palette, numbers: count[int]
) -> list[Chart]:
    """Of all results together."""
    charts = (
        capacity_bars(_key(numbers), sources, palette),
        ratio_curve(_key(numbers), points, palette),
    )
    return [chart for chart in charts if chart is not None]


def family_charts(family: Family, palette: Palette, numbers: count[int]) -> list[Chart]:
    """Of results of one workload."""
    return [chart for chart in _of_family(family, palette, numbers) if chart is not None]


def _of_family(family: Family, palette: Palette, numbers: count[int]) -> Iterator[Chart | None]:
    for latency in ("ttft_p95_s", "tpot_p95_s"):
        yield throughput_against_latency(_key(numbers), family, palette, BY_KEY[latency])
    for load in family.shown_loads(_MAX_LOADS_OF_DISTRIBUTIONS):
        shown = shown_under(family, load, palette)
        for latency, unit in (("ttft", "s"), ("tpot", "ms")):
            yield distribution(_key(numbers), latency, unit, shown, load)
    yield goodput_against_load(_key(numbers), family, palette)
    [typical] = family.shown_loads(1)
    yield slot_bars(_key(numbers), bars_of(family, typical), palette)
    shown = shown_under(family, typical, palette)
    yield over_time(_key(numbers), shown, typical)
    pictures = [(source, picture) for source in family.sources if (picture := source.slots_picture()) is not None]
    for source, picture in pictures:
        yield _slots_picture(source, picture)
    if not pictures:
        yield requests_over_time(_key(numbers), shown, typical)


def _slots_picture(source: Source, picture: bytes) -> Chart:
    # as an image nothing in it can run, or reach the page
    uri = "data:image/svg+xml;base64," + base64.b64encode(picture).decode()
    caption = "Recorded by the server, step by step. Drawn for white."
    return Chart(f"Slots over time, {source.name}", caption, uri, is_wide=True, is_image=True)


def _key(numbers: count[int]) -> str:
    return f"c{next(numbers)}"
