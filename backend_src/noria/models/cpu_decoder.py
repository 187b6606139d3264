"""CpuDecoder: the same forward pass as `Decoder`, as one call into the compiled CPU kernels.

A step costs Python the same whatever the number of layers. Weights are float32, or int8 with a scale for each output,
in panels (`kernels/cpu/linear.h`); the embedding stays float32. A row's logits depend on that row alone, bit for bit:
not on its batch mates, nor on how its prompt was cut into chunks.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from noria.kernels.cpu_library import (
    KV_FORMATS,
    PANEL,
    ROW_DTYPE,
    ROW_FIELDS,
    STAGES,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    StepStruct,
    load_library,
)
from noria.kernels.paged_attention import AttentionRow
from noria.models.decoder import DecoderInput
from noria.models.model_config import ModelConfig

# keys and values are read eight numbers at a time
VECTOR = 8
_BYTES_TO_ALIGN = 64


@dataclass(frozen=True, slots=True)
class CpuFormat:
    """is_quantized: int8 weights. kv_dtype: float32, bfloat16 or int8. block_size: of the KV cache."""

    is_quantized: bool
    kv_dtype: str
    block_size: int

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError, naming the field, for shapes that the kernels do not know."""
        for name, size in (("block_size", self.block_size), ("head_dim", config.head_dim)):
            if size % VECTOR:
                raise ValueError(f"{name} must be a multiple of {VECTOR}, not {size}")


