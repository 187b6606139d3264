"""CpuDecoder: the same forward pass as `Decoder`, as one call into the compiled CPU kernels.

A step costs Python the same whatever the number of layers. Weights are float32, int8 or int4, in panels
(`kernels/cpu/linear.h`); the embedding stays float32, and beside int4 the head is int8. A row's logits depend on that
row alone, bit for bit: not on its batch mates, nor on how its prompt was cut into chunks.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from noria.kernels.cpu_library import (
    KV_FORMATS,
    LAYER_FIELDS,
    ROW_DTYPE,
    ROW_FIELDS,
    STAGES,
    LayerStruct,
    ModelStruct,
    StepStruct,
    load_library,
)
from noria.kernels.cpu_weights import CpuWeights
from noria.kernels.paged_attention import AttentionRow
from noria.models.decoder import DecoderInput
from noria.models.model_config import ModelConfig
from noria.models.weight_packer import WeightPacker
from noria.models.weights import EMBEDDING, FINAL_NORM

_numbers = attrgetter(*ROW_FIELDS)
# keys and values are read eight numbers at a time
VECTOR = 8
# positions; a power of 2, so that there is nothing beyond whole vectors
_FEWEST_TURNS = 1024


@dataclass(frozen=True, slots=True)
class CpuFormat:
    """weights: float32, int8 or int4. kv_dtype: float32, bfloat16 or int8. block_size: of the KV cache."""

    weights: str
    kv_dtype: str
    block_size: int

    @property
    def head(self) -> str:
        """Of the last linear layer, whose outputs are compared with each other: four bits would cost most there."""
        return "int8" if self.weights == "int4" else self.weights

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

        Raises RuntimeError where the library cannot run, ValueError as `CpuFormat.check` and `CpuWeights.pack`.
        """
        cpu_format.check(config)
        self.config = config
        self.format = cpu_format
        self.num_threads = num_threads
        self._library = load_library()
        self._weights = CpuWeights(self._library)
        pack = partial(self._weights.pack, cpu_format.weights)
        packer = WeightPacker(config, weights, self._weights.keep, pack)
        embedding = packer.take(EMBEDDING)
        layers = packer.layers()
        self._layers = (LayerStruct * config.num_layers)(
            *(LayerStruct(**{name: getattr(layer, name) for name in LAYER_FIELDS}) for layer in layers)
        )
        self._turns = _Turns(torch.tensor(config.inv_freq(), dtype=torch.float32))
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
            embedding=self._weights.keep(embedding),
            final_norm=packer.keep(FINAL_NORM),
            head=self._weights.pack(cpu_format.head, packer.head(embedding)),
        )
        weights.clear()
        self._context = self._library.noria_context_create(num_threads)
        if not self._context:
            raise RuntimeError(f"the system gave fewer than num_threads ({num_threads}) threads")
        weakref.finalize(self, self._library.noria_context_destroy, self._context)
        self.stage_seconds: ctypes.Array[ctypes.c_double] | None = None
        self._logits = torch.empty(0, config.vocab_size)
        self._largest: _Largest | None = None

    @property
    def instruction_set(self) -> str:
        """What the kernels were compiled for."""
        return self._library.noria_instruction_set().decode()

    @property
    def weight_bytes(self) -> int:
        """Of all that is read in a step: packed weights, embedding, norms, scales."""
        return sum(tensor.nbytes for tensor in self._weights.kept)

    def reset_stages(self) -> None:
        self.stage_seconds = (ctypes.c_double * len(STAGES))()

    def forward(self, batch: DecoderInput, kv_layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits [len(logit_indices), vocab_size] in float32; writes the tokens' keys and values into the cache.

        The logits last until the next call, which writes its own over them.
        kv_layers: views of one contiguous memory, of every layer the keys' blocks and behind them the values'.
        Raises RuntimeError where there is no memory for so many tokens.
        """
        keys = kv_layers[0][0]
        logits = self._logits_of(len(batch.logit_indices))
        largest = _empty_largest(logits)
        cos, sin = self._turns.of(max((row.first_position + row.num_queries for row in batch.rows), default=0))
        rows, block_tables = _rows(batch.rows)
        step = StepStruct(
            num_tokens=len(batch.token_ids),
            num_rows=len(rows),
            num_logits=len(logits),
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slot_mapping=batch.slot_mapping.data_ptr(),
            logit_indices=batch.logit_indices.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            rows=rows.ctypes.data,
            cache=keys.data_ptr(),
            num_blocks=len(keys),
            logits=logits.data_ptr(),
            peaks=largest.peaks.data_ptr(),
            peak_ids=largest.ids.data_ptr(),
            stage_seconds=self.stage_seconds,
        )
        if self._library.noria_forward(self._context, self._model, step):
            raise RuntimeError(f"there is no memory for the activations of {len(batch.token_ids)} tokens")
        # named, so that it lives until the call is over
        del block_tables
        self._largest = largest
        return logits

    def _logits_of(self, num_rows: int) -> Tensor:
        """[num_rows, vocab_size], the same memory each time.

        Megabytes that are given back after each step may go back to the system, which gives new pages for the next.
        """
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, self.config.vocab_size)
        return self._logits[:num_rows]

    def largest(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """`runtime.sampling.largest` of scores [R, V]; of the last step's logits it is known already."""
        found = self._largest
        if found is None or found.scores is not scores:
            scores = scores.contiguous()
            found = _empty_largest(scores)
            self._library.noria_largest(scores.data_ptr(), *scores.shape, found.peaks.data_ptr(), found.ids.data_ptr())
        self._largest = None
        return found.peaks, found.ids


class _Turns:
    """Cosines and sines of the angles by which a position turns keys and queries, made as far as they were asked for.

    All are made by torch's vectors, never one by what computes the rest of a tensor: those differ in the last bit.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        """inv_freq: [head_dim / 2]."""
        self._inv_freq = inv_freq
        self._cos = self._sin = torch.empty(0, len(inv_freq))

    def of(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """[at least num_positions, head_dim / 2] each."""
        if num_positions > len(self._cos):
            size = max(_FEWEST_TURNS, 2 ** (num_positions - 1).bit_length())
            angles = torch.arange(size, dtype=torch.float32)[:, None] * self._inv_freq
            self._cos, self._sin = angles.cos(), angles.sin()
        return self._cos, self._sin


@dataclass(frozen=True, slots=True)
class _Largest:
    """Of scores [R, V]: peaks [R], ids [R] int64."""

    scores: Tensor
    peaks: Tensor
    ids: Tensor


def _empty_largest(scores: Tensor) -> _Largest:
    return _Largest(scores, torch.empty(len(scores)), torch.empty(len(scores), dtype=torch.int64))


def _rows(rows: Sequence[AttentionRow]) -> tuple[np.ndarray, np.ndarray]:
    """The rows as ROW_DTYPE, and the block tables that they point into."""
    table = np.fromiter(chain.from_iterable(row.block_table for row in rows), dtype=np.int32)
    sizes = (len(row.block_table) * table.itemsize for row in rows)
    # the last one is the end of all
    addresses = accumulate(sizes, initial=table.ctypes.data)
    numbers = [(*_numbers(row), address) for row, address in zip(rows, addresses, strict=False)]
    return np.array(numbers, dtype=ROW_DTYPE), table
