"""Swapped-out blocks come back bit for bit; copies are made in their order, and before anything is computed."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.runtime import swap
from noria.runtime.build import build_runner
from noria.runtime.kv_cache import GIB, KVCache, bytes_per_block
from noria.runtime.swap import HostKVCache, apply_block_copies, apply_staged_copies
from noria.sampling_params import SamplingParams
from noria.scheduler_output import BlockCopy, SamplingInput, ScheduledSequence, SchedulerOutput
from support.tiny_models import tiny_model_dir

CPU = torch.device("cpu")
SHAPE = SimpleNamespace(num_layers=3, num_kv_heads=2, head_dim=5)
SWAP_CONFIG = EngineConfig(
    device="cpu", num_kv_blocks=8, block_size=4, num_threads=2, preemption="swap", num_host_blocks=6
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


def swap_out(source, target):
    return BlockCopy(source, target, is_swap_in=False)


def swap_in(source, target):
    return BlockCopy(source, target, is_swap_in=True)


def caches(dtype=torch.float32, num_blocks=6, num_host_blocks=3):
    """A cache of random numbers, a host pool for it, and what the cache holds."""
    cache = KVCache(SHAPE, num_blocks, block_size=4, dtype=dtype, device=CPU)
    cache.memory.copy_(torch.randn(cache.memory.shape, generator=torch.Generator().manual_seed(1)))
    return cache, HostKVCache(cache, num_host_blocks), cache.memory.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_blocks_come_back_as_they_went(dtype):
    cache, host, before = caches(dtype)
    apply_block_copies(cache, host, [swap_out(5, 0), swap_out(2, 1), swap_out(0, 2)])
    assert torch.equal(cache.memory, before)
    cache.memory.zero_()
    apply_block_copies(cache, host, [swap_in(0, 0), swap_in(2, 5), swap_in(1, 2)])
    for target, source in ((0, 5), (5, 0), (2, 2)):
        assert torch.equal(cache.memory[:, :, target], before[:, :, source])
    # no other block is touched, nor that which padding rows write into
    assert not cache.memory[:, :, [1, 3, 4, 6]].any()


def test_copies_are_made_in_their_order():
    cache, host, before = caches()
    copies = [swap_out(3, 0), swap_in(0, 5), swap_out(1, 0), swap_in(0, 3), swap_out(5, 1), swap_in(1, 1)]
    apply_block_copies(cache, host, copies)
    for target, source in ((5, 3), (3, 1), (1, 3), (0, 0), (2, 2)):
        assert torch.equal(cache.memory[:, :, target], before[:, :, source])
    assert torch.equal(host.memory[0], before[:, :, 1])
    assert torch.equal(host.memory[1], before[:, :, 3])


def test_the_later_of_two_copies_to_one_block_stays():
    cache, host, before = caches()
    apply_block_copies(cache, host, [swap_out(1, 0), swap_out(2, 1), swap_in(0, 4), swap_in(1, 4)])
    assert torch.equal(cache.memory[:, :, 4], before[:, :, 2])


def row(request_id, token_ids, start, block_table):
    sampling = SamplingInput(SamplingParams(temperature=1.0), seed=7, position=start + len(token_ids))
    return ScheduledSequence(request_id, token_ids, start, block_table, sampling)


def test_a_step_copies_before_it_computes(model_dir):
    def step(runner, *rows, copies=()):
        return runner.execute(SchedulerOutput(step=1, rows=rows, block_copies=copies))

    straight, swapping = build_runner(SWAP_CONFIG, model_dir), build_runner(SWAP_CONFIG, model_dir)
    prompt = [10, 20, 30, 40, 50, 60]
    for runner in (straight, swapping):
        step(runner, row(1, prompt, 0, [3, 1]))
    expected = step(straight, row(1, [70], 6, [3, 1]))
    # the blocks leave in the very step that writes other tokens into them, and return in one that computes on them
    step(swapping, row(2, [9, 8, 7, 6, 5, 4, 3, 2], 0, [1, 3]), copies=(swap_out(3, 5), swap_out(1, 0)))
    assert step(swapping, row(1, [70], 6, [0, 6]), copies=(swap_in(5, 0), swap_in(0, 6))) == expected


def test_a_step_without_rows_copies_too(model_dir):
    runner = build_runner(SWAP_CONFIG, model_dir)
    runner.cache.memory[:, :, 2] = 5.0
    assert runner.execute(SchedulerOutput(step=1, rows=(), block_copies=(swap_out(2, 4),))) == {}
    assert (runner.host_cache.memory[4] == 5.0).all()


@pytest.mark.parametrize(
    "changes", [{"preemption": "recompute"}, {"batching_mode": "static"}, {"batching_mode": "dynamic"}]
)
def test_no_host_pool_where_nothing_is_swapped(model_dir, changes):
    runner = build_runner(dataclasses.replace(SWAP_CONFIG, **changes), model_dir)
    assert runner.host_cache is None
    assert runner.num_host_blocks == 0


def test_the_pool_is_as_large_as_asked_or_as_fits(model_dir):
    assert build_runner(SWAP_CONFIG, model_dir).num_host_blocks == 6
    config = dataclasses.replace(SWAP_CONFIG, num_host_blocks=None, swap_space_gib=0.001)
    runner = build_runner(config, model_dir)
    size = bytes_per_block(runner.decoder.config, 4, torch.float32)
    assert runner.host_cache.memory.nbytes == runner.num_host_blocks * size
    assert 0.001 * GIB - size < runner.host_cache.memory.nbytes <= 0.001 * GIB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_host_blocks": 0}, "num_host_blocks must be at least 1"),
        ({"num_host_blocks": None, "swap_space_gib": 0.0}, r"swap_space_gib \(0.0\) must hold at least one block of 4"),
        # 2048 bytes a block
        ({"num_host_blocks": None, "swap_space_gib": 1e-6}, "2048 bytes"),
        ({"num_host_blocks": 2**31, "block_size": 256}, "lower swap_space_gib or num_host_blocks"),
    ],
)
def test_a_pool_of_nothing_or_beyond_the_machine_names_the_setting(model_dir, changes, message):
    with pytest.raises(ConfigError, match=message):
        build_runner(dataclasses.replace(SWAP_CONFIG, **changes), model_dir)


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_staged_copies_are_those_made_block_by_block(monkeypatch, at_once):
    """In any mixture, with blocks that come in twice, chains, and more copies than the staging holds."""
    draw = random.Random(3)
    cache, host, before = caches(num_blocks=5, num_host_blocks=4)
    copies = [
        swap_in(draw.randrange(4), draw.randrange(5)) if draw.random() < 0.5 else swap_out(draw.randrange(5), i % 4)
        for i in range(40)
    ]
    monkeypatch.setattr(swap, "_STAGING_BYTES", at_once * host.memory[0].nbytes)
    apply_block_copies(cache, host, copies)
    staged, staged_host, _ = caches(num_blocks=5, num_host_blocks=4)
    apply_staged_copies(staged, staged_host, copies)
    assert not torch.equal(cache.memory, before)
    assert torch.equal(staged.memory, cache.memory)
    assert torch.equal(staged_host.memory, host.memory)
