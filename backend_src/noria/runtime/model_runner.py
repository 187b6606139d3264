"""ModelRunner: computes one step, from what the scheduler decided to the tokens that were drawn.

The compute plane's only door to the engine. Knows nothing of requests beyond a step, and keeps no state between steps
but the cache, what was swapped out of it, and the tokens that the last step drew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from noria.errors import DeviceLost
from noria.models.cpu_decoder import CpuDecoder
from noria.models.decoder import Decoder
from noria.runtime.cuda_graphs import DecodeGraphs, record_graphs
from noria.runtime.drawn_tokens import DrawnTokens
from noria.runtime.input_batch import NOTHING_DRAWN, InputBatch
from noria.runtime.kv_cache import KVCache
from noria.runtime.swap import ApplyCopies, HostKVCache, apply_block_copies
from noria.runtime.triton_sampling import PendingSample, TritonSampler
from noria.sampling_params import SamplingParams
from noria.scheduler_output import (
    PLACEHOLDER,
    BlockCopy,
    RowFailure,
    SampledToken,
    SamplingInput,
    ScheduledSequence,
    SchedulerOutput,
    StepResult,
)

# logits [rows, vocab_size] float32 and as many inputs to a token, or the reason why there is none, for each row
Sampler = Callable[[Tensor, Sequence[SamplingInput]], list[SampledToken | RowFailure]]

MAX_WARM_UP_TOKENS_ON_CPU = 1024


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    """A PendingStep. sample: of the rows of request_ids; a list where the sampler did not leave it on the device."""

    request_ids: tuple[int, ...]
    sample: PendingSample | list[SampledToken | RowFailure]

    def result(self) -> StepResult:
        """By request id; empty where no row was to be sampled. Raises DeviceLost, as `ModelRunner.submit`."""
        with device_lost_is_told():
            results = self.sample if isinstance(self.sample, list) else self.sample.result()
        return dict(zip(self.request_ids, results, strict=True))


class ModelRunner:
    """One model, its cache, and the sampler. host_cache: where blocks are swapped out to; None where none ever are."""

    def __init__(
        self,
        decoder: Decoder | CpuDecoder,
        cache: KVCache,
        sampler: Sampler,
        host_cache: HostKVCache | None = None,
        has_cuda_graphs: bool = False,
        apply_copies: ApplyCopies = apply_block_copies,
    ) -> None:
        """has_cuda_graphs: `warm_up` records decodes, which are replayed from then on."""
        self.decoder = decoder
        self.cache = cache
        self.host_cache = host_cache
        self.graphs: DecodeGraphs | None = None
        self._sampler = sampler
        self._has_cuda_graphs = has_cuda_graphs
        self._apply_copies = apply_copies
        self._drawn = NOTHING_DRAWN

    @property
    def can_run_ahead(self) -> bool:
        """Whether `submit` returns before the step is computed, and the next step may have placeholders."""
        return isinstance(self._sampler, TritonSampler)

    @property
    def num_host_blocks(self) -> int:
        return 0 if self.host_cache is None else self.host_cache.num_blocks

    def execute(self, output: SchedulerOutput) -> StepResult:
        """The step's block copies, then its tokens by request id; empty where no row was to be sampled.

        A row whose logits are not finite is answered with a RowFailure and does not concern the others. Anything that
        is raised here (out of memory, say) concerns the whole step.
        """
        return self.submit(output).result()

    @torch.inference_mode()
    def submit(self, output: SchedulerOutput) -> SubmittedStep:
        """`execute` in two halves. On a GPU this one waits for nothing, and reads all of `output` that is needed.

        All is launched on one stream, so that a step finds what the one before it wrote: cache, host pool and tokens.
        Raises DeviceLost where no further step can be computed either.
        """
        with device_lost_is_told():
            return self._submit(output)

    def _submit(self, output: SchedulerOutput) -> SubmittedStep:
        drawn, self._drawn = self._drawn, NOTHING_DRAWN
        if output.block_copies:
            assert self.host_cache is not None, "the scheduler swaps, but there is no host pool"
            self._apply_copies(self.cache, self.host_cache, output.block_copies)
        if not output.rows:
            return SubmittedStep((), [])
        batch = InputBatch.build(output.rows, self.cache.block_size, self.cache.num_blocks, drawn)
        logits = None if self.graphs is None else self.graphs.forward(batch)
        if logits is None:
            logits = self.decoder.forward(batch.decoder_input(self.decoder.device), self.cache.layers)
        request_ids, inputs = batch.sampled_request_ids, batch.sampling_inputs
        if not inputs:
            return SubmittedStep((), [])
        if not isinstance(self._sampler, TritonSampler):
            return SubmittedStep(request_ids, self._sampler(logits, inputs))
        sample = self._sampler.enqueue(logits, inputs)
        self._drawn = DrawnTokens.of(sample.token_ids, request_ids)
        return SubmittedStep(request_ids, sample)

    def warm_up(self, max_num_rows: int, max_num_tokens: int) -> None:
        """Runs a step of so many tokens and one of so many rows, so that what they allocate is there, or fails, now.

        The first step of a closed batch, which has no token budget, may be larger; and on a CPU, where a step of
        thousands of tokens costs minutes and the memory is there, no more than MAX_WARM_UP_TOKENS_ON_CPU are run.
        Before the first real step only: it writes into blocks.
        """
        capacity = self.cache.num_blocks * self.cache.block_size
        longest = min(max_num_tokens, capacity, self.decoder.config.max_position_embeddings)
        if self.decoder.device.type == "cpu":
            longest = min(longest, MAX_WARM_UP_TOKENS_ON_CPU)
        # together with the steps below, all that a sampler may have to compile
        params = SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=1.5, logprobs=1)
        self.execute(SchedulerOutput(step=0, rows=(self._warm_up_row(0, longest, params),)))
        for num_rows in _sizes_to_warm_up(max_num_rows, self.decoder.device):
            rows = tuple(self._warm_up_row(index, 1) for index in range(num_rows))
            self.execute(SchedulerOutput(step=0, rows=rows))
        if self.decoder.device.type == "cuda":
            self._warm_up_what_is_rare(longest)
        if self._has_cuda_graphs:
            assert isinstance(self.decoder, Decoder), "the compiled CPU kernels have no graphs"
            self.graphs = record_graphs(self.decoder, self.cache, max_num_rows)

    def _warm_up_what_is_rare(self, longest: int) -> None:
        """Products of few rows and of some, a token that stays on the device, swaps: each has kernels of its own."""
        for num_tokens in (16, 64):
            self.execute(SchedulerOutput(step=0, rows=(self._warm_up_row(0, min(num_tokens, longest)),)))
        if self.can_run_ahead:
            row = self._warm_up_row(0, 1)
            self.execute(SchedulerOutput(step=0, rows=(dataclasses.replace(row, token_ids=[PLACEHOLDER]),)))
        if self.host_cache is not None:
            copies = (BlockCopy(0, 0, is_swap_in=False), BlockCopy(0, 0, is_swap_in=True))
            self.execute(SchedulerOutput(step=0, rows=(), block_copies=copies))

    def _warm_up_row(self, request_id: int, num_tokens: int, params: SamplingParams | None = None) -> ScheduledSequence:
        params = params or SamplingParams(temperature=1.0)
        sampling = SamplingInput(params, seed=0, position=num_tokens, prompt_token_ids=(0,))
        return ScheduledSequence(
            request_id=request_id,
            token_ids=[0] * num_tokens,
            num_computed_tokens=0,
            block_table=range(-(-num_tokens // self.cache.block_size)),
            sampling=sampling,
        )


@contextmanager
def device_lost_is_told() -> Iterator[None]:
    """Raises DeviceLost in place of an error after which CUDA fails every later call, too."""
    try:
        yield
    except Exception as error:
        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except RuntimeError:
            raise DeviceLost(f"the GPU is lost to this process, which must be started again: {error}") from error
        raise


def _sizes_to_warm_up(max_num_rows: int, device: torch.device) -> list[int]:
    """On a GPU every power of two: Triton compiles the decode kernel for each, and would do so while serving."""
    sizes = [2**exponent for exponent in range(max_num_rows.bit_length())] if device.type == "cuda" else []
    return [*(size for size in sizes if size < max_num_rows), max_num_rows]
