"""Which runs belong together, and what of a configuration a report goes by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from noria_bench.errors import BenchError
from noria_bench.reporting.figures import BY_KEY
from noria_bench.reporting.intervals import Estimate
from noria_bench.reporting.loaded import Load, families_of, is_closed, load_sources, num_slots, settings_of
from noria_bench.results import write_result
from support.bench_results import health, with_run, write_bench_result

TOKENS = BY_KEY["output_tokens_per_s"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "sweep"
    write_bench_result(folder, rates=(0.4, 0.1), num_repeats=2, num_requests=8, lengths=(4, 8))
    return load_sources([folder])[0]


def test_repeats_are_one_setting(sweep):
    assert [(one.label, one.load, len(one.runs)) for one in sweep.settings] == [
        (label, Load(rate), 2) for rate in (0.1, 0.4) for label in ("static", "dynamic", "inflight")
    ]
    first = sweep.settings[0]
    speeds = [run.summary.all.output_tokens_per_s for run in first.runs]
    assert first.mean(TOKENS) == pytest.approx(sum(speeds) / 2)
    assert first.estimate(TOKENS).low < min(speeds)


def test_invalid_runs_do_not_count_beside_valid_ones(sweep):
    result = with_run(sweep.result, 0, generator=health(("too slow",)))
    runs = [run for run in result.runs if run.label == result.runs[0].label and run.rate == result.runs[0].rate]
    [setting] = settings_of(runs)
    assert setting.counted == (runs[1],)
    assert setting.estimate(TOKENS) == Estimate(runs[1].summary.all.output_tokens_per_s)
    # where none is valid all of them are shown, and said not to be
    [setting] = settings_of([replace(run, is_interrupted=True) for run in runs])
    assert (len(setting.counted), setting.is_valid) == (2, False)


def test_a_figure_that_is_no_number_is_left_out(sweep):
    run = sweep.result.runs[0]
    broken = replace(run.summary, all=replace(run.summary.all, output_tokens_per_s=float("nan")))
    [setting] = settings_of([replace(run, summary=broken)])
    assert setting.estimate(TOKENS) is None


def test_loads_that_most_labels_share_are_shown(sweep):
    [family] = families_of([sweep])
    assert [str(load) for load in family.loads] == ["0.1/s", "0.4/s"]
    assert family.shown_loads(1) == [Load(0.4)]
    assert family.shown_loads(3) == [Load(0.1), Load(0.4)]


def test_results_of_one_workload_share_axes(tmp_path):
    for name, sha256 in (("a", "1" * 64), ("b", "2" * 64), ("c", "1" * 64)):
        write_bench_result(tmp_path / name, num_requests=4, lengths=(2,), sha256=sha256, has_lines=False)
    sources = load_sources([tmp_path / name for name in "abc"])
    assert [[source.name for source in family.sources] for family in families_of(sources)] == [["a", "c"], ["b"]]


def test_slots_are_those_of_triton_where_it_forms_the_batches(sweep):
    static, inflight = (
        next(run for run in sweep.result.runs if run.label == label) for label in ("static", "inflight")
    )
    config = {"config": {"max_batch_size": 4}}
    assert num_slots(replace(static, environment=config)) == 4
    assert num_slots(replace(inflight, environment=config)) == 8
    assert num_slots(replace(static, engine={})) is None


def test_the_mode_of_a_server_that_ran_already(sweep):
    run = replace(sweep.result.runs[0], label="server", engine={})
    assert not is_closed(run)
    parameters = {"batching_mode": {"string_value": "dynamic"}}
    assert is_closed(replace(run, environment={"config": {"parameters": parameters}}))


def test_names_are_unique(tmp_path):
    for path in (tmp_path / "x" / "run", tmp_path / "y" / "run"):
        write_bench_result(path, num_requests=4, lengths=(2,), has_lines=False)
    sources = load_sources([tmp_path / "x" / "run", tmp_path / "y" / "run" / "result.json"])
    assert [source.name for source in sources] == ["run", "run (2)"]


def test_a_result_without_runs(tmp_path):
    result = write_bench_result(tmp_path / "empty", num_requests=4, lengths=(2,), has_lines=False)
    write_result(tmp_path / "empty", replace(result, runs=[]))
    with pytest.raises(BenchError, match="holds no runs"):
        load_sources([tmp_path / "empty"])
