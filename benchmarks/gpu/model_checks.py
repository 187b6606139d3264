"""Logits of a whole model: the same bits in any company where that is promised, how often they differ where it is not.

The sequence is computed whole, in chunks, token by token, on other blocks, beside other sequences, and by graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gpu.device import Gpu
from gpu.random_models import KV_BLOCK_SIZE, random_decoder
from noria.models.decoder import Decoder
from noria.models.model_config import ModelConfig
from noria.runtime.cuda_graphs import Capture, DecodeGraphs, Graph, shared_pool_capture
from noria.runtime.input_batch import InputBatch
from noria.runtime.kv_cache import KVCache
from noria.sampling_params import SamplingParams
from noria.scheduler_output import SamplingInput, ScheduledSequence

_GREEDY = SamplingInput(SamplingParams(temperature=0.0), seed=0, position=0)
# share of the sequence, at its end, that is also computed a token at a time
_STEPS_SHARE = 0.05
NUM_OTHERS = 5
GRAPH_SIZES = (1, 8)


class Rerun:
    """In the interpreter, a graph that computes again: what it reads and writes is the same memory."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self.output = compute()

    def replay(self) -> None:
        self.output.copy_(self._compute())


def capture_for(gpu: Gpu) -> Capture:
    def rerun(compute: Callable[[], Tensor]) -> Graph:
        return Rerun(compute)

    return rerun if gpu.is_interpreted else shared_pool_capture()


@dataclass(frozen=True)
class Comparison:
    """Of one way to compute the logits with the whole sequence at once, token by token of the vocabulary.

    differing: share of logits whose bits differ. diverging: share of tokens whose likeliest successor differs.
    difference: the largest, over the root mean square of the logits.
    """

    way: str
    differing: float
    diverging: float
    difference: float

    def document(self) -> dict[str, Any]:
        return {"differing": self.differing, "diverging": self.diverging, "largest difference": self.difference}


