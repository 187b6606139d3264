import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from noria.config import EngineConfig
from noria.errors import ConfigError, DeviceLost
from noria.runtime.build import build_runner
from noria.runtime.kv_cache import GIB, bytes_per_block
from noria.runtime.model_runner import device_lost_is_told
from noria.sampling_params import SamplingParams
from noria.scheduler_output import RowFailure, SampledToken, SamplingInput, ScheduledSequence, SchedulerOutput
from support.tiny_models import tiny_model_dir

POISONED_TOKEN = 77
ENGINE_CONFIG = EngineConfig(device="cpu", num_kv_blocks=32, block_size=4, num_threads=2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def runner(model_dir):
    return build_runner(ENGINE_CONFIG, model_dir)


def row(request_id, token_ids, start=0, is_sampled=True, is_padding=False, params=None):
    params = params or SamplingParams(temperature=0)
    position = start + len(token_ids)
    return ScheduledSequence(
        request_id=request_id,
        token_ids=token_ids,
        num_computed_tokens=start,
        block_table=[4 * request_id + i for i in range(4)],
        sampling=SamplingInput(params, seed=request_id, position=position) if is_sampled else None,
        is_padding=is_padding,
    )


def execute(runner, *rows):
    return runner.execute(SchedulerOutput(step=1, rows=rows))


def test_a_token_for_each_sampled_row(runner):
    result = execute(runner, row(3, [5, 6, 7]), row(1, [8, 9], is_sampled=False), row(2, [9]))
    assert list(result) == [3, 2]
    assert all(isinstance(token, SampledToken) for token in result.values())


def test_nothing_to_sample(runner):
    assert execute(runner, row(1, [8, 9], is_sampled=False)) == {}
    assert execute(runner) == {}


def generate(runner, request_id, prompt, num_tokens, params=None, mates=()):
    """The tokens of one request, with `mates` (request ids) running beside it."""
    tokens = []
    computed, pending = 0, list(prompt)
    others = {mate: (0, [mate] * (2 + mate)) for mate in mates}
    for _ in range(num_tokens):
        rows = [row(mate, mate_tokens, start) for mate, (start, mate_tokens) in others.items()]
        result = execute(runner, *rows, row(request_id, pending, computed, params=params))
        others = {m: (start + len(ids), [result[m].token_id]) for m, (start, ids) in others.items()}
        computed += len(pending)
        pending = [result[request_id].token_id]
        tokens += pending
    return tokens


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(temperature=1.0)])
def test_tokens_are_the_same_alone_and_in_a_batch(runner, params):
    alone = generate(runner, 5, [10, 20, 30], 12, params)
    assert len(set(alone)) > 1
    assert generate(runner, 5, [10, 20, 30], 12, params, mates=(1, 2, 3)) == alone


def test_not_finite_logits_fail_their_row_alone(tmp_path):
    directory = tiny_model_dir(tmp_path, "llama", tied=False)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][POISONED_TOKEN] = torch.nan
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    runner = build_runner(ENGINE_CONFIG, directory)
    healthy = execute(runner, row(1, [5, 6]), row(3, [7]))
    result = execute(runner, row(1, [5, 6]), row(2, [8, POISONED_TOKEN, 9]), row(3, [7]))
    assert isinstance(result.pop(2), RowFailure)
    assert result == healthy
    # a padding row with it does no harm either, nor do its blocks when another sequence gets them
    result = execute(runner, row(1, [5, 6]), row(4, [POISONED_TOKEN], 0, False, is_padding=True), row(3, [7]))
    assert result == healthy
    assert execute(runner, row(2, [5])) == {2: execute(runner, row(6, [5]))[6]}


def test_warm_up_leaves_no_trace_in_the_answers(model_dir, runner):
    warm = build_runner(ENGINE_CONFIG, model_dir)
    warm.warm_up(8, 512)
    assert generate(warm, 0, [10, 20, 30], 6) == generate(runner, 0, [10, 20, 30], 6)


def test_warm_up_computes_the_largest_steps(model_dir):
    runner = build_runner(ENGINE_CONFIG, model_dir)
    shapes = []
    forward = runner.decoder.forward
    runner.decoder.forward = lambda batch, layers: (
        shapes.append((len(batch.token_ids), len(batch.rows))) or forward(batch, layers)
    )
    runner.warm_up(6, 100)
    runner.warm_up(6, 1000)
    # no more tokens than the pool's 32 blocks of 4 hold
    assert shapes == [(100, 1), (6, 6), (128, 1), (6, 6)]


def test_pool_size_from_memory(model_dir):
    config = dataclasses.replace(ENGINE_CONFIG, num_kv_blocks=None, kv_cache_gib=0.002)
    runner = build_runner(config, model_dir)
    size = bytes_per_block(runner.decoder.config, 4, torch.float32)
    total = sum(tensor.nbytes for layer in runner.cache.layers for tensor in layer)
    assert 0.002 * GIB - size < total <= 0.002 * GIB
    assert runner.cache.num_blocks == total // size - 1


def test_a_pool_beyond_the_machine_names_the_setting(model_dir):
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        build_runner(dataclasses.replace(ENGINE_CONFIG, num_kv_blocks=2**31, block_size=256), model_dir)


def test_a_pool_of_no_block_names_what_is_valid(tmp_path):
    directory = tiny_model_dir(tmp_path, "llama", num_hidden_layers=10)
    config = dataclasses.replace(ENGINE_CONFIG, num_kv_blocks=None, kv_cache_gib=0.001, block_size=256)
    with pytest.raises(ConfigError, match=r"kv_cache_gib must be at least 0\.0012 "):
        build_runner(config, directory)


def test_cuda_where_there_is_none(model_dir, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is cuda"):
        build_runner(dataclasses.replace(ENGINE_CONFIG, device="cuda"), model_dir)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(model_dir, dtype):
    runner = build_runner(dataclasses.replace(ENGINE_CONFIG, dtype=dtype), model_dir)
    assert runner.decoder.dtype == runner.cache.layers[0][0].dtype == getattr(torch, dtype)
    assert isinstance(execute(runner, row(1, [5, 6, 7]))[1], SampledToken)


def test_a_lost_gpu_is_told_from_a_step_that_failed(monkeypatch):
    def fail():
        with device_lost_is_told():
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(RuntimeError, match="out of memory"):
        fail()

    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(DeviceLost, match="must be started again: out of memory"):
        fail()
