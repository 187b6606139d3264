"""Launches of every Triton kernel at every tile that is configured, on tensors of the device "meta".

For `compile_report`. The shapes are those of three models, and of head sizes and groups that these lack. A case may
compile what another did. Nothing that serves imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noria.kernels.block_copies import copy_blocks_triton, gather_blocks_triton, scatter_blocks_triton
from noria.kernels.kv_format import SCALE_BYTES, is_quantised
from noria.kernels.language import CAPABILITIES, FP8_CAPABILITY
from noria.kernels.matmul import matmul_triton
from noria.kernels.paged_attention import AttentionRow, AttentionShape
from noria.kernels.penalties import penalise_triton
from noria.kernels.quantised_matmul import quantised_matmul_triton
from noria.kernels.rms_norm import add_rms_norm_triton, rms_norm_triton
from noria.kernels.rope_kv_write import rope_kv_write_triton, rotation_triton
from noria.kernels.sampling import SamplingRows, sample_triton
from noria.kernels.swiglu import swiglu_triton
from noria.kernels.token_logprobs import token_logprobs_triton
from noria.kernels.triton_attention import plan_attention_triton

NUM_TOKENS = 64
NUM_BLOCKS = 1000
KV_BLOCK_SIZE = 16
# of kernels other than attention, whose tiles are the same for all
_QUICK_LOOK = (90,)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QUANTISED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Case:
    """launch: calls launchers. essential_for: the capabilities for which a quick look takes it in."""

    name: str
    launch: Callable[[], None]
    min_capability: int = CAPABILITIES[0]
    essential_for: tuple[int, ...] = ()


class Model(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    mlp_size: int
    vocab_size: int


MODELS = {
    "SmolLM2-135M": Model(9, 3, 64, 576, 1536, 49152),
    "Llama-3.2-1B": Model(32, 8, 64, 2048, 8192, 128256),
    "Llama-3.1-8B": Model(32, 8, 128, 4096, 14336, 128256),
}


def all_cases() -> dict[str, Case]:
    """By name, the essential ones first."""
    cases = [
        *_model_attention_cases(),
        *_pointwise_cases(),
        *_sampling_cases(),
        *_matmul_cases(),
        *_attention_cases(),
        *_attention_variants(),
    ]
    cases.sort(key=lambda case: not case.essential_for)
    by_name = {case.name: case for case in cases}
    assert len(by_name) == len(cases), "two cases have one name"
    return by_name


def _model_attention_cases() -> Iterator[Case]:
    for name, model in MODELS.items():
        shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim)
        yield _attention_case(f"attention {name} bf16", shape, torch.bfloat16, essential_for=CAPABILITIES)
    yield _attention_case(f"attention {name} fp32", shape, torch.float32, essential_for=CAPABILITIES)


def _attention_cases() -> Iterator[Case]:
    shapes = (AttentionShape(9, 3, 64), AttentionShape(32, 8, 128), AttentionShape(16, 8, 256))
    for shape, (name, dtype), is_deterministic in product(shapes, DTYPES.items(), (False, True)):
        # a deterministic float16 kernel has the code of bfloat16's but for the type
        quantised = {} if dtype == torch.float32 or (dtype == torch.float16 and is_deterministic) else QUANTISED_DTYPES
        for kv_name, kv_dtype in {"": dtype, **quantised}.items():
            words = f"attention dim {shape.head_dim}", name, kv_name, "deterministic" if is_deterministic else ""
            yield _attention_case(
                " ".join(filter(None, words)), shape, dtype, kv_dtype, is_deterministic=is_deterministic
            )


def _attention_variants() -> Iterator[Case]:
    """What changes the code of a kernel beside dtypes and padded head sizes."""
    bf16, int8 = torch.bfloat16, torch.int8
    variants: dict[str, tuple[AttentionShape, dict[str, Any]]] = {
        "dim 80": (AttentionShape(32, 32, 80), {}),
        "dim 80 int8": (AttentionShape(32, 32, 80), {"kv_dtype": int8}),
        "dim 80 deterministic": (AttentionShape(32, 32, 80), {"is_deterministic": True}),
        "dim 96": (AttentionShape(24, 8, 96), {}),
        "group 3": (AttentionShape(24, 8, 128), {}),
        "group 8": (AttentionShape(64, 8, 128), {}),
        "group 16": (AttentionShape(16, 1, 128), {}),
        "window": (AttentionShape(32, 8, 128, 4096), {}),
        "window int8": (AttentionShape(32, 8, 128, 4096), {"kv_dtype": int8}),
        "dim 256 window, soft cap": (AttentionShape(16, 8, 256, 4096, 50.0), {}),
        "dim 256 window, soft cap int8": (AttentionShape(16, 8, 256, 4096, 50.0), {"kv_dtype": int8}),
        "dim 256 window, soft cap deterministic": (AttentionShape(16, 8, 256, 4096, 50.0), {"is_deterministic": True}),
        "page 128": (AttentionShape(32, 8, 128), {"block_size": 128}),
        "1000 rows": (AttentionShape(32, 8, 128), {"num_rows": 1000}),
    }
    for name, (shape, options) in variants.items():
        yield _attention_case(f"attention {name} bf16", shape, bf16, **options)


def _attention_case(
    name: str,
    shape: AttentionShape,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    *,
    is_deterministic: bool = False,
    block_size: int = KV_BLOCK_SIZE,
    num_rows: int = NUM_TOKENS,
    essential_for: tuple[int, ...] = (),
) -> Case:
    """num_rows decodes and two chunks."""
    kv_dtype = kv_dtype or dtype

    def launch() -> None:
        blocks = range(-(-2 * NUM_TOKENS // block_size))
        rows = [AttentionRow(i, 1, NUM_TOKENS, NUM_TOKENS + 1, blocks) for i in range(num_rows)]
        rows += [AttentionRow(num_rows + i * NUM_TOKENS, NUM_TOKENS, 0, NUM_TOKENS, blocks) for i in range(2)]
        cache = _cache(shape.num_kv_heads, shape.head_dim, kv_dtype, block_size)
        q = _meta(num_rows + 2 * NUM_TOKENS, shape.num_heads, shape.head_dim, dtype=dtype)
        plan_attention_triton(rows, cache, shape, dtype, is_deterministic).attend(q, cache, cache)

    return Case(name, launch, _min_capability(kv_dtype), essential_for)


def _pointwise_cases() -> Iterator[Case]:
    for (model_name, model), (dtype_name, dtype) in _models_and_dtypes():
        essential_for = _QUICK_LOOK if model_name == "Llama-3.2-1B" and dtype == torch.bfloat16 else ()

        def norm(model: Model = model, dtype: torch.dtype = dtype) -> None:
            x, weight = _meta(NUM_TOKENS, model.hidden_size, dtype=dtype), _meta(model.hidden_size, dtype=dtype)
            rms_norm_triton(x, weight, 1e-5)
            add_rms_norm_triton(x, torch.empty_like(x), weight, 1e-5)
            heads = _meta(NUM_TOKENS, model.num_heads + 2 * model.num_kv_heads, model.head_dim, dtype=dtype)
            rms_norm_triton(heads[:, : model.num_heads], _meta(model.head_dim, dtype=dtype), 1e-5)
            swiglu_triton(_meta(NUM_TOKENS, 2 * model.mlp_size, dtype=dtype))

        yield Case(f"rms_norm, swiglu {model_name} {dtype_name}", norm, essential_for=essential_for)
        for kv_name, kv_dtype in {"": dtype, **QUANTISED_DTYPES}.items():

            def rope(model: Model = model, dtype: torch.dtype = dtype, kv_dtype: torch.dtype = kv_dtype) -> None:
                num_heads, num_kv_heads, head_dim = model[:3]
                qkv = _meta(NUM_TOKENS, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
                qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
                positions = _meta(NUM_TOKENS, dtype=torch.int64)
                turn = rotation_triton(positions, _meta(head_dim // 2, dtype=torch.float32), dtype)
                cache = _cache(num_kv_heads, head_dim, kv_dtype)
                rope_kv_write_triton(qk, v, turn, cache, torch.empty_like(cache), torch.empty_like(positions))

            name = " ".join(filter(None, (f"rope_kv_write {model_name}", dtype_name, kv_name)))
            yield Case(name, rope, essential_for=() if kv_dtype == torch.float8_e4m3fn else essential_for)
        yield _copies_case(model_name, model, dtype_name, dtype, essential_for)


def _copies_case(
    model_name: str, model: Model, dtype_name: str, dtype: torch.dtype, essential_for: tuple[int, ...]
) -> Case:
    def launch() -> None:
        memory = _meta(4, 2, NUM_BLOCKS, KV_BLOCK_SIZE, model.num_kv_heads, model.head_dim, dtype=dtype)
        blocks = _meta(8, dtype=torch.int64)
        copy_blocks_triton(memory, blocks, torch.empty_like(blocks))
        scatter_blocks_triton(memory, gather_blocks_triton(memory, blocks), blocks)

    return Case(f"block_copies {model_name} {dtype_name}", launch, essential_for=essential_for)


def _sampling_cases() -> Iterator[Case]:
    for name, model in MODELS.items():

        def launch(vocab_size: int = model.vocab_size) -> None:
            logits = _meta(NUM_TOKENS, vocab_size, dtype=torch.float32)
            int64, int32 = (_meta(NUM_TOKENS, dtype=dtype) for dtype in (torch.int64, torch.int32))
            float32, float64 = (_meta(NUM_TOKENS, dtype=dtype) for dtype in (torch.float32, torch.float64))
            penalise_triton(logits, int64, float32, torch.empty_like(float32))
            rows = SamplingRows(int64, int64, float32, int32, float64, int64, needs_sums=True)
            token_logprobs_triton(logits, sample_triton(logits, rows), int32, torch.empty_like(int32))

        yield Case(f"sampling {name}", launch, essential_for=_QUICK_LOOK if name == "Llama-3.2-1B" else ())


def _matmul_cases() -> Iterator[Case]:
    for (model_name, model), (dtype_name, dtype) in _models_and_dtypes():
        essential_for = _QUICK_LOOK if model_name == "Llama-3.2-1B" and dtype == torch.bfloat16 else ()

        def plain(model: Model = model, dtype: torch.dtype = dtype) -> None:
            for out_features, in_features in _linears(model):
                weight, bias = _meta(out_features, in_features, dtype=dtype), _meta(out_features, dtype=dtype)
                x = _meta(NUM_TOKENS, in_features, dtype=dtype)
                matmul_triton(x, weight)
                matmul_triton(x, weight, bias)

        yield Case(f"matmul {model_name} {dtype_name}", plain, essential_for=essential_for)
        for weight_name, weight_dtype in QUANTISED_DTYPES.items():

            def quantised(
                model: Model = model, dtype: torch.dtype = dtype, weight_dtype: torch.dtype = weight_dtype
            ) -> None:
                for (out_features, in_features), num_rows in product(_linears(model), (1, 8, 16, 64, 256)):
                    numbers = _meta(out_features, in_features, dtype=weight_dtype)
                    scales = _meta(out_features, dtype=torch.float32)
                    x = _meta(num_rows, in_features, dtype=dtype)
                    for is_invariant in (False, True):
                        quantised_matmul_triton(x, numbers, scales, is_invariant=is_invariant)

            yield Case(
                f"quantised_matmul {model_name} {dtype_name} {weight_name}",
                quantised,
                _min_capability(weight_dtype),
                essential_for if weight_dtype == torch.int8 else (),
            )


def _models_and_dtypes() -> list[tuple[tuple[str, Model], tuple[str, torch.dtype]]]:
    """Each of both, with the other's most common."""
    return [
        (model, dtype)
        for model, dtype in product(MODELS.items(), DTYPES.items())
        if model[0] == "Llama-3.2-1B" or dtype[0] == "bf16"
    ]


def _linears(model: Model) -> list[tuple[int, int]]:
    """out_features, in_features of a model's layers."""
    num_heads, num_kv_heads, head_dim, hidden_size, mlp_size, vocab_size = model
    return [
        ((num_heads + 2 * num_kv_heads) * head_dim, hidden_size),
        (hidden_size, num_heads * head_dim),
        (2 * mlp_size, hidden_size),
        (hidden_size, mlp_size),
        (vocab_size, hidden_size),
    ]


def _min_capability(dtype: torch.dtype) -> int:
    return FP8_CAPABILITY if dtype == torch.float8_e4m3fn else CAPABILITIES[0]


def _cache(num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = KV_BLOCK_SIZE) -> Tensor:
    if is_quantised(dtype):
        return _meta(NUM_BLOCKS, block_size * num_kv_heads * (head_dim + SCALE_BYTES), dtype=dtype)
    return _meta(NUM_BLOCKS, block_size, num_kv_heads, head_dim, dtype=dtype)


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
