"""The whole engine on the Triton kernels, in the interpreter, against torch's operators: same tokens, by equality."""

import dataclasses
from itertools import pairwise

import pytest
import torch

from noria.config import EngineConfig
from noria.kernels.attention_tiles import SPLIT_KEYS
from noria.runtime.build import build_runner
from noria.runtime.cuda_graphs import DecodeGraphs, ladder
from noria.runtime.input_batch import InputBatch
from noria.runtime.triton_sampling import TritonSampler
from noria.sampling_params import SamplingParams
from noria.scheduler_output import RowFailure, SampledToken, SamplingInput, ScheduledSequence, SchedulerOutput
from noria.sequence import Request
from support.quick_interpreter import quick_interpreter  # noqa: F401
from support.schedule_runs import HandDrivenEngine
from support.tiny_models import tiny_model_dir
from support.triton_attention import ordered_dot  # noqa: F401

CONFIG = EngineConfig(
    device="cpu", num_threads=1, num_kv_blocks=24, block_size=16, max_num_seqs=4, dtype="float32", kernels="triton"
)
CPU = torch.device("cpu")


def torch_config(config):
    return dataclasses.replace(config, kernels="torch", deterministic=False)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama", head_dim=64)


@pytest.fixture(scope="module")
def runner(model_dir):
    return build_runner(CONFIG, model_dir)


@pytest.fixture(scope="module")
def torch_decoder(model_dir):
    return build_runner(torch_config(CONFIG), model_dir).decoder


def requests(*kinds):
    """(prompt tokens, output tokens, parameters), of which the first two begin alike."""
    return [
        Request(
            request_id=index,
            prompt_token_ids=tuple(range(5, 5 + length)) if index < 2 else tuple(range(90, 90 + length)),
            params=SamplingParams(max_tokens=max_tokens, **params),
            seed=70 + index,
        )
        for index, (length, max_tokens, params) in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 24, "prefix_caching": True},
        pytest.param({"num_kv_blocks": 6, "max_num_seqs": 3, "admission_headroom": 0.0}, marks=pytest.mark.slow),
        pytest.param(
            {
                "num_kv_blocks": 6,
                "max_num_seqs": 3,
                "admission_headroom": 0.0,
                "preemption": "swap",
                "num_host_blocks": 8,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param({"batching_mode": "static", "max_num_seqs": 3}, marks=pytest.mark.slow),
    ],
    ids=["chunks and prefixes", "recompute", "swap", "static"],
)
def test_the_tokens_are_those_of_torch(runner, torch_decoder, changes):
    config = dataclasses.replace(CONFIG, **changes)
    wanted = requests((31, 4, {"temperature": 0.0}), (18, 3, {"temperature": 1.0, "top_p": 0.9}), (30, 5, {}))
    # one after the other, so that a prefix is there when the next one comes
    steps_apart = 3 if "prefix_caching" in changes else 0
    reference = HandDrivenEngine(torch_decoder, torch_config(config)).run(wanted, steps_apart)
    run = HandDrivenEngine(runner.decoder, config).run(wanted, steps_apart)
    assert run.tokens == reference.tokens
    if "num_kv_blocks" in changes:
        assert sum(run.num_preemptions.values()) > 0
    if "num_host_blocks" in changes:
        assert run.num_swapped_in_blocks > 0
    if "prefix_caching" in changes:
        assert run.num_prefix_hit_tokens == 16
    if "batching_mode" in changes:
        assert run.num_padding_rows > 0


def row(request_id, token_ids, start, table, params=None, is_padding=False):
    params = params or SamplingParams(temperature=0.0)
    return ScheduledSequence(
        request_id,
        token_ids,
        start,
        table,
        None if is_padding else SamplingInput(params, seed=request_id, position=start + len(token_ids)),
        is_padding,
    )


def test_a_step_of_the_built_runner(runner):
    """Triton's sampler, log-probabilities and a row whose logits are not finite."""
    params = SamplingParams(temperature=0.0, logprobs=2)
    rows = (row(1, [5, 6, 7], 0, [2], params), row(2, [8], 0, [3]))
    result = runner.execute(SchedulerOutput(step=1, rows=rows))
    assert isinstance(result[1], SampledToken)
    assert result[1].top_logprobs[0][0] == result[1].token_id
    runner.cache.memory[:, 0, 4].fill_(torch.nan)
    poisoned = (row(1, [9], 3, [2]), row(3, [9], 16, [4, 5]))
    result = runner.execute(SchedulerOutput(step=2, rows=poisoned))
    assert isinstance(result[1], SampledToken)
    assert isinstance(result[3], RowFailure)