class CpuDecoder:
    """stage_seconds: what the parts of the steps since the last `reset_stages` took; kept once that was called."""

    dtype = torch.float32
    device = torch.device("cpu")

    @torch.inference_mode()
    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], cpu_format: CpuFormat, num_threads: int
    ) -> None:
        """weights: complete and of the right shapes (the loader checked), float32 on the CPU. Emptied, one by one.

        Raises RuntimeError where the library cannot run, ValueError as `CpuFormat.check`.
        """
        cpu_format.check(config)
        self.config = config
        self._library = load_library()
        self._packer = _Packer(self._library, weights, cpu_format.is_quantized)
        self._inv_freq = torch.tensor(config.inv_freq(), dtype=torch.float32)
        embedding = self._packer.take("model.embed_tokens.weight")
        self._layers = (LayerStruct * config.num_layers)(
            *(_pack_layer(self._packer, config, index) for index in range(config.num_layers))
        )
        self._model = ModelStruct(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            kv_format=KV_FORMATS[cpu_format.kv_dtype],
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=cpu_format.block_size,
            num_heads=config.num_heads,
            sliding_window=config.sliding_window or 0,
            rms_norm_eps=config.rms_norm_eps,
            layers=self._layers,
            embedding=self._packer.keep(embedding),
            final_norm=self._packer.keep(self._packer.take("model.norm.weight")),
            head=self._packer.pack(embedding)
            if config.tie_word_embeddings
            else self._packer.linear(["lm_head"], has_bias=False),
        )
        weights.clear()
        self._context = self._library.noria_context_create(num_threads)
        if not self._context:
            raise RuntimeError(f"the system gave fewer than num_threads ({num_threads}) threads")
        weakref.finalize(self, self._library.noria_context_destroy, self._context)
        self.stage_seconds: ctypes.Array[ctypes.c_double] | None = None

    @property
    def weight_bytes(self) -> int:
        """Of all that is read in a step: packed weights, embedding, norms, scales."""
        return sum(tensor.nbytes for tensor in self._packer.kept)

    def reset_stages(self) -> None:
        self.stage_seconds = (ctypes.c_double * len(STAGES))()

    def forward(self, batch: DecoderInput, kv_layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits [len(logit_indices), vocab_size] in float32; writes the tokens' keys and values into the cache.

        kv_layers: views of one contiguous memory, of every layer the keys' blocks and behind them the values'.
        Raises RuntimeError where there is no memory for so many tokens.
        """
        keys = kv_layers[0][0]
        logits = torch.empty(len(batch.logit_indices), self.config.vocab_size)
        angles = batch.positions.to(torch.float32)[:, None] * self._inv_freq
        cos, sin = angles.cos(), angles.sin()
        rows, block_tables = _rows(batch.rows)
        step = StepStruct(
            num_tokens=len(batch.token_ids),
            num_rows=len(rows),
            num_logits=len(logits),
            token_ids=batch.token_ids.data_ptr(),
            slot_mapping=batch.slot_mapping.data_ptr(),
            logit_indices=batch.logit_indices.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            rows=rows.ctypes.data,
            cache=keys.data_ptr(),
            num_blocks=len(keys),
            logits=logits.data_ptr(),
            stage_seconds=self.stage_seconds,
        )
        if self._library.noria_forward(self._context, self._model, step):
            raise RuntimeError(f"there is no memory for the activations of {len(batch.token_ids)} tokens")
        # named, so that it lives until the call is over
        del block_tables
        return logits


def _rows(rows: Sequence[AttentionRow]) -> tuple[np.ndarray, np.ndarray]:
    """The rows as ROW_DTYPE, and the block tables that they point into."""
    table = np.array([block for row in rows for block in row.block_table], dtype=np.int32)
    lengths = np.array([len(row.block_table) for row in rows], dtype=np.uint64)
    result = np.empty(len(rows), dtype=ROW_DTYPE)
    for name in ROW_FIELDS:
        result[name] = [getattr(row, name) for row in rows]
    result["block_table"] = table.ctypes.data + (np.cumsum(lengths) - lengths) * table.itemsize
    return result, table


def _pack_layer(packer: _Packer, config: ModelConfig, index: int) -> LayerStruct:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qk_norm = None
    if config.has_qk_norm:
        q, k = (packer.take(f"{attention}.{part}_norm.weight") for part in "qk")
        qk_norm = packer.keep(torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1))))
    return LayerStruct(
        attention_norm=packer.keep(packer.take(f"{prefix}.input_layernorm.weight")),
        mlp_norm=packer.keep(packer.take(f"{prefix}.post_attention_layernorm.weight")),
        qk_norm=qk_norm,
        qkv=packer.linear([f"{attention}.{part}_proj" for part in "qkv"], config.attention_bias),
        attention_output=packer.linear([f"{attention}.o_proj"], config.attention_output_bias),
        gate_up=packer.linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], config.mlp_bias),
        down=packer.linear([f"{mlp}.down_proj"], config.mlp_bias),
    )


class _Packer:
    """Turns weights into what the kernels read, and keeps that alive. kept: all of it."""

    def __init__(self, library: ctypes.CDLL, weights: dict[str, Tensor], is_quantized: bool) -> None:
        self._library = library
        self._weights = weights
        self._is_quantized = is_quantized
        self.kept: list[Tensor] = []

    def take(self, name: str) -> Tensor:
        return self._weights.pop(name)

    def keep(self, tensor: Tensor) -> int:
        """The address of a copy: what the loader gave may be a view of a file."""
        copy = _aligned(tensor.numel(), torch.float32)
        copy.copy_(tensor.flatten())
        self.kept.append(copy)
        return copy.data_ptr()

    def linear(self, names: Sequence[str], has_bias: bool) -> LinearStruct:
        """One layer that computes the outputs of all named ones, one after the other."""
        weight = torch.cat([self.take(f"{name}.weight") for name in names])
        bias = torch.cat([self.take(f"{name}.bias") for name in names]) if has_bias else None
        return self.pack(weight, bias)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> LinearStruct:
        num_outputs, num_inputs = weight.shape
        weight = weight.contiguous()
        num_padded = -(-num_outputs // PANEL) * PANEL
        scale = None
        if self._is_quantized:
            packed = _aligned(num_padded * (num_inputs + num_inputs % 2), torch.int8)
            scale = torch.empty(num_outputs)
            self.kept.append(scale)
            self._library.noria_pack_int8(
                weight.data_ptr(), num_outputs, num_inputs, packed.data_ptr(), scale.data_ptr()
            )
        else:
            packed = _aligned(num_padded * num_inputs, torch.float32)
            self._library.noria_pack_float32(weight.data_ptr(), num_outputs, num_inputs, packed.data_ptr())
        self.kept.append(packed)
        return LinearStruct(
            weight=packed.data_ptr(),
            scale=None if scale is None else scale.data_ptr(),
            bias=None if bias is None else self.keep(bias),
            num_inputs=num_inputs,
            num_outputs=num_outputs,
        )


def _aligned(count: int, dtype: torch.dtype) -> Tensor:
    """[count], at a multiple of what the widest load wants."""
    extra = _BYTES_TO_ALIGN // dtype.itemsize
    memory = torch.empty(count + extra, dtype=dtype)
    offset = -memory.data_ptr() % _BYTES_TO_ALIGN // dtype.itemsize
    return memory[offset : offset + count]
