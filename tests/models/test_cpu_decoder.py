"""The compiled CPU kernels against the torch ones, and that a row's logits depend on that row alone, bit for bit."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.kernels import cpu_library
from noria.kernels.ops import torch_kernels
from noria.models.cpu_decoder import CpuDecoder, CpuFormat
from noria.models.decoder import Decoder
from noria.models.model_config import load_model_config
from noria.models.safetensors_loader import load_weights
from noria.runtime.build import build_runner
from noria.runtime.input_batch import InputBatch
from noria.runtime.kv_cache import KVCache, bytes_per_block
from noria.sampling_params import SamplingParams
from noria.scheduler_output import SamplingInput, ScheduledSequence
from support.tiny_models import FAMILIES, tiny_model_dir

CPU = torch.device("cpu")
NUM_BLOCKS = 100
KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
PROMPTS = [torch.randint(0, 304, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (150, 37, 16, 1)]
FORMATS = [(is_quantized, kv_dtype) for is_quantized in (False, True) for kv_dtype in KV_DTYPES]


class Model:
    """A decoder and a cache whose unwritten slots would spoil whatever read them."""

    def __init__(self, directory: Path, cpu_format: CpuFormat | None, block_size: int = 16, num_threads: int = 2):
        self.config = load_model_config(directory)
        self.block_size = block_size
        weights = load_weights(directory, self.config, torch.float32, CPU)
        if cpu_format is None:
            self.decoder = Decoder(self.config, weights, torch_kernels())
        else:
            self.decoder = CpuDecoder(self.config, weights, cpu_format, num_threads)
        dtype = torch.float32 if cpu_format is None else KV_DTYPES[cpu_format.kv_dtype]
        self.cache = KVCache(self.config, NUM_BLOCKS, block_size, dtype, CPU)
        # NaN in every format: all bits set
        self.cache.memory.view(torch.int8).fill_(-1)

    def step(self, *rows: ScheduledSequence) -> torch.Tensor:
        batch = InputBatch.build(rows, self.block_size, NUM_BLOCKS, CPU)
        return self.decoder.forward(batch.decoder_input, self.cache.layers)


def row(index: int, tokens: list[int], start: int = 0, is_padding: bool = False) -> ScheduledSequence:
    """Block ids descend and are far apart."""
    return ScheduledSequence(
        request_id=index,
        token_ids=tokens,
        num_computed_tokens=start,
        block_table=[NUM_BLOCKS - 1 - index - 4 * block for block in range(24)],
        sampling=SamplingInput(SamplingParams(), seed=0, position=0),
        is_padding=is_padding,
    )


def all_prompts() -> list[ScheduledSequence]:
    return [row(index, prompt) for index, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {family: tiny_model_dir(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def directory(directories):
    return directories["llama"]


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_torch_kernels(directories, family, block_size):
    ours = Model(directories[family], CpuFormat(False, "float32", block_size), block_size)
    theirs = Model(directories[family], None, block_size)
    for model_rows in (
        all_prompts(),
        [row(0, [5], 150), row(1, PROMPTS[1][:9], 37), row(2, [7], 16), row(3, [8], 1)],
        [row(0, [9], 151), row(1, [3], 46, is_padding=True), row(2, [1], 17), row(3, [2], 2, is_padding=True)],
    ):
        torch.testing.assert_close(ours.step(*model_rows), theirs.step(*model_rows), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("is_quantized", "kv_dtype"), FORMATS)
def test_a_row_does_not_depend_on_its_mates_its_chunks_or_the_threads(directory, is_quantized, kv_dtype):
    cpu_format = CpuFormat(is_quantized, kv_dtype, 16)
    together = Model(directory, cpu_format)
    expected = together.step(*all_prompts())
    decoded = together.step(*(row(index, [5], len(prompt)) for index, prompt in enumerate(PROMPTS)))
    assert expected.isfinite().all()
    for num_threads in (1, 3):
        alone = Model(directory, cpu_format, num_threads=num_threads)
        for index, prompt in enumerate(PROMPTS):
            for start in range(0, len(prompt), 11):
                logits = alone.step(row(index, prompt[start : start + 11], start))
            assert torch.equal(logits[0], expected[index])
            assert torch.equal(alone.step(row(index, [5], len(prompt)))[0], decoded[index])


@pytest.mark.parametrize(
    ("is_quantized", "kv_dtype", "tolerance"),
    # of the logits' standard deviation
    [(False, "bfloat16", 0.02), (False, "int8", 0.05), (True, "float32", 0.1), (True, "int8", 0.1)],
)
def test_rounded_numbers_stay_near_float32(directory, is_quantized, kv_dtype, tolerance):
    expected = Model(directory, CpuFormat(False, "float32", 16)).step(*all_prompts())
    found = Model(directory, CpuFormat(is_quantized, kv_dtype, 16)).step(*all_prompts())
    assert (found - expected).square().mean().sqrt() < tolerance * expected.std()
    assert not torch.equal(found, expected)


@pytest.mark.parametrize(("is_quantized", "kv_dtype"), [(False, "float32"), (True, "int8")])
def test_numbers_that_are_not_finite_stay_in_their_row(directory, is_quantized, kv_dtype):
    model = Model(directory, CpuFormat(is_quantized, kv_dtype, 16))
    expected = model.step(*all_prompts())
    # keys and values of a block of the second row
    for layer in model.cache.layers:
        for numbers in layer:
            numbers[NUM_BLOCKS - 2].view(torch.int8).fill_(-1)
    decodes = [row(index, [5], len(prompt)) for index, prompt in enumerate(PROMPTS)]
    found = model.step(*decodes)
    assert found[[0, 2, 3]].isfinite().all()
    assert found[1].isnan().all()
    assert expected.isfinite().all()


def test_int8_blocks_hold_a_scale_for_each_token_and_head(directory):
    config = load_model_config(directory)
    numbers = 2 * config.num_layers * 16 * config.num_kv_heads
    assert bytes_per_block(config, 16, torch.int8) == numbers * (config.head_dim + 4)
    assert KVCache(config, 3, 16, torch.int8, CPU).memory.nbytes == 4 * bytes_per_block(config, 16, torch.int8)


def test_the_team_ends_with_its_decoder_and_leaves_the_caller_as_it_was(directory):
    affinity, before = os.sched_getaffinity(0), len(os.listdir("/proc/self/task"))
    first, second = (Model(directory, CpuFormat(True, "int8", 16), num_threads=3) for _ in range(2))
    assert len(os.listdir("/proc/self/task")) == before + 4
    results = []
    for model in (first, second, first, second):
        thread = threading.Thread(target=lambda model=model: results.append(model.step(*all_prompts())))
        thread.start()
        thread.join()
    assert all(torch.equal(result, results[0]) for result in results)
    first.step(row(0, [1]))
    assert os.sched_getaffinity(0) == affinity
    del model, first, second, thread
    assert len(os.listdir("/proc/self/task")) == before


def build(directory: Path, **settings: object) -> CpuDecoder | Decoder:
    config = EngineConfig(model=str(directory), num_kv_blocks=8, **settings)
    return build_runner(config, directory).decoder


def test_which_kernels_run(directory, caplog):
    assert isinstance(build(directory), CpuDecoder)
    assert isinstance(build(directory, kernels="torch"), Decoder)
    assert isinstance(build(directory, dtype="bfloat16"), Decoder)
    caplog.clear()
    assert isinstance(build(directory, block_size=12), Decoder)
    assert "block_size must be a multiple of 8, not 12" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernels": "cpu", "block_size": 12}, r"kernels: cpu .* block_size must be a multiple of 8, not 12"),
        ({"weight_quantization": "int8", "dtype": "bfloat16"}, "weight_quantization: int8 .* dtype must be float32"),
        ({"weight_quantization": "int8", "kernels": "torch"}, "weight_quantization: int8 .* kernels is torch"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype: float16 .* must be one of float32, bfloat16, int8"),
        ({"kv_cache_dtype": "int8", "kernels": "torch"}, "kv_cache_dtype: int8 .* kernels is torch"),
    ],
)
def test_what_the_kernels_cannot_do_is_named(directory, settings, message):
    with pytest.raises(ConfigError, match=message):
        build(directory, **settings)


def test_without_the_library_torch_runs_and_the_log_says_why(directory, monkeypatch, caplog):
    monkeypatch.setattr(cpu_library, "find_library", lambda: None)
    assert isinstance(build(directory), Decoder)
    assert "install a C++ compiler" in caplog.text
    with pytest.raises(ConfigError, match=r"kernels: cpu .* install a C\+\+ compiler"):
        build(directory, kernels="cpu")