class Sequences:
    """One sequence whose logits are wanted, on blocks of its own, and others beside it."""

    def __init__(self, decoder: Decoder, num_tokens: int, num_blocks: int, gpu: Gpu) -> None:
        self.decoder, self._gpu = decoder, gpu
        self.cache = KVCache(decoder.config, num_blocks, KV_BLOCK_SIZE, decoder.dtype, decoder.device)
        generator = torch.Generator().manual_seed(11)
        self.token_ids = torch.randint(0, decoder.config.vocab_size, (num_tokens,), generator=generator).tolist()
        self.num_table_blocks = -(-num_tokens // KV_BLOCK_SIZE)
        # in no order, and beyond what the others take
        order = torch.randperm(self.num_table_blocks, generator=generator).tolist()
        self.table = [NUM_OTHERS * 2 + block for block in order]
        self.second_table = [NUM_OTHERS * 2 + self.num_table_blocks + block for block in order]

    def row(self, begin: int, end: int, table: Sequence[int], request_id: int = 0) -> ScheduledSequence:
        return ScheduledSequence(request_id, self.token_ids[begin:end], begin, table, _GREEDY)

    def others(self) -> list[ScheduledSequence]:
        """Chunks and decodes, of short sequences, whose keys need not mean anything."""
        rows = []
        for index in range(2 if self._gpu.is_interpreted else NUM_OTHERS):
            length = (1, 3, 1, 9, 1)[index]
            table = [2 * index, 2 * index + 1]
            rows.append(ScheduledSequence(1 + index, [7 + index] * length, 4 + index, table, _GREEDY))
        return rows

    def logits(self, rows: Sequence[ScheduledSequence], which: int = 0) -> Tensor:
        """[tokens of the row, vocab_size] of all tokens of rows[which]."""
        batch = InputBatch.build(rows, KV_BLOCK_SIZE, self.cache.num_blocks)
        given = batch.decoder_input(self.decoder.device)
        start, length = batch.rows[which].query_start, len(rows[which].token_ids)
        wanted = torch.arange(start, start + length, device=self.decoder.device)
        given = type(given)(given.token_ids, given.positions, given.slot_mapping, given.rows, wanted)
        return self.decoder.forward(given, self.cache.layers)

    def whole(self) -> Tensor:
        return self.logits([self.row(0, len(self.token_ids), self.table)])

    def ways(self) -> Iterator[tuple[str, Callable[[], Tensor], slice]]:
        """Name, what computes logits anew, and of which tokens."""
        n = len(self.token_ids)
        num_steps = max(2, round(_STEPS_SHARE * n))
        cuts = [0, n // 3, n // 3 + 1, n // 2 + 3, n]

        def chunks(table: Sequence[int]) -> Tensor:
            return torch.cat([self.logits([self.row(a, b, table)]) for a, b in pairwise(cuts)])

        def beside() -> Tensor:
            parts = []
            for begin, end in pairwise(cuts):
                rows = self.others()
                rows.insert(1, self.row(begin, end, self.table))
                parts.append(self.logits(rows, which=1))
            return torch.cat(parts)

        def steps() -> Tensor:
            return torch.cat([self.logits([self.row(p, p + 1, self.table)]) for p in range(n - num_steps, n)])

        every, last = slice(0, n), slice(n - num_steps, n)
        if not self._gpu.is_interpreted:
            yield "again", self.whole, every
            yield "in chunks", lambda: chunks(self.table), every
            yield "in chunks on other blocks", lambda: chunks(self.second_table), every
        yield "in chunks beside others", beside, every
        yield "decoded one by one", steps, last

    def graph_ways(self) -> Iterator[tuple[str, Callable[[], Tensor], slice, bool]]:
        """And whether the eager step has as many rows as the graph, so that cuBLAS must choose alike."""
        n = len(self.token_ids)
        graphs = DecodeGraphs(self.decoder, self.cache, GRAPH_SIZES, capture_for(self._gpu))

        def replayed(num_others: int) -> Tensor:
            rows = [self.row(n - 1, n, self.table), *(row for row in self.others() if len(row.token_ids) == 1)]
            batch = InputBatch.build(rows[: 1 + num_others], KV_BLOCK_SIZE, self.cache.num_blocks)
            found = graphs.forward(batch)
            assert found is not None, "no graph took the step"
            return found[:1].clone()

        yield "decoded by a graph of 1", lambda: replayed(0), slice(n - 1, n), True
        yield "decoded by a graph of 8, with others", lambda: replayed(NUM_OTHERS), slice(n - 1, n), False


def build_sequences(
    config: ModelConfig, dtype: torch.dtype, num_tokens: int, is_deterministic: bool, gpu: Gpu
) -> Sequences:
    # the tiny model's logits are to be well apart, as are the large one's with what training leaves
    std = 0.2 if config.hidden_size < 256 else 0.02
    decoder = random_decoder(config, dtype, gpu.device, is_deterministic=is_deterministic, std=std)
    num_blocks = NUM_OTHERS * 2 + 2 * -(-num_tokens // KV_BLOCK_SIZE) + 4
    return Sequences(decoder, num_tokens, num_blocks, gpu)


@torch.inference_mode()
def compare(sequences: Sequences) -> list[Comparison]:
    """Every way with the whole sequence at once; the last two, by graphs, with an eager step of one row."""
    whole = sequences.whole()
    found = [comparison(way, compute(), whole[tokens]) for way, compute, tokens in sequences.ways()]
    n = len(sequences.token_ids)
    eager = sequences.logits([sequences.row(n - 1, n, sequences.table)])
    for way, compute, _tokens, _is_alike in sequences.graph_ways():
        found.append(comparison(way, compute(), eager))
    return found


def comparison(way: str, found: Tensor, expected: Tensor) -> Comparison:
    assert found.shape == expected.shape, f"{way}: {list(found.shape)}, not {list(expected.shape)}"
    assert found.isfinite().all(), f"{way}: logits that are not finite"
    differing = (found.view(torch.int32) != expected.view(torch.int32)).float().mean().item()
    diverging = (found.argmax(-1) != expected.argmax(-1)).float().mean().item()
    difference = ((found - expected).abs().max() / expected.square().mean().sqrt()).item()
    return Comparison(way, differing, diverging, difference)
