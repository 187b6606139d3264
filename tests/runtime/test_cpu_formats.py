"""What a runner on the compiled CPU kernels stores and in which format, which kernels it picks and why, its threads."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.kernels import cpu_library
from noria.models.cpu_decoder import CpuDecoder
from noria.models.decoder import Decoder
from noria.runtime.build import build_runner
from noria.runtime.input_batch import InputBatch
from noria.runtime.kv_cache import KVCache, bytes_per_block
from noria.runtime.model_runner import ModelRunner
from noria.scheduler_output import BlockCopy, ScheduledSequence, SchedulerOutput
from support.cpu_libraries import fastest_instruction_set
from support.tiny_models import tiny_model_dir
from support.waiting import wait_until

CONFIG = EngineConfig(device="cpu", num_kv_blocks=64, block_size=16, num_threads=2)
KV_DTYPES = ("float32", "bfloat16", "int8")
FORMATS = [(weights, kv_dtype) for weights in ("none", "int8", "int4") for kv_dtype in KV_DTYPES]
PROMPT = torch.randint(0, 304, (150,), generator=torch.Generator().manual_seed(3)).tolist()
TABLE = [60, 3, 41, 7, 19, 55, 2, 30, 11, 63]
CORES = os.sched_getaffinity(0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


def build(model_dir: Path, **changes: object) -> ModelRunner:
    return build_runner(dataclasses.replace(CONFIG, **changes), model_dir)


def step(runner: ModelRunner, tokens: list[int], start: int = 0, table: list[int] = TABLE) -> Tensor:
    """Logits [tokens, vocab_size]."""
    row = ScheduledSequence(0, tokens, start, table, sampling=None)
    batch = InputBatch.build([row], runner.cache.block_size, runner.cache.num_blocks)
    everything = dataclasses.replace(
        batch.decoder_input(runner.decoder.device), logit_indices=torch.arange(len(tokens))
    )
    return runner.decoder.forward(everything, runner.cache.layers).clone()


def first_layer(runner: ModelRunner, part: int) -> tuple[Tensor, Tensor | None]:
    """Keys (part 0) or values (1) of TABLE's blocks, [positions, heads, head_dim], and int8's scales without the last.

    kernels/cpu/attention.h says how they lie.
    """
    cache, config = runner.cache, runner.decoder.config
    heads, size, head_dim = config.num_kv_heads, cache.block_size, config.head_dim
    blocks = cache.memory[0, part, TABLE].flatten(1)
    scales = None
    if cache.memory.dtype == torch.int8:
        numbers, scale_bytes = blocks.split((heads * size * head_dim, heads * size * 4), dim=1)
        scales = scale_bytes.contiguous().view(torch.float32).view(-1, heads, size).transpose(1, 2).flatten(0, 1)
    else:
        numbers = blocks
    shape, order = ((heads, head_dim, size), (0, 3, 1, 2)) if part == 0 else ((heads, size, head_dim), (0, 2, 1, 3))
    numbers = numbers.reshape(-1, *shape).permute(order).flatten(0, 1)
    return numbers[: len(PROMPT)], None if scales is None else scales[: len(PROMPT)]


@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_the_cache_holds_keys_and_values_rounded_to_the_nearest(model_dir, part):
    """Those of the first layer, which are computed before any is read."""
    runners = [build(model_dir, kv_cache_dtype=kv_dtype) for kv_dtype in KV_DTYPES]
    for runner in runners:
        step(runner, PROMPT)
    (exact, _), (halves, _), (rounded, scales) = (first_layer(runner, part) for runner in runners)
    assert torch.equal(halves, exact.bfloat16())
    top = exact.abs().amax(-1)
    assert torch.equal(scales, top / 127)
    assert torch.equal(rounded, (exact * (127 / top)[..., None]).round().to(torch.int8))


@pytest.mark.parametrize(
    ("weights", "kv_dtype", "tolerance"),
    # root mean square of the differences, relative to the logits' standard deviation; this model's weights are wide, so
    # that differences grow from layer to layer
    [
        ("none", "bfloat16", 0.02),
        ("none", "int8", 0.05),
        ("int8", "float32", 0.1),
        ("int8", "bfloat16", 0.1),
        ("int8", "int8", 0.1),
        ("int4", "float32", 0.5),
        ("int4", "int8", 0.5),
    ],
)
def test_rounded_numbers_stay_near_float32(model_dir, weights, kv_dtype, tolerance):
    runners = build(model_dir), build(model_dir, weight_quantization=weights, kv_cache_dtype=kv_dtype)
    (expected, found) = (
        torch.cat([step(runner, PROMPT), *(step(runner, [9 + i], len(PROMPT) + i) for i in range(8))])
        for runner in runners
    )
    assert 0 < (found - expected).square().mean().sqrt() < tolerance * expected.std()


def test_int8_blocks_hold_a_scale_for_each_token_and_head():
    config = SimpleNamespace(num_layers=5, num_kv_heads=3, head_dim=64)
    assert bytes_per_block(config, 16, torch.int8) == 16 * 3 * (64 + 4) * 2 * 5
    assert bytes_per_block(config, 16, torch.bfloat16) == 16 * 3 * 64 * 2 * 2 * 5
    assert KVCache(config, 7, 16, torch.int8, torch.device("cpu")).memory.nbytes == 8 * 16 * 3 * (64 + 4) * 2 * 5


def test_a_pool_of_int8_has_as_many_blocks_as_fit(model_dir):
    num_blocks = {
        kv_dtype: build(model_dir, num_kv_blocks=None, kv_cache_gib=0.01, kv_cache_dtype=kv_dtype).cache.num_blocks
        for kv_dtype in KV_DTYPES
    }
    # two layers, two heads of 16: 8192, 4096 and 2560 bytes a block
    assert num_blocks == {"float32": 1309, "bfloat16": 2620, "int8": 4193}


@pytest.mark.parametrize(("weights", "kv_dtype"), FORMATS)
def test_swapped_blocks_come_back_bit_for_bit(model_dir, weights, kv_dtype):
    changes = {"weight_quantization": weights, "kv_cache_dtype": kv_dtype, "preemption": "swap", "num_host_blocks": 16}
    straight, swapping = build(model_dir, **changes), build(model_dir, **changes)

    def copy(*copies: BlockCopy) -> None:
        assert swapping.execute(SchedulerOutput(step=0, rows=(), block_copies=copies)) == {}

    for runner in (straight, swapping):
        step(runner, PROMPT)
    expected = step(straight, [5, 6], len(PROMPT))
    copy(*(BlockCopy(block, 15 - index, is_swap_in=False) for index, block in enumerate(TABLE)))
    # others' tokens take the blocks meanwhile
    step(swapping, PROMPT[::-1], table=TABLE[::-1])
    assert not torch.equal(step(swapping, [5, 6], len(PROMPT)), expected)
    table = [5, 4, 9, 8, 13, 12, 17, 16, 21, 20]
    copy(*(BlockCopy(15 - index, block, is_swap_in=True) for index, block in enumerate(table)))
    assert torch.equal(step(swapping, [5, 6], len(PROMPT), table), expected)


def test_which_kernels_run(model_dir, caplog):
    caplog.set_level("INFO")
    words = (
        f"kernels: the compiled CPU kernels for {fastest_instruction_set()}; weights {{}}, of the head {{}}; KV {{}}"
    )
    for changes, formats in (
        ({}, ("float32", "float32", "float32")),
        ({"kernels": "cpu"}, ("float32", "float32", "float32")),
        ({"weight_quantization": "int8", "kv_cache_dtype": "int8"}, ("int8", "int8", "int8")),
        ({"weight_quantization": "int4", "kv_cache_dtype": "bfloat16"}, ("int4", "int8", "bfloat16")),
    ):
        caplog.clear()
        assert isinstance(build(model_dir, **changes).decoder, CpuDecoder)
        assert [record.message for record in caplog.records] == [words.format(*formats)]
    caplog.clear()
    assert isinstance(build(model_dir, kernels="torch").decoder, Decoder)
    # nothing that the user did not ask for
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_torch_has_one_thread_beside_the_compiled_kernels(model_dir):
    """A second one would wait in a loop for work, on a core that the kernels need."""
    assert build(model_dir, num_threads=2).decoder.num_threads == 2
    assert torch.get_num_threads() == 1
    build(model_dir, num_threads=2, kernels="torch")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 12}, "block_size must be a multiple of 8, not 12"),
        ({"dtype": "bfloat16"}, "dtype must be float32, not bfloat16"),
    ],
)
def test_auto_falls_back_and_says_why(model_dir, caplog, changes, reason):
    runner = build(model_dir, **changes)
    assert isinstance(runner.decoder, Decoder)
    assert [reason in record.message for record in caplog.records if record.levelname == "WARNING"] == [True]
    step(runner, [5, 6, 7], table=[4])


def test_a_head_of_another_size_is_named(tmp_path, caplog):
    directory = tiny_model_dir(tmp_path, "llama", head_dim=12)
    assert isinstance(build(directory).decoder, Decoder)
    assert "head_dim must be a multiple of 8, not 12" in caplog.text
    with pytest.raises(ConfigError, match=r"kernels: cpu .* head_dim must be a multiple of 8, not 12"):
        build(directory, kernels="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": "cpu", "block_size": 12}, r"kernels: cpu .* block_size must be a multiple of 8, not 12"),
        ({"kernels": "cpu", "dtype": "float16"}, "kernels: cpu .* dtype must be float32, not float16"),
        ({"weight_quantization": "int8", "block_size": 12}, "weight_quantization: int8 .* block_size must be .* 8"),
        ({"weight_quantization": "int8", "dtype": "bfloat16"}, "weight_quantization: int8 .* dtype must be float32"),
        ({"weight_quantization": "int8", "kernels": "torch"}, "weight_quantization: int8 .* must be none, not int8"),
        ({"weight_quantization": "int4", "dtype": "bfloat16"}, "weight_quantization: int4 .* dtype must be float32"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype: float16 .* must be one of float32, bfloat16, int8"),
        ({"kv_cache_dtype": "int8", "kernels": "torch"}, "kv_cache_dtype: int8 .* must be float32, not int8"),
        ({"kv_cache_dtype": "int8", "block_size": 12}, "kv_cache_dtype: int8 .* block_size must be a multiple of 8"),
        ({"kv_cache_dtype": "float32", "dtype": "bfloat16"}, "kv_cache_dtype: float32 beside dtype: bfloat16 "),
    ],
)
def test_what_no_kernels_can_do_is_named(model_dir, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(model_dir, **changes)


def test_weights_that_int4_does_not_hold_are_named(tmp_path):
    directory = tiny_model_dir(tmp_path, "llama")
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = -7e4
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    build(directory, weight_quantization="int8")
    with pytest.raises(ConfigError, match=r"int4 holds weights of up to 65,504 to either side, .* has one of 70,000"):
        build(directory, weight_quantization="int4")


def test_a_cache_of_the_dtype_is_torch_s_too(model_dir):
    runner = build(model_dir, dtype="bfloat16", kv_cache_dtype="bfloat16", kernels="torch")
    assert runner.cache.memory.dtype == torch.bfloat16


def test_without_the_library_torch_runs_and_the_log_says_why(model_dir, monkeypatch, caplog):
    monkeypatch.setattr(cpu_library, "find_libraries", dict)
    assert isinstance(build(model_dir).decoder, Decoder)
    assert [r.levelname for r in caplog.records if "install a C++ compiler" in r.message] == ["WARNING"]
    for changes in ({"kernels": "cpu"}, {"weight_quantization": "int8"}, {"kv_cache_dtype": "int8"}):
        with pytest.raises(ConfigError, match=r"install a C\+\+ compiler"):
            build(model_dir, **changes)


def test_a_library_that_cannot_be_loaded_is_named(model_dir, monkeypatch, tmp_path):
    broken = tmp_path / "cpu_kernels.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(cpu_library, "find_libraries", lambda: {"AVX2": broken})
    with pytest.raises(ConfigError, match=r"kernels: cpu .* cpu_kernels\.so cannot be loaded"):
        build(model_dir, kernels="cpu")


@pytest.mark.parametrize(("supported", "chosen"), [("ab", "a"), ("b", "b")])
def test_the_fastest_library_that_the_processor_runs_is_taken(monkeypatch, supported, chosen):
    libraries = {
        name: SimpleNamespace(name=name, noria_cpu_is_supported=lambda name=name: name in supported) for name in "ab"
    }
    monkeypatch.setattr(cpu_library, "find_libraries", lambda: {"A": "a", "B": "b"})
    monkeypatch.setattr(cpu_library, "load_from", libraries.__getitem__)
    assert cpu_library.load_library().name == chosen


def test_a_library_that_cannot_be_loaded_does_not_hide_one_that_can(monkeypatch, tmp_path, caplog):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    good = cpu_library.find_libraries()["AVX2, FMA and F16C"]
    monkeypatch.setattr(cpu_library, "find_libraries", lambda: {"A": broken, "B": good})
    assert cpu_library.load_library().noria_instruction_set() == b"AVX2"
    assert [record.levelname for record in caplog.records if "broken.so cannot be loaded" in record.message] == [
        "WARNING"
    ]


def test_a_processor_that_runs_no_library_is_told_what_it_lacks(monkeypatch):
    monkeypatch.setattr(cpu_library, "find_libraries", lambda: {"A": "a", "B": "b"})
    monkeypatch.setattr(cpu_library, "load_from", lambda path: SimpleNamespace(noria_cpu_is_supported=lambda: 0))
    with pytest.raises(RuntimeError, match="this processor lacks A or B"):
        cpu_library.load_library()


def num_threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def cores_of_threads() -> Iterator[set[int]]:
    for task in os.listdir("/proc/self/task"):
        # some end meanwhile
        with contextlib.suppress(ProcessLookupError):
            yield os.sched_getaffinity(int(task))


def test_runners_take_turns_also_from_other_threads(model_dir):
    first, second = (build(model_dir, num_threads=n, weight_quantization="int8") for n in (2, 3))
    expected = step(first, PROMPT)
    assert torch.equal(step(second, PROMPT), expected)
    results = []
    for runner in (first, second, first, second):
        thread = threading.Thread(target=lambda runner=runner: results.append(step(runner, PROMPT)))
        thread.start()
        thread.join()
    # and both at once
    threads = [
        threading.Thread(target=lambda runner=runner: results.extend(step(runner, PROMPT) for _ in range(20)))
        for runner in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 44
    assert all(torch.equal(result, expected) for result in results)


def test_a_team_ends_with_its_decoder(model_dir):
    second, third = build(model_dir, num_threads=3), build(model_dir, num_threads=2)
    # torch starts and ends threads of its own, but not while it computes nothing
    for runner in (second, third):
        step(runner, PROMPT)
    del runner
    gc.collect()
    before = num_threads_of_this_process()
    del second
    # a thread that was joined may stay listed for a moment
    wait_until(lambda: num_threads_of_this_process() == before - 2)
    del third
    wait_until(lambda: num_threads_of_this_process() == before - 2 - 1)


@pytest.mark.skipif(len(CORES) < 2, reason="a team of one is not bound")
def test_the_caller_keeps_its_cores(model_dir):
    """A team as large as the machine binds its threads while it runs, the caller among them."""
    runner = build(model_dir, num_threads=len(CORES))
    step(runner, PROMPT)
    assert os.sched_getaffinity(0) == CORES
    cores_of_the_thread = []

    def in_a_thread_with_one_core() -> None:
        os.sched_setaffinity(0, {max(CORES)})
        step(runner, PROMPT)
        cores_of_the_thread.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=in_a_thread_with_one_core)
    thread.start()
    thread.join()
    assert cores_of_the_thread == [{max(CORES)}]
    bound = list(cores_of_threads())
    assert all({core} in bound for core in sorted(CORES)[1:])


COUNT_PAGE_FAULTS = """
import resource, sys
from pathlib import Path
from noria.config import EngineConfig
from noria.profiling.cases import case_step, decode_case
from noria.runtime.build import build_runner

config = EngineConfig(device="cpu", num_kv_blocks=64, num_threads=2, max_num_seqs=16)
runner = build_runner(config, Path(sys.argv[1]))
decode = case_step(decode_case(16, 20), runner, temperature=0.0)
for _ in range(5):
    runner.execute(decode)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    runner.execute(decode)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


def test_a_step_takes_no_new_memory_once_others_like_it_have_run(tmp_path):
    """A page that the system has to give and to clear costs a microsecond; the logits alone are 1,000 of them.

    In a process of its own, as a server has: whether memory that is given back stays depends on who else had some.
    """
    directory = tiny_model_dir(tmp_path, "llama", vocab_size=65536)
    command = [sys.executable, "-c", COUNT_PAGE_FAULTS, str(directory)]
    assert float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) < 50
