"""Workload files: all that may stand in one, and what is said of what may not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from noria_bench.errors import BenchError
from noria_bench.lengths import ConstantLength, ExponentialLength, LognormalLength, UniformLength
from noria_bench.ramps import RampPiece
from noria_bench.workload_build import build_workload
from noria_bench.workload_file import input_hashes, load_workload, parse_workload
from noria_bench.workload_spec import Arrivals, Cancels, ClassSpec, SharedPrefix, TraceSource, WorkloadSpec

ROOT = Path(__file__).parents[2]
LENGTHS = {"prompt_tokens": 8, "output_tokens": 4}


def test_all_that_may_stand_in_a_file() -> None:
    document = {
        "num_requests": 200,
        "duration": 60,
        "num_warm_up": 8,
        "text": "mine.txt",
        "sampling": {"temperature": 0.7, "stop": ["\n"]},
        "arrivals": {"law": "gamma", "burstiness": 2},
        "classes": [
            {
                "name": "chat",
                "rate": 2,
                "prompt_tokens": "lognormal:128:0.8:512",
                "output_tokens": {"law": "exponential", "mean": 128, "cap": 512},
                "priority": 1,
                "user": "alice",
                "cache_salt": "pepper",
                "slo": "mlperf-8b-server",
                "cancel": {"share": 0.1, "after_tokens": 5},
                "shared_prefix": {"tokens": 64, "share": 0.5, "groups": 2},
                "sampling": {"seed": 7},
            },
            {
                "name": "replayed",
                "rate": 1,
                "trace": {
                    "path": "trace.csv",
                    "format": "azure",
                    "max_prompt_tokens": 512,
                    "max_output_tokens": 64,
                    "longer": "drop",
                },
                "output_tokens": "uniform:1:9",
            },
        ],
    }
    spec = parse_workload(document, folder=Path("some/folder"))
    assert spec == WorkloadSpec(
        num_requests=200,
        duration_s=60.0,
        num_warm_up=8,
        text=Path("some/folder/mine.txt"),
        sampling={"temperature": 0.7, "ignore_eos": True, "stop": ["\n"]},
        arrivals=Arrivals("gamma", burstiness=2.0),
        classes=(
            ClassSpec(
                name="chat",
                rate=2.0,
                prompt_tokens=LognormalLength(128, 0.8, 512),
                output_tokens=ExponentialLength(128, 512),
                slo="mlperf-8b-server",
                cancels=Cancels(0.1, ConstantLength(5)),
                shared_prefix=SharedPrefix(64, 0.5, 2),
                sampling={"seed": 7, "priority": 1, "user": "alice", "cache_salt": "pepper"},
            ),
            ClassSpec(
                name="replayed",
                rate=1.0,
                output_tokens=UniformLength(1, 9),
                trace=TraceSource(Path("some/folder/trace.csv"), "azure", 512, 64, is_clipping=False),
            ),
        ),
        document=spec.document,
    )
    # without its file, paths are those from here
    assert parse_workload(json.loads(json.dumps(spec.document))) == spec
    assert spec.document["text"] == "some/folder/mine.txt"
    assert spec.document | {"text": 0, "classes": 0} == document | {"text": 0, "classes": 0}
    assert document["text"] == "mine.txt"


def test_a_ramp_has_steps_and_slopes() -> None:
    pieces = [{"rate": 1, "seconds": 30}, {"from": 1, "to": 8, "seconds": 60, "shape": "exponential"}]
    spec = parse_workload({"arrivals": {"ramp": [*pieces, {"from": 8, "to": 0, "seconds": 9}]}, "classes": [LENGTHS]})
    assert spec.arrivals == Arrivals(
        "poisson", ramp=(RampPiece(1, 1, 30), RampPiece(1, 8, 60, is_exponential=True), RampPiece(8, 0, 9))
    )


def with_class(**values: object) -> dict[str, object]:
    return {"num_requests": 4, "classes": [{"name": "first", **LENGTHS}, {"name": "second", **LENGTHS, **values}]}


def with_arrivals(**values: object) -> dict[str, object]:
    return {"num_requests": 4, "classes": [LENGTHS], "arrivals": values}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "f: give either classes, a list of at least one, or builtin: seed"),
        ({"builtin": "seed", "classes": [LENGTHS]}, "f: give either classes"),
        ({"builtin": "mix"}, "f: builtin must be one of seed, not 'mix'"),
        ({"classes": {}}, "f: classes must be a list of at least one mapping, not {}"),
        ({"classes": [3]}, r"f: classes\[0\] must be a mapping of keys to values, not 3"),
        ({"classes": [LENGTHS]}, "f: num_requests must be given"),
        ({"classes": [LENGTHS], "num_requests": 0}, "f: num_requests must be a whole number of at least 1, not 0"),
        ({"classes": [LENGTHS], "num_requests": True}, "f: num_requests must be a whole number"),
        ({"classes": [LENGTHS], "num_request": 3}, "f: unknown key 'num_request'; valid are builtin, num_requests, cl"),
        ({"builtin": "seed", "num_warm_up": 32}, "f: num_warm_up must be less than num_requests, not 32"),
        ({"builtin": "seed", "duration": 3}, "f: duration needs an open loop"),
        ({"builtin": "seed", "text": 3}, "f: text must be a text, not 3"),
        (
            {"builtin": "seed", "sampling": {"max_tokens": 3}},
            "f: sampling must be a mapping of sampling parameters, prompt, n, ma",
        ),
        ({"builtin": "seed", "sampling": [1]}, "f: sampling must be a mapping"),
        ({"builtin": "seed", "sampling": {"top_p": float("nan")}}, "f: sampling: "),
        (
            with_class(output_tokens="exponential:3"),
            r"f: classes\[1\]\.output_tokens must be a law of lengths as expon",
        ),
        (with_class(output_token=3), r"f: classes\[1\]: unknown key 'output_token'; valid are trace, prompt_tokens, o"),
        (with_class(prompt_tokens=None), r"f: classes\[1\] must have prompt_tokens and output_tokens, or a trace"),
        (with_class(output_tokens=None), r"f: classes\[1\] must have prompt_tokens and output_tokens, or a trace"),
        (with_class(trace={"path": "x"}), r"f: classes\[1\] must have prompt_tokens and output_tokens, or a trace"),
        (with_class(name="first"), r"f: classes\[1\]\.name must differ from the other classes', not 'first'"),
        (with_class(share=-1), r"f: classes\[1\]\.share must be a finite number above 0, not -1"),
        (with_class(share=1, rate=1), r"f: classes\[1\]\.share and a rate of its own exclude each other"),
        (with_class(rate=1), r"f: classes\[0\]\.rate must be given, as other classes have rates"),
        (with_class(slo="ttft=3"), r"f: classes\[1\]\.slo: --slo takes KEY=SECONDS"),
        (with_class(priority=-1), r"f: classes\[1\]\.priority must be a whole number of at least 0"),
        (with_class(user=""), r"f: classes\[1\]\.user must be a text, not ''"),
        (with_class(sampling={"priority": 1}), r"f: classes\[1\]\.sampling must be a mapping"),
        (
            with_class(cancel={"share": 2, "after_tokens": 5}),
            r"f: classes\[1\]\.cancel\.share must be a number from 0 to 1",
        ),
        (with_class(cancel={"share": 0.5}), r"f: classes\[1\]\.cancel\.after_tokens must be a whole number or a law"),
        (
            with_class(cancel={"after": 5, "after_tokens": 5}),
            r"f: classes\[1\]\.cancel: unknown key 'after'; valid are sh",
        ),
        (with_class(shared_prefix={"share": 1}), r"f: classes\[1\]\.shared_prefix\.tokens must be a whole number"),
        (with_class(shared_prefix=64), r"f: classes\[1\]\.shared_prefix must be a mapping of keys to values, not 64"),
        (
            with_arrivals(law="uniform"),
            "f: arrivals.law must be one of closed, poisson, gamma, constant, trace, not 'u",
        ),
        (with_arrivals(law="poisson"), "f: arrivals.law poisson needs one of arrivals.rate, arrivals.ramp"),
        (with_arrivals(law="poisson", rate=0), "f: arrivals.rate must be a finite number above 0, not 0"),
        (with_arrivals(law="poisson", rate="2"), "f: arrivals.rate must be a finite number above 0, not '2'"),
        (
            with_arrivals(law="closed", rate=1),
            "f: arrivals.rate is for arrivals by poisson, gamma, constant, not closed",
        ),
        (with_arrivals(law="poisson", rate=1, burstiness=2), "f: arrivals.burstiness is for arrivals by gamma"),
        (with_arrivals(law="poisson", rate=1, speed=2), "f: arrivals.speed is for arrivals by trace, not poisson"),
        (with_arrivals(law="trace"), r"f: classes\[0\]\.trace must be given, as arrivals\.law is trace"),
        (with_arrivals(ramp=[{"seconds": 3}]), r"f: arrivals\.ramp\[0\] must be {rate, seconds} or {from, to, seconds"),
        (with_arrivals(ramp=[{"rate": 3, "to": 3, "seconds": 1}]), r"f: arrivals\.ramp\[0\]: unknown key 'to'"),
        (
            with_arrivals(ramp=[{"from": 0, "to": 3, "seconds": 1, "shape": "exponential"}]),
            r"f: arrivals\.ramp\[0\]: an exponential piece must start and end above 0",
        ),
        (
            with_arrivals(ramp=[{"rate": 3, "seconds": 1}]) | {"duration": 3},
            "f: duration: the ramp's seconds say how long it is",
        ),
        (
            {"num_requests": 3, "classes": [{"trace": {}}]},
            r"f: classes\[0\]\.trace\.path must be the path of a file, not None",
        ),
        (
            {"num_requests": 3, "classes": [{"trace": {"path": "x", "format": "burst"}}]},
            r"f: classes\[0\]\.trace\.format must be one of azure, mooncake, vllm, sharegpt, not 'burst'",
        ),
        (
            {"classes": [{**LENGTHS, "rate": 1}], "num_requests": 3},
            r"f: classes\[0\]\.rate needs arrivals\.law to be po",
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_place_and_with_what_is_valid(document: dict[str, object], message: str) -> None:
    with pytest.raises(BenchError, match=f"^{message}"):
        parse_workload(document, "f")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("w.yaml", "builtin: [", r"w\.yaml: no YAML"),
        ("w.yaml", "builtin: seed\nbuiltin: seed", r"w\.yaml: the key 'builtin' comes twice"),
        ("w.yaml", "classes: [{name: a, name: b}]", r"w\.yaml: the key 'name' comes twice"),
        ("w.yaml", "- builtin", r"w\.yaml must hold a mapping"),
        ("w.yaml", "!!python/object/apply:os.getcwd []", "no YAML"),
        ("w.json", "{", r"w\.json: "),
        ("w.json", '{"builtin": "seed", "builtin": "seed"}', r"w\.json: the key 'builtin' comes twice"),
        ("w.yml", "builtin: mix", r"w\.yml: builtin must be one of seed"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        load_workload(str(path))


def test_json_and_yaml_say_the_same(tmp_path: Path) -> None:
    document = with_class(share=2)
    (tmp_path / "w.json").write_text(json.dumps(document))
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(document))
    assert load_workload(str(tmp_path / "w.json")) == load_workload(str(tmp_path / "w.yaml"))


def test_short_names() -> None:
    assert load_workload("seed").is_seed
    law = load_workload("exponential:128:512", "uniform:1:9")
    assert law.num_requests == 32
    assert (law.classes[0].prompt_tokens, law.classes[0].output_tokens) == (
        UniformLength(1, 9),
        ExponentialLength(128, 512),
    )
    assert parse_workload(law.document) == law
    assert load_workload("seed_mix").classes[0].prompt_tokens == LognormalLength(128, 0.8, 2048)
    with pytest.raises(BenchError, match=r"a workload is seed, a file \(.json, .yaml, .yml\), a trace .*, not 'sed'"):
        load_workload("sed")
    with pytest.raises(BenchError, match="needs a workload that is a law"):
        load_workload("seed", "uniform:1:9")
    with pytest.raises(BenchError, match=r"cannot read none\.yaml"):
        load_workload("none.yaml")


def test_a_trace_is_a_workload_by_itself(tmp_path: Path) -> None:
    timed, untimed = tmp_path / "a.csv", tmp_path / "b.jsonl"
    timed.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4\n")
    untimed.write_text('{"prompt": "a b", "output_tokens": 3}\n')
    assert load_workload(str(timed)).arrivals == Arrivals("trace")
    assert load_workload(str(untimed)).arrivals == Arrivals()
    hashes = input_hashes(load_workload(str(timed)))
    assert {path: len(digest) for path, digest in hashes.items()} == {str(timed): 64}
    timed.unlink()
    with pytest.raises(BenchError, match="cannot read"):
        input_hashes(parse_workload({"classes": [{"trace": {"path": str(timed)}}]}))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/workloads").iterdir()), ids=lambda path: path.stem)
def test_the_examples_are_right(path: Path) -> None:
    workload = build_workload(load_workload(str(path)), seed=1)
    assert len(workload.items) > 20
    # what the embedded model on two cores can be asked for
    assert max(item.num_prompt_tokens + item.max_tokens for item in workload.items) <= 1024


def test_the_examples_in_the_documentation_are_right() -> None:
    text = (ROOT / "docs/workloads.md").read_text()
    documents = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    assert len(documents) >= 3
    keys: set[str] = set()
    for document in documents:
        spec = parse_workload(document, "docs/workloads.md")
        assert spec.classes
        keys |= _keys(document)
    # every key is in an example
    assert keys >= {"cancel", "shared_prefix", "trace", "ramp", "burstiness", "speed", "cache_salt", "text", "builtin"}


def _keys(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_keys, value.values()))
    return set().union(*map(_keys, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize(
    "change",
    [
        {"num_requests": 10**12},
        {"classes": [{**LENGTHS, "output_tokens": "constant:99999999999"}], "num_requests": 1},
        {"classes": [{**LENGTHS, "output_tokens": f"constant:{10**26}"}], "num_requests": 1},
        {"classes": [{**LENGTHS, "shared_prefix": {"tokens": 4, "groups": 10**11}}], "num_requests": 1},
        {"classes": [LENGTHS], "num_requests": 3, "arrivals": {"law": "gamma", "rate": 1, "burstiness": 1e-200}},
    ],
)
def test_what_would_take_all_memory_is_refused(change: dict[str, object]) -> None:
    """These ended in MemoryError, OverflowError, ZeroDivisionError, or not at all."""
    document = {"classes": [LENGTHS]} | change
    with pytest.raises(BenchError):
        build_workload(parse_workload(document, "f"))
