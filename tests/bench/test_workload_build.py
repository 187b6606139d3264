"""Workloads as they are drawn: reproducible, and each key of a file changes only what it says."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from noria_bench.errors import BenchError
from noria_bench.traces import MOONCAKE_BLOCK_TOKENS
from noria_bench.workload import WorkItem, Workload, seed_workload
from noria_bench.workload_build import build_workload
from noria_bench.workload_file import load_workload, parse_workload
from noria_bench.workload_spec import Arrivals, WorkloadSpec
from support.byte_tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
CHAT = {
    "name": "chat",
    "share": 3,
    "prompt_tokens": "lognormal:64:0.8:256",
    "output_tokens": "exponential:32:128",
    "slo": "cpu",
    "priority": 1,
    "cancel": {"share": 0.25, "after_tokens": "uniform:1:60"},
    "shared_prefix": {"tokens": 32, "share": 0.5, "groups": 2},
}
CODE = {"name": "code", "prompt_tokens": "uniform:100:200", "output_tokens": 8, "sampling": {"temperature": 1.0}}
DOCUMENT = {"num_requests": 400, "num_warm_up": 5, "arrivals": {"law": "poisson", "rate": 2}, "classes": [CHAT, CODE]}
SPEC = parse_workload(DOCUMENT)


def of_class(workload: Workload, name: str) -> list[WorkItem]:
    return [item for item in workload.items if item.request_class == name]


def without_times(workload: Workload) -> list[WorkItem]:
    return [replace(item, due_s=None) for item in workload.items]


def test_the_same_arguments_give_the_same_workload() -> None:
    workload = build_workload(SPEC, seed=3)
    assert workload == build_workload(SPEC, seed=3)
    assert workload.digest() == build_workload(SPEC, seed=3).digest() != build_workload(SPEC, seed=4).digest()
    # drawn in another version of numpy or of this code, it would be another workload under the same name
    lengths = [(item.num_prompt_tokens, item.max_tokens, item.request_class) for item in workload.items]
    assert hashlib.sha256(json.dumps(lengths).encode()).hexdigest()[:16] == "c6057ebff7cdae23"


def test_another_rate_or_number_leaves_the_requests_as_they_are() -> None:
    workload = build_workload(SPEC)
    faster = build_workload(SPEC, rate=8.0)
    assert without_times(faster) == without_times(workload)
    assert [item.due_s for item in faster.items] == pytest.approx([(item.due_s or 0) / 4 for item in workload.items])
    assert build_workload(SPEC, num_requests=50).items == workload.items[:50]
    assert without_times(build_workload(replace(SPEC, arrivals=Arrivals()))) == without_times(workload)
    assert all(item.due_s is None for item in build_workload(replace(SPEC, arrivals=Arrivals())).items)


def test_what_one_class_says_does_not_change_the_lengths_of_another() -> None:
    other = {**CHAT, "output_tokens": 5, "cancel": {"share": 1, "after_tokens": 2}}
    changed = build_workload(parse_workload({**DOCUMENT, "classes": [other, CODE]}))
    workload = build_workload(SPEC)
    assert of_class(changed, "code") == of_class(workload, "code")
    own = [[item.num_prompt_tokens for item in of_class(one, "chat")] for one in (workload, changed)]
    assert own[0] == own[1]
    # nor do the number of cancels and their places depend on each other
    fewer = {**CHAT, "cancel": {"share": 0.1, "after_tokens": "uniform:1:60"}}
    few = of_class(build_workload(parse_workload({**DOCUMENT, "classes": [fewer, CODE]})), "chat")
    for item, before in zip(few, of_class(workload, "chat"), strict=True):
        assert item.cancel_after_tokens in (None, before.cancel_after_tokens)


def test_prompt_and_output_lengths_are_independent() -> None:
    items = of_class(build_workload(SPEC, num_requests=4000, scale=0.25), "chat")
    lengths = np.asarray([(item.num_prompt_tokens, item.max_tokens) for item in items])
    assert abs(np.corrcoef(lengths.T)[0, 1]) < 0.05


def test_classes_have_their_share_their_sampling_and_their_objective() -> None:
    workload = build_workload(SPEC)
    assert Counter(item.request_class for item in workload.items)["chat"] == pytest.approx(300, abs=30)
    assert {one.name: one.slo for one in workload.classes} == {"chat": "cpu", "code": None}
    assert workload.sampling == {"temperature": 0.0, "ignore_eos": True}
    assert {json.dumps(item.sampling) for item in of_class(workload, "chat")} == {'{"priority": 1}'}
    assert {json.dumps(item.sampling) for item in of_class(workload, "code")} == {'{"temperature": 1.0}'}
    assert [item.is_warm_up for item in workload.items] == [True] * 5 + [False] * 395


def test_a_share_is_cancelled_before_its_answer_has_ended() -> None:
    items = of_class(build_workload(SPEC, num_requests=2000), "chat")
    cancelled = [item for item in items if item.cancel_after_tokens is not None]
    assert len(cancelled) / len(items) == pytest.approx(0.25, abs=0.04)
    for item in cancelled:
        assert 1 <= (item.cancel_after_tokens or 0) < item.max_tokens
    assert all(item.cancel_after_tokens is None for item in items if item.max_tokens == 1)


def test_prompts_are_exact_and_share_only_the_prefix_of_their_group() -> None:
    items = of_class(build_workload(SPEC, tokenizer=BYTES, num_requests=100), "chat")
    prompts = [BYTES.encode(item.prompt) for item in items]
    assert [len(ids) for ids in prompts] == [item.num_prompt_tokens for item in items]
    beginnings = Counter(tuple(ids[:32]) for ids in prompts if len(ids) > 32)
    groups = [num for num in beginnings.values() if num > 1]
    assert len(groups) == 2
    assert sum(groups) == pytest.approx(0.5 * sum(beginnings.values()), abs=12)
    assert len({tuple(ids[:36]) for ids in prompts if len(ids) > 36}) == sum(len(ids) > 36 for ids in prompts)


def test_a_prompt_no_longer_than_its_prefix_has_a_last_token_of_its_own() -> None:
    document = {
        "num_requests": 4,
        "classes": [{"prompt_tokens": "mix:1:10", "output_tokens": 1, "shared_prefix": {"tokens": 64}}],
    }
    prompts = [BYTES.encode(item.prompt) for item in build_workload(parse_workload(document), tokenizer=BYTES).items]
    assert sorted(map(len, prompts)) == [1, 1, 10, 10]
    one, two = (ids for ids in prompts if len(ids) == 10)
    assert one[:9] == two[:9]


def test_scale_multiplies_all_lengths() -> None:
    full, small = build_workload(SPEC), build_workload(SPEC, scale=0.25)
    for item, before in zip(small.items, full.items, strict=True):
        assert item.num_prompt_tokens == max(1, round(before.num_prompt_tokens / 4))
        assert item.max_tokens == max(1, round(before.max_tokens / 4))
        assert item.due_s == before.due_s
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(BenchError, match="scale must be"):
            build_workload(SPEC, scale=scale)


def test_the_seed_workload_is_the_one_of_the_published_results() -> None:
    workload = build_workload(load_workload("seed"), seed=0)
    assert workload == seed_workload(32, 1.0, 0)
    assert build_workload(load_workload("seed"), seed=5, scale=0.3, num_requests=8) == seed_workload(8, 0.3, 5)
    values = [[item.prompt, item.num_prompt_tokens, item.max_tokens] for item in workload.items]
    assert (
        hashlib.sha256(json.dumps(values).encode()).hexdigest()
        == "ff824748d30fe6fefd427f719c9704202cfb79127ab1d852203223c2d0d10cb6"
    )
    # a tokenizer would make other prompts
    assert build_workload(load_workload("seed"), tokenizer=BYTES) == workload
    opened = build_workload(load_workload("seed"), rate=0.5)
    assert without_times(opened) == list(workload.items)
    assert opened.items[-1].due_s == pytest.approx(64, rel=0.5)


def test_the_number_must_leave_something_after_the_warm_up() -> None:
    with pytest.raises(BenchError, match="num_warm_up must be less than the number of requests, 5, not 5"):
        build_workload(SPEC, num_requests=5)


def test_lengths_that_cannot_be_drawn_are_named() -> None:
    document = {"num_requests": 4, "classes": [{"prompt_tokens": 1, "output_tokens": "lognormal:1e6:0.01:10"}]}
    with pytest.raises(BenchError, match="output_tokens: cap must leave room"):
        build_workload(parse_workload(document))


def trace_spec(
    tmp_path: Path, lines: list[object], trace: dict[str, object] | None = None, **values: object
) -> WorkloadSpec:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return parse_workload({"classes": [{"trace": {"path": str(path), **(trace or {})}, **values}]})


def mooncake(time: float, prompt: int, output: int, *hash_ids: int) -> dict[str, object]:
    return {"timestamp": time, "input_length": prompt, "output_length": output, "hash_ids": hash_ids}


def test_equal_hashes_are_equal_blocks_and_all_else_differs(tmp_path: Path) -> None:
    lines = [mooncake(0, 1100, 5, 7, 8, 9), mooncake(2000, 1050, 6, 7, 8, 10), mooncake(3000, 600, 7, 11, 12)]
    spec = replace(trace_spec(tmp_path, lines), arrivals=Arrivals("trace", speed=2.0))
    workload = build_workload(spec, tokenizer=BYTES)
    assert [item.due_s for item in workload.items] == [0, 1, 1.5]
    one, two, three = (BYTES.encode(item.prompt) for item in workload.items)
    assert [len(one), len(two), len(three)] == [1100, 1050, 600]
    num_shared = 2 * MOONCAKE_BLOCK_TOKENS
    assert one[:num_shared] == two[:num_shared]
    assert one[num_shared : num_shared + 4] != two[num_shared : num_shared + 4]
    assert one[:4] != three[:4]
    # scaled, they share as large a part
    small = [BYTES.encode(item.prompt) for item in build_workload(spec, tokenizer=BYTES, scale=0.1).items]
    assert list(map(len, small)) == [110, 105, 60]
    assert small[0][:102] == small[1][:102]
    assert small[0][102:106] != small[1][102:106]
    # and to a rate, by its own pattern
    assert [item.due_s for item in build_workload(spec, rate=1.0).items] == pytest.approx([0, 4 / 3, 2])


def test_lengths_of_a_trace_may_come_by_another_law_of_arrivals(tmp_path: Path) -> None:
    lines = [mooncake(0, 5, 2), mooncake(9, 600, 90), mooncake(10, 7, 3)]
    spec = trace_spec(tmp_path, lines)
    assert [(item.num_prompt_tokens, item.max_tokens, item.due_s) for item in build_workload(spec).items] == [
        (5, 2, None),
        (600, 90, None),
        (7, 3, None),
    ]
    opened = build_workload(spec, rate=1.0, num_requests=2)
    assert [item.max_tokens for item in opened.items] == [2, 90]
    assert all(item.due_s is not None for item in opened.items)
    limits = {"max_prompt_tokens": 100, "max_output_tokens": 10}
    cut = build_workload(trace_spec(tmp_path, lines, limits))
    assert [(item.num_prompt_tokens, item.max_tokens) for item in cut.items] == [(5, 2), (100, 10), (7, 3)]
    dropped = build_workload(trace_spec(tmp_path, lines, {**limits, "longer": "drop"}))
    assert [item.num_prompt_tokens for item in dropped.items] == [5, 7]
    with pytest.raises(BenchError, match="holds 3 requests within bounds; the workload needs 9"):
        build_workload(spec, num_requests=9)
    with pytest.raises(BenchError, match="no request is within max_prompt_tokens"):
        build_workload(trace_spec(tmp_path, lines, {"max_prompt_tokens": 1, "longer": "drop"}))


def test_prompts_of_others_are_sent_as_they_are(tmp_path: Path) -> None:
    lines = [{"prompt": "What is the capital of India?", "output_tokens": 7}, {"prompt": "Why?"}]
    with pytest.raises(BenchError, match="'Why\\?' has no output_tokens"):
        build_workload(trace_spec(tmp_path, lines))
    spec = trace_spec(tmp_path, lines, output_tokens="mix:3")
    items = build_workload(spec, tokenizer=BYTES).items
    assert [(item.prompt, item.num_prompt_tokens, item.max_tokens) for item in items] == [
        ("What is the capital of India?", 29, 3),
        ("Why?", 4, 3),
    ]
    assert [item.prompt for item in build_workload(spec, tokenizer=BYTES, scale=0.5).items] == ["What is the ca", "Wh"]
    with pytest.raises(BenchError, match=r"does not say when requests came: give arrivals\.law another value"):
        build_workload(replace(spec, arrivals=Arrivals("trace")))
    with pytest.raises(BenchError, match="class default: shared_prefix is not for"):
        build_workload(trace_spec(tmp_path, lines, output_tokens=3, shared_prefix={"tokens": 3}))


def test_conversations_have_the_length_of_their_first_answer(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hello!"}, {"from": "gpt", "value": "Hello, you."}]
    spec = trace_spec(tmp_path, [[{"conversations": turns}]])
    (item,) = build_workload(spec, tokenizer=BYTES).items
    assert (item.prompt, item.num_prompt_tokens, item.max_tokens) == ("Hello!", 6, 11)
    # at four characters a token
    (item,) = build_workload(spec).items
    assert (item.num_prompt_tokens, item.max_tokens) == (2, 3)


def test_a_text_of_ones_own_needs_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three four " * 30)
    document = {"num_requests": 2, "text": "text.txt", "classes": [{"prompt_tokens": 30, "output_tokens": 1}]}
    spec = parse_workload(document, folder=tmp_path)
    with pytest.raises(BenchError, match="text: cutting prompts from a file needs the served model's tokenizer"):
        build_workload(spec)
    prompts = [item.prompt.lower() for item in build_workload(spec, tokenizer=BYTES).items]
    assert all(set(prompt) <= set("one two three four") for prompt in prompts)


def test_a_workload_survives_the_way_through_json() -> None:
    """The load generator is another process, and a result keeps the document."""
    workload = build_workload(SPEC, num_requests=10)
    assert json.loads(json.dumps([asdict(item) for item in workload.items]))
    assert build_workload(parse_workload(json.loads(json.dumps(SPEC.document))), num_requests=10) == workload
