"""TritonSampler: the sampler whose tokens stay on the GPU. It draws what `sample` in sampling.py defines.

`enqueue` packs what the rows ask for, sends it in one copy and launches; it waits for nothing. The tokens are then on
the device, where the next step may read them, and on their way to the host: `PendingSample.result` waits for them.
Knows nothing of sequences, stop rules or text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noria.kernels.penalties import penalise_triton, restore
from noria.kernels.sampling import SamplingRows, sample_triton
from noria.kernels.token_logprobs import num_words, split_words, token_logprobs_triton
from noria.kernels.upload import upload
from noria.runtime.sampling import MIN_TEMPERATURE, NOTHING_TO_DRAW, WEIGHT_BITS, has_top_k, is_greedy
from noria.scheduler_output import RowFailure, SampledToken, SamplingInput

Arrays = Mapping[str, NDArray[Any]]


class TritonSampler:
    """A `Sampler` of model_runner.py in two halves, so that the host need not wait between them."""

    def __call__(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> list[SampledToken | RowFailure]:
        return self.enqueue(logits, inputs).result()

    def enqueue(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> PendingSample:
        """Launches on the current stream. logits: [R, V] float32, contiguous; changed, and put back, while that runs.

        Raises ValueError for a row count other than R and for a token id outside the vocabulary.
        """
        if len(inputs) != len(logits):
            raise ValueError(f"logits have {len(logits)} rows, and inputs {len(inputs)}")
        vocab_size = logits.shape[1]
        arrays = {**_rows(inputs, vocab_size), **_entries(inputs, vocab_size), **_asked(inputs, vocab_size)}
        sent = dict(zip(arrays, upload(list(arrays.values()), logits.device), strict=True))
        saved = None
        if "indices" in sent:
            saved = penalise_triton(logits, sent["indices"], sent["repetition"], sent["subtrahends"])
        needs_sums = bool(((arrays["temperatures"] > 0) & (arrays["top_ks"] == 0)).any())
        rows = SamplingRows(**{name: sent[name] for name in _ROW_FIELDS}, needs_sums=needs_sums)
        asked = arrays["asked"]
        # the tokens, then the log-probabilities, each from a multiple of 16 bytes
        num_token_words = -(-len(inputs) // 2) * 4
        words = torch.empty(num_token_words + num_words(len(asked)), dtype=torch.int32, device=logits.device)
        token_ids = words[: 2 * len(inputs)].view(torch.int64)
        sample_triton(logits, rows, out=token_ids)
        if saved is not None:
            restore(logits, sent["indices"], saved)
        if len(asked):
            token_logprobs_triton(logits, token_ids, sent["asked"], sent["counts"], out=words[num_token_words:])
        return PendingSample(token_ids, asked, arrays["counts"], *_fetch(words))


@dataclass(frozen=True, slots=True)
class PendingSample:
    """token_ids: [R] int64 on the device, -1 where nothing could be drawn; to be used on the stream of `enqueue`.

    All else that the host reads later is a copy, so that the logits may be overwritten by what is launched next.
    """

    token_ids: Tensor
    _asked: NDArray[np.int32]
    _counts: NDArray[np.int32]
    _words: Tensor
    _fetched: torch.cuda.Event | None

    def result(self) -> list[SampledToken | RowFailure]:
        """One per row. Waits for the sampling, not for what was launched after it."""
        if self._fetched is not None:
            self._fetched.synchronize()
        num_rows = len(self.token_ids)
        token_ids = self._words[: 2 * num_rows].view(torch.int64).tolist()
        results: list[SampledToken | RowFailure] = [
            RowFailure(NOTHING_TO_DRAW) if token_id < 0 else SampledToken(token_id) for token_id in token_ids
        ]
        if len(self._asked) == 0:
            return results
        found = split_words(self._words[-num_words(len(self._asked)) :], len(self._asked))
        columns = (found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
        for row, count, logprob, rank, ids, top in zip(
            self._asked.tolist(), self._counts.tolist(), *(column.tolist() for column in columns), strict=True
        ):
            if token_ids[row] >= 0:
                pairs = tuple(zip(ids[:count], top[:count], strict=True))
                results[row] = SampledToken(token_ids[row], logprob, pairs, rank)
        return results


_ROW_FIELDS = ("seeds", "positions", "temperatures", "top_ks", "top_ps", "min_weights")


def _rows(inputs: Sequence[SamplingInput], vocab_size: int) -> Arrays:
    """The fields of SamplingRows, each [R]."""
    params = [item.params for item in inputs]
    temperatures = [0.0 if is_greedy(item) else max(item.temperature, MIN_TEMPERATURE) for item in params]
    return {
        "seeds": np.array([item.seed for item in inputs], np.uint64).view(np.int64),
        "positions": np.array([item.position for item in inputs], np.int64),
        "temperatures": np.array(temperatures, np.float32),
        "top_ks": np.array([item.top_k if has_top_k(item, vocab_size) else 0 for item in params], np.int32),
        "top_ps": np.array([item.top_p for item in params], np.float64),
        "min_weights": np.array([int(item.min_p * 2.0**WEIGHT_BITS) for item in params], np.int64),
    }


def _asked(inputs: Sequence[SamplingInput], vocab_size: int) -> Arrays:
    """asked: [Q] int32, the rows with log-probabilities. counts: [Q] int32, of how many tokens beside the drawn one."""
    counts = {row: item.params.logprobs for row, item in enumerate(inputs) if item.params.logprobs is not None}
    return {
        "asked": np.array(list(counts), np.int32),
        "counts": np.minimum(np.array(list(counts.values()), np.int32), vocab_size),
    }


def _entries(inputs: Sequence[SamplingInput], vocab_size: int) -> Arrays:
    """The arguments of `penalise_triton` but logits, each [E]; empty when no row has a penalty or a ban."""
    parts = []
    for row, item in enumerate(inputs):
        if item.params.has_penalties or item.banned_token_ids:
            ids, repetition, subtrahends = _row_entries(item)
            if len(ids) and not (ids[0] >= 0 and ids[-1] < vocab_size):
                raise ValueError(f"token ids must be from 0 to {vocab_size - 1}, not {ids[0]} to {ids[-1]}")
            parts.append((row * vocab_size + ids, repetition, subtrahends))
    if sum(len(part[0]) for part in parts) == 0:
        return {}
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return dict(zip(("indices", "repetition", "subtrahends"), columns, strict=True))


def _row_entries(item: SamplingInput) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Of one row: token ids, ascending, with what divides or multiplies their scores and what is subtracted."""
    params = item.params
    output = np.asarray(item.output_token_ids, np.int64)
    banned = np.asarray(item.banned_token_ids, np.int64)
    seen = output[:0]
    if params.repetition_penalty != 1:
        seen = np.unique(np.concatenate((np.asarray(item.prompt_token_ids, np.int64), output)))
    counted, counts = np.unique(output, return_counts=True)
    if params.presence_penalty == 0 and params.frequency_penalty == 0:
        counted, counts = counted[:0], counts[:0]
    ids = np.unique(np.concatenate((seen, counted, banned)))
    repetition = np.ones(len(ids), np.float32)
    repetition[np.searchsorted(ids, seen)] = params.repetition_penalty
    subtrahends = np.zeros(len(ids), np.float32)
    lost = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts.astype(np.float32)
    subtrahends[np.searchsorted(ids, counted)] = lost
    subtrahends[np.searchsorted(ids, banned)] = np.inf
    return ids, repetition, subtrahends


def _fetch(words: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy of `words` on the host, and the event after which it is there; None when it is already."""
    if not words.is_cuda:
        return words, None
    target = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
    target.copy_(words, non_blocking=True)
    fetched = torch.cuda.Event()
    fetched.record(torch.cuda.current_stream(words.device))
    return target, fetched
