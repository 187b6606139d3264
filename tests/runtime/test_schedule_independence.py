"""Scheduling never changes tokens: each request is answered as if it were alone and nothing of it were ever kept.

What is right comes from a loop that knows no scheduler (`tokens_by_recomputing`). Every policy must give the same, by
equality, in float32: first on a tiny model, in many combinations, then on the embedded model, in the main ones.
"""

import dataclasses
import random

import pytest

from noria.config import EngineConfig
from noria.models.model_store import resolve_model
from noria.models.tokenizer import load_tokenizer
from noria.presets import PRESETS
from noria.runtime.build import build_runner
from noria.sampling_params import SamplingParams
from noria.sequence import Request
from support.schedule_runs import HandDrivenEngine, tokens_by_recomputing
from support.tiny_models import tiny_model_dir

ROOMY = EngineConfig(device="cpu", num_threads=1, num_kv_blocks=320, block_size=2, max_num_seqs=8, prefix_caching=False)
# the longest request takes 14 blocks, all together 97
SMALL_POOL = {"num_kv_blocks": 18, "max_preemptions": 2**20, "admission_headroom": 0.0}
SWAP = {"preemption": "swap", "num_host_blocks": 64}

SCHEDULES = {
    "whole prompts by turns": {"chunked_prefill": False, "max_prefill_tokens": 30},
    "small budget": {"max_num_batched_tokens": 8},
    "prefix caching": {"prefix_caching": True},
    "prefix caching, chunks of 3": {"prefix_caching": True, "max_prefill_tokens": 3},
    "equal progress": {"prefill_order": "equal_progress", "max_prefill_tokens": 24},
    "separate prefills": {"prefill_batching": "separate"},
    "separate prefills in chunks": {"prefill_batching": "separate", "max_prefill_tokens": 16},
    "separate whole prompts": {"prefill_batching": "separate", "chunked_prefill": False},
    "guaranteed_no_evict": {"admission": "guaranteed_no_evict", "num_kv_blocks": 40},
    "waiting_served_ratio": {"insertion": "waiting_served_ratio", "max_waiting_tokens": 3, "max_num_seqs": 4},
    "max_batch_total_tokens": {"max_batch_total_tokens": 70},
    "fair share, two slots": {"fair_share": True, "max_num_seqs": 2},
    "preempted once at most": {"num_kv_blocks": 18, "max_preemptions": 1},
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 320, "prefix_caching": True},
    "blocks of 64": {"block_size": 64, "num_kv_blocks": 10, "prefix_caching": True},
} | {f"preset {name}": dict(values) for name, values in PRESETS.items()}

PREEMPTING = {
    "recompute": {},
    "recompute, equal progress": {"prefill_order": "equal_progress", "max_prefill_tokens": 16},
    "recompute, prefix caching, separate prefills": {"prefix_caching": True, "prefill_batching": "separate"},
    "swap": SWAP,
    "swap, prefix caching, chunks of 5": SWAP | {"prefix_caching": True, "max_prefill_tokens": 5},
    "swap, prefix caching, host pool too small": SWAP | {"prefix_caching": True, "num_host_blocks": 9},
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return build_runner(ROOMY, tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")).decoder


def make_requests(prompts, max_tokens):
    """Half of them greedy, half drawn with seeds; one of each half with penalties."""
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 1.4, "top_p": 0.8, "top_k": 50, "presence_penalty": 0.5},
    )
    return [
        Request(
            request_id=index,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=length, user=f"user {index % 3}", **kinds[index % len(kinds)]),
            seed=1000 + index // 2,
        )
        for index, (prompt, length) in enumerate(zip(prompts, max_tokens, strict=True))
    ]


@pytest.fixture(scope="module")
def requests():
    """Eight short prompts with longer outputs, which outgrow a small pool; some begin alike, two are the same."""
    draw = random.Random(5)
    prompts = [[draw.randrange(4, 300) for _ in range(length)] for length in (3, 16, 6, 12, 3, 16, 5, 8)]
    prompts[3][:9] = prompts[1][:9]
    prompts[5], prompts[7] = prompts[1], prompts[1][:8]
    return make_requests(prompts, max_tokens=(18, 12, 18, 13, 18, 12, 16, 14))


@pytest.fixture(scope="module")
def expected(decoder, requests):
    return [tokens_by_recomputing(decoder, request) for request in requests]


