"""DecodeGraphs: decodes of a few sizes, recorded once and replayed, so that the host launches one thing a step.

A step of a small model is some 300 kernels, each of which takes the host longer to launch than the GPU to run. A graph
holds them all with their arguments: the inputs lie at fixed addresses, and a batch runs in the smallest recorded size
that holds it, filled up with rows that see no key and write where nothing is read. Lengths are read on the device.

What a graph cannot hold is left to the caller: prompts, more rows than the largest size, keys beyond the workspace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noria.errors import ConfigError
from noria.kernels.attention_tiles import SPLIT_KEYS
from noria.kernels.paged_decode import DecodeRows
from noria.kernels.split_states import empty_workspace
from noria.kernels.triton_attention import TritonAttentionPlan, decode_rows
from noria.kernels.upload import packed, upload, views
from noria.models.decoder import Decoder, DecoderInput
from noria.runtime.input_batch import InputBatch
from noria.runtime.kv_cache import GIB, KVCache

log = logging.getLogger(__name__)

MAX_SIZE = 256
_NUM_TENSORS = 3


class Graph(Protocol):
    """output: what the recorded computation returned, overwritten by each replay."""

    output: Tensor

    def replay(self) -> None: ...


# records a computation whose inputs and outputs stay where they are
Capture = Callable[[Callable[[], Tensor]], Graph]


class CudaGraph:
    """See Graph. pool: memory shared by graphs of which one runs at a time; None makes a new one."""

    def __init__(self, compute: Callable[[], Tensor], stream: torch.cuda.Stream, pool: Any = None) -> None:
        """stream: for the run before the recording, in which kernels are compiled and libraries get their memory."""
        self._graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph, pool=pool):
            self.output = compute()

    @property
    def pool(self) -> Any:
        return self._graph.pool()

    def replay(self) -> None:
        self._graph.replay()


def record_graphs(decoder: Decoder, cache: KVCache, max_num_rows: int) -> DecodeGraphs:
    """For the GPU of the decoder. Raises ConfigError where the memory is not there; logs what they take."""
    free = torch.cuda.mem_get_info(decoder.device)[0]
    try:
        graphs = DecodeGraphs(decoder, cache, ladder(max_num_rows), shared_pool_capture())
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"cuda_graphs: the GPU does not have the memory to record them beside the cache: lower kv_cache_gib, "
            f"num_kv_blocks or max_num_seqs, or set cuda_graphs to false ({error})"
        ) from None
    except RuntimeError as error:
        raise ConfigError(f"cuda_graphs: they could not be recorded; false does without them ({error})") from error
    taken = (free - torch.cuda.mem_get_info(decoder.device)[0]) / GIB
    log.info("CUDA graphs: %d, of 1 to %d rows; %.2f GiB", len(graphs.sizes), graphs.sizes[-1], taken)
    return graphs


def shared_pool_capture() -> Capture:
    """Graphs that share the memory of their activations; the first should be the largest."""
    pools: list[Any] = []
    # one for all: cuBLAS keeps memory for each stream that it was called on
    stream = torch.cuda.Stream()

    def capture(compute: Callable[[], Tensor]) -> Graph:
        graph = CudaGraph(compute, stream, pools[0] if pools else None)
        pools.append(graph.pool)
        return graph

    return capture


def ladder(max_num_rows: int) -> tuple[int, ...]:
    """The sizes that are recorded, ascending: so dense that no more than a third of a replay's rows is filling."""
    sizes = [1, 2, 3, 4, 6, *range(8, 64, 4), *range(64, 128, 16), *range(128, MAX_SIZE + 1, 32)]
    limit = min(max_num_rows, MAX_SIZE)
    return (*(size for size in sizes if size < limit), limit)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """buffer: all inputs on the device, as `kernels.upload` packs them; token_ids: [size], a view of it."""

    buffer: Tensor
    token_ids: Tensor
    graph: Graph


class DecodeGraphs:
    """Of one decoder and its cache. sizes: rows, ascending."""

    @torch.inference_mode()
    def __init__(self, decoder: Decoder, cache: KVCache, sizes: Sequence[int], capture: Capture) -> None:
        self.sizes = tuple(sizes)
        self._decoder = decoder
        self._cache = cache
        # enough where no two rows share a block; each row's last block and last split are counted on top
        self.max_num_block_ids = self.sizes[-1] + cache.num_blocks
        self.max_num_units = self.sizes[-1] + cache.num_blocks * cache.block_size // SPLIT_KEYS
        shape = decoder.attention_shape
        self._workspace = empty_workspace(self.max_num_units, shape.num_heads, shape.head_dim, decoder.device)
        self._recorded = {size: self._record(size, capture) for size in reversed(self.sizes)}

    @torch.inference_mode()
    def forward(self, batch: InputBatch) -> Tensor | None:
        """`Decoder.forward` of the batch, valid until the next call; None where no graph holds it."""
        rows = batch.rows
        if len(rows) > self.sizes[-1] or len(batch.token_ids) != len(rows):
            return None
        size = next(size for size in self.sizes if size >= len(rows))
        arrays = self._arrays(batch, size)
        unit_starts = arrays[_NUM_TENSORS + DecodeRows._fields.index("unit_starts")]
        if unit_starts[-1] > self.max_num_units or len(arrays[-1]) > self.max_num_block_ids:
            return None
        recorded = self._recorded[size]
        sent = packed(arrays, self._decoder.device)
        recorded.buffer[: len(sent)].copy_(sent, non_blocking=True)
        # between the copy and the replay in the stream's order, too; an earlier replay has been computed by then
        batch.fill_in(recorded.token_ids)
        recorded.graph.replay()
        if len(batch.logit_indices) == len(rows):
            return recorded.graph.output[: len(rows)]
        (logit_indices,) = upload((batch.logit_indices,), self._decoder.device)
        return recorded.graph.output[logit_indices]

    def _record(self, size: int, capture: Capture) -> _Recorded:
        decoder = self._decoder
        arrays = self._arrays(None, size)
        # the last one takes all that is left of the buffer
        arrays[-1] = np.zeros(self.max_num_block_ids, dtype=np.int32)
        buffer = packed(arrays, decoder.device).to(decoder.device)
        token_ids, positions, slot_mapping, *rows = views(buffer, arrays)
        plan = TritonAttentionPlan(
            decoder.attention_shape, decoder.is_deterministic, DecodeRows(*rows), self._workspace, None
        )
        # every row's logits: which are wanted is not the same at each replay
        batch = DecoderInput(token_ids, positions, slot_mapping, (), torch.arange(size, device=decoder.device))
        return _Recorded(buffer, token_ids, capture(lambda: decoder.run(batch, plan, self._cache.layers)))

    def _arrays(self, batch: InputBatch | None, size: int) -> list[NDArray[Any]]:
        """token_ids, positions, slots [size] int64, and the fields of DecodeRows; None is a batch of no rows."""
        rows = () if batch is None else batch.rows
        unused_slot = self._cache.num_blocks * self._cache.block_size

        def filled(values: NDArray[np.int64], filling: int) -> NDArray[np.int64]:
            return np.pad(values, (0, size - len(rows)), constant_values=filling)

        empty = np.zeros(0, dtype=np.int64)
        given = (empty, empty, empty) if batch is None else (batch.token_ids, batch.positions, batch.slots)
        tensors = [filled(values, filling) for values, filling in zip(given, (0, 0, unused_slot), strict=True)]
        window = self._decoder.attention_shape.sliding_window
        return [*tensors, *decode_rows(rows, size, window)]
