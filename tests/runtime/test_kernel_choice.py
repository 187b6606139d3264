"""Which kernels are taken, and what is said where none can do what is asked. GPUs are made believe."""

import pytest
import torch

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.models.model_config import load_model_config
from noria.runtime import kernel_choice
from noria.runtime.kernel_choice import choose_kernels
from support.tiny_models import tiny_model_dir

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def model(tmp_path, **overrides):
    return load_model_config(tiny_model_dir(tmp_path, "llama", **({"head_dim": 64} | overrides)))


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_a_gpu_takes_triton(tmp_path, hopper):
    config = model(tmp_path)
    for changes in ({}, {"dtype": "bfloat16"}, {"dtype": "float16", "kv_cache_dtype": "fp8"}, {"deterministic": True}):
        assert choose_kernels(EngineConfig(**changes), config, GPU) == "triton"
    assert choose_kernels(EngineConfig(kernels="torch"), config, GPU) == "torch"


@pytest.mark.parametrize(
    ("changes", "overrides", "reason"),
    [
        ({}, {"head_dim": 16}, "head_dim must be one of 64, 80, 96, 128, 256, not 16"),
        ({"block_size": 8}, {}, "block_size must be one of 16, 32, 64, 128, 256, not 8"),
        (
            {},
            {"num_attention_heads": 32, "num_key_value_heads": 1},
            "num_heads / num_kv_heads must be from 1 to 16, not 32",
        ),
    ],
)
def test_what_the_triton_kernels_do_not_know_is_left_to_torch_and_named(
    tmp_path, hopper, caplog, changes, overrides, reason
):
    config = model(tmp_path, **overrides)
    assert choose_kernels(EngineConfig(**changes), config, GPU) == "torch"
    (message,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert reason in message
    assert "slower than the triton kernels" in message
    with pytest.raises(ConfigError, match=r"no kernels can do kernels: triton here\. the triton kernels: .*not"):
        choose_kernels(EngineConfig(kernels="triton", **changes), config, GPU)


@pytest.mark.parametrize(
    ("capability", "changes", "reason"),
    [
        ((7, 5), {"kernels": "triton"}, "compute capability must be one of 8.0, 9.0, 10.0, not 7.5"),
        ((8, 9), {"deterministic": True}, "compute capability must be one of 8.0, 9.0, 10.0, not 8.9"),
        ((8, 0), {"weight_quantization": "fp8"}, "fp8 needs compute capability 9.0 or later, and the GPU has 8.0"),
        ((8, 0), {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}, "fp8 needs compute capability 9.0 or later"),
        ((9, 0), {"weight_quantization": "int4"}, "weight_quantization must be one of none, int8, fp8, not int4"),
        ((9, 0), {"kv_cache_dtype": "bfloat16", "dtype": "float16"}, "must be one of float16, int8, fp8, not bfloat16"),
        ((9, 0), {"kv_cache_dtype": "int8"}, "kv_cache_dtype int8 needs dtype bfloat16 or float16, not float32"),
    ],
)
def test_what_no_kernels_can_do_on_a_gpu_is_named(tmp_path, monkeypatch, capability, changes, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = model(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        choose_kernels(EngineConfig(**changes), config, GPU)


def test_triton_on_a_cpu(tmp_path, monkeypatch):
    config = model(tmp_path)
    assert choose_kernels(EngineConfig(kernels="triton"), config, CPU) == "triton", (
        "the interpreter runs in these tests"
    )
    # too slow for anybody who did not ask for it
    assert choose_kernels(EngineConfig(dtype="bfloat16"), config, CPU) == "torch"
    monkeypatch.setattr(kernel_choice, "IS_INTERPRETED", False)
    with pytest.raises(ConfigError, match=r"has no CUDA for torch .*, and they run on an NVIDIA GPU"):
        choose_kernels(EngineConfig(kernels="triton"), config, CPU)


def test_without_the_package_triton(tmp_path, monkeypatch, hopper):
    config = model(tmp_path)
    monkeypatch.setattr(kernel_choice.importlib.util, "find_spec", lambda name: None)
    assert choose_kernels(EngineConfig(), config, GPU) == "torch"
    with pytest.raises(ConfigError, match="the package triton is not installed"):
        choose_kernels(EngineConfig(deterministic=True), config, GPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deterministic": True, "kernels": "torch"}, "deterministic: true here. .* deterministic must be false"),
        ({"weight_quantization": "fp8", "kernels": "cpu"}, "must be one of none, int8, int4, not fp8"),
        ({"kernels": "triton", "weight_quantization": "int4"}, "must be one of none, int8, fp8, not int4"),
        ({"kernels": "cuda"}, "kernels must be one of auto, cpu, triton, torch, not 'cuda'"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_before_a_model_is_looked_for(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes)