def config(**changes):
    return dataclasses.replace(ROOMY, **changes)


def answers(run):
    return list(run.tokens.values())


def renumbered(requests, first_id):
    return [dataclasses.replace(request, request_id=first_id + i) for i, request in enumerate(requests)]


def test_the_requests_tell_histories_apart(expected):
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert all(len(set(tokens)) > 6 for tokens in expected)


def test_alone(decoder, requests, expected):
    engine = HandDrivenEngine(decoder, ROOMY)
    assert [answers(engine.run([request])) for request in requests] == [[tokens] for tokens in expected]


@pytest.mark.parametrize("name", SCHEDULES)
def test_beside_others(decoder, requests, expected, name):
    engine = HandDrivenEngine(decoder, config(**SCHEDULES[name]))
    assert answers(engine.run(requests, steps_apart=1)) == expected


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_in_a_closed_batch(decoder, requests, expected, mode):
    run = HandDrivenEngine(decoder, config(batching_mode=mode)).run(requests)
    assert answers(run) == expected
    assert run.num_padding_rows == sum(18 - len(tokens) for tokens in expected)


@pytest.mark.parametrize(
    ("changes", "num_prefill_tokens"),
    [
        ({"max_prefill_tokens": 1}, 1),
        ({"max_prefill_tokens": 16}, 16),
        ({"max_prefill_tokens": 64}, 64),
        ({"chunked_prefill": False}, 69),
    ],
    ids=str,
)
def test_in_chunks(decoder, requests, expected, changes, num_prefill_tokens):
    run = HandDrivenEngine(decoder, config(**changes)).run(requests)
    assert answers(run) == expected
    # beside decodes of the seven others
    assert num_prefill_tokens <= run.max_num_tokens <= num_prefill_tokens + 7


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_prefill_tokens": 16}, {"batching_mode": "static"}, SMALL_POOL | SWAP],
    ids=["roomy", "chunks of 16", "static", "small pool, swap"],
)
def test_cold_then_warm(decoder, requests, expected, changes):
    engine = HandDrivenEngine(decoder, config(prefix_caching=True, **changes))
    cold = engine.run(requests)
    warm = engine.run(renumbered(requests, 100))
    assert answers(cold) == answers(warm) == expected
    assert warm.num_prefix_hit_tokens > cold.num_prefix_hit_tokens


@pytest.mark.parametrize("name", PREEMPTING)
def test_after_preemptions(decoder, requests, expected, name):
    """The oldest request is never driven out; so that each is, a second run takes them the other way round."""
    engine = HandDrivenEngine(decoder, config(**SMALL_POOL, **PREEMPTING[name]))
    first, second = engine.run(requests), engine.run(requests[::-1])
    assert answers(first) == answers(second)[::-1] == expected
    num_preemptions = [first.num_preemptions[id] + second.num_preemptions[id] for id in first.tokens]
    assert min(num_preemptions) >= 1
    assert sum(num_preemptions) > 2 * len(requests)
    num_swap_outs = first.num_swap_outs + second.num_swap_outs
    if "host pool too small" in name:
        assert 0 < num_swap_outs < sum(num_preemptions)
    else:
        assert num_swap_outs == (sum(num_preemptions) if "swap" in name else 0)
    assert (first.num_swapped_in_blocks > 0) == ("swap" in name)


@pytest.mark.parametrize("changes", [{"prefix_caching": True}, SWAP], ids=["prefix caching", "swap"])
def test_after_pauses(decoder, requests, expected, changes):
    run = HandDrivenEngine(decoder, config(**SMALL_POOL, **changes)).run(requests, pause_every=1)
    assert answers(run) == expected
    assert min(run.num_pauses.values()) > 1
    assert (run.num_swapped_in_blocks > 0) == ("preemption" in changes)


PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics state that",
    "Q: What is the boiling point of water at sea level?\nA:",
    "The capital of France is a city that is known for",
    "In 1969, the first humans landed on the Moon.",
)
EMBEDDED = dataclasses.replace(ROOMY, num_threads=2, max_num_seqs=len(PROMPTS))
# the longest request takes 10 blocks, all together 54
EMBEDDED_SMALL_POOL = SMALL_POOL | {"block_size": 4, "num_kv_blocks": 15}
EMBEDDED_SCHEDULES = {
    "chunks of 1": {"max_prefill_tokens": 1},
    "chunks of 16": {"max_prefill_tokens": 16},
    "chunks of 64": {"max_prefill_tokens": 64},
    "whole prompts": {"chunked_prefill": False},
    "equal progress": {"max_prefill_tokens": 16, "prefill_order": "equal_progress"},
    "separate prefills": {"prefill_batching": "separate"},
    "static": {"batching_mode": "static"},
}
EMBEDDED_PREEMPTING = {
    "recompute": {},
    "recompute, prefix caching": {"prefix_caching": True},
    "swap": SWAP,
    "swap, prefix caching, chunks of 16": SWAP | {"prefix_caching": True, "max_prefill_tokens": 16},
}


@pytest.fixture(scope="module")
def embedded_dir():
    return resolve_model("embedded", None, "float32", print)


@pytest.fixture(scope="module")
def embedded_decoder(embedded_dir):
    return build_runner(EMBEDDED, embedded_dir).decoder


@pytest.fixture(scope="module")
def embedded_requests(embedded_dir):
    tokenizer = load_tokenizer(embedded_dir)
    return make_requests([tokenizer.encode(prompt) for prompt in PROMPTS], max_tokens=[24] * len(PROMPTS))


@pytest.fixture(scope="module")
def embedded_expected(embedded_decoder, embedded_requests):
    return [tokens_by_recomputing(embedded_decoder, request) for request in embedded_requests]


@pytest.mark.slow
def test_embedded_model_alone(embedded_decoder, embedded_requests, embedded_expected):
    engine = HandDrivenEngine(embedded_decoder, EMBEDDED)
    assert [answers(engine.run([request])) for request in embedded_requests] == [[t] for t in embedded_expected]


@pytest.mark.slow
@pytest.mark.parametrize("name", EMBEDDED_SCHEDULES)
def test_embedded_model_beside_others(embedded_decoder, embedded_requests, embedded_expected, name):
    engine = HandDrivenEngine(embedded_decoder, dataclasses.replace(EMBEDDED, **EMBEDDED_SCHEDULES[name]))
    assert answers(engine.run(embedded_requests)) == embedded_expected


@pytest.fixture(scope="module")
def long_requests(embedded_dir):
    """Two prompts of 71 and 70 tokens, longer than the largest chunk."""
    text = load_tokenizer(embedded_dir).encode("\n".join(PROMPTS))
    return make_requests([text, text[:-1]], max_tokens=[6, 6])


@pytest.fixture(scope="module")
def long_expected(embedded_decoder, long_requests):
    return [tokens_by_recomputing(embedded_decoder, request) for request in long_requests]


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 16, 64, None])
def test_embedded_model_long_prompts(embedded_decoder, long_requests, long_expected, chunk_size):
    engine = HandDrivenEngine(embedded_decoder, dataclasses.replace(EMBEDDED, max_prefill_tokens=chunk_size))
    run = engine.run(long_requests)
    assert answers(run) == long_expected
    num_prefill_tokens = chunk_size or sum(len(request.prompt_token_ids) for request in long_requests)
    # beside the decode of the first
    assert num_prefill_tokens <= run.max_num_tokens <= num_prefill_tokens + 1


@pytest.mark.slow
def test_embedded_model_cold_then_warm(embedded_decoder, embedded_requests, embedded_expected):
    engine = HandDrivenEngine(embedded_decoder, dataclasses.replace(EMBEDDED, prefix_caching=True))
    cold = engine.run(embedded_requests)
    warm = engine.run(renumbered(embedded_requests, 100))
    assert answers(cold) == answers(warm) == embedded_expected
    assert warm.num_prefix_hit_tokens > cold.num_prefix_hit_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", EMBEDDED_PREEMPTING)
def test_embedded_model_after_preemptions(embedded_decoder, embedded_requests, embedded_expected, name):
    engine = HandDrivenEngine(
        embedded_decoder, dataclasses.replace(EMBEDDED, **EMBEDDED_SMALL_POOL, **EMBEDDED_PREEMPTING[name])
    )
    first, second = engine.run(embedded_requests), engine.run(embedded_requests[::-1])
    assert answers(first) == answers(second)[::-1] == embedded_expected
    num_preemptions = [first.num_preemptions[id] + second.num_preemptions[id] for id in first.tokens]
    assert min(num_preemptions) > 1
    assert (first.num_swapped_in_blocks > 0) == ("swap" in name)