def logits_of(decoder, cache, *rows):
    batch = InputBatch.build(rows, cache.block_size, cache.num_blocks)
    return decoder.forward(batch.decoder_input(CPU), cache.layers)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_deterministic_logits_have_the_same_bits_in_whatever_steps(model_dir, ordered_dot, dtype):  # noqa: F811
    """Beside others, alone, in chunks, token by token as a decode computes them, and again from the cache."""
    runner = build_runner(dataclasses.replace(CONFIG, dtype=dtype, deterministic=True), model_dir)
    prompt, mate = list(range(20, 41)), list(range(100, 103))
    expected = logits_of(runner.decoder, runner.cache, row(1, prompt, 0, [3, 7]))
    together = logits_of(runner.decoder, runner.cache, row(2, mate, 0, [9]), row(1, prompt, 0, [4, 1]))
    assert torch.equal(together[1:], expected)
    for sizes in ((16, 5), (20, 1), (5, 16), (19, 1, 1)):
        start = 0
        for size in sizes:
            logits = logits_of(runner.decoder, runner.cache, row(1, prompt[start : start + size], start, [5, 6]))
            start += size
        assert torch.equal(logits, expected), sizes


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kv"), [("int8", "int8"), ("fp8", "fp8")])
def test_rounded_numbers_stay_near(model_dir, caplog, weights, kv):
    caplog.set_level("INFO")
    runners = [
        build_runner(dataclasses.replace(CONFIG, dtype="float16", weight_quantization=w, kv_cache_dtype=k), model_dir)
        for w, k in (("none", "auto"), (weights, kv))
    ]
    first, second = (logits_of(each.decoder, each.cache, row(1, [5, 6, 7, 8, 9], 0, [3])) for each in runners)
    difference = (first - second).norm() / first.norm()
    assert 0 < difference < 0.2
    # once each, and what rounding costs
    assert f"kernels: the Triton kernels; weights {weights}; KV {kv}" in caplog.messages
    assert [message for message in caplog.messages if message.startswith(f"kernels: weights {weights}: relative error")]


class Rerun:
    """A graph that computes again in place of replaying: what it reads and writes is the same memory."""

    def __init__(self, compute):
        self._compute = compute
        self.output = compute()

    def replay(self):
        self.output.copy_(self._compute())


@pytest.fixture(scope="module")
def graphs(runner):
    return DecodeGraphs(runner.decoder, runner.cache, (1, 3), Rerun)


def forward_both(runner, graphs, *rows):
    batch = InputBatch.build(rows, runner.cache.block_size, runner.cache.num_blocks)
    replayed = graphs.forward(batch)
    assert replayed is not None
    replayed = replayed.clone()
    return replayed, runner.decoder.forward(batch.decoder_input(CPU), runner.cache.layers)


def test_a_replay_has_the_logits_of_an_eager_step(runner, graphs):
    """The second is smaller than what is recorded, and than the one before, of which nothing may be left."""
    logits_of(runner.decoder, runner.cache, row(1, list(range(5, 25)), 0, [2, 8]), row(2, [6, 7], 0, [3]))
    runner.cache.memory[:, :, 11:].fill_(torch.nan)
    for rows in (
        [row(1, [30], 20, [2, 8]), row(2, [31], 2, [3]), row(3, [32], 0, [4])],
        [row(2, [33], 3, [3]), row(1, [34], 21, [2, 8])],
        [row(1, [35], 22, [2, 8])],
        [row(2, [36], 4, [3], is_padding=True), row(1, [37], 23, [2, 8])],
    ):
        replayed, eager = forward_both(runner, graphs, *rows)
        assert replayed.shape == eager.shape
        assert torch.equal(replayed, eager)
    # nothing was written where no row has a block
    assert runner.cache.memory[:, :, 11:-1].isnan().all()


def test_what_no_graph_holds_is_left_to_the_caller(runner, graphs):
    def forward(*rows):
        return graphs.forward(InputBatch.build(rows, runner.cache.block_size, runner.cache.num_blocks))

    assert forward(row(1, [5, 6], 0, [2])) is None
    assert forward(*(row(index, [5], 0, [index]) for index in range(4))) is None
    # rows that share blocks may come to more of them than the pool has
    shared = list(range(24)) * 2
    assert len(shared) > graphs.max_num_block_ids
    assert forward(row(1, [5], 40 * 16, shared)) is None
    graphs.max_num_block_ids = 1000
    length = (graphs.max_num_units + 1) * SPLIT_KEYS
    assert forward(row(1, [5], length - 1, [0] * (length // 16))) is None


def test_the_ladder_ends_at_the_slots_and_wastes_little():
    assert ladder(1) == (1,)
    assert ladder(5) == (1, 2, 3, 4, 5)
    assert ladder(64)[-1] == 64
    assert ladder(4096)[-1] == 256
    sizes = ladder(256)
    assert list(sizes) == sorted(set(sizes))
    assert all(bigger - smaller - 1 <= bigger / 3 for smaller, bigger in pairwise(sizes))


def test_the_sampler_is_triton_s(runner):
    assert isinstance(runner._sampler, TritonSampler)
