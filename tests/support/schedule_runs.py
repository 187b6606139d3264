"""A real scheduler and a real model, turned by hand without threads or text, and what a run of requests did in them.

The cache and the host pool begin as NaN, so that whatever is read without having been written shows as a failed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from noria.config import EngineConfig
from noria.models.decoder import Decoder
from noria.runtime.kv_cache import KVCache
from noria.runtime.model_runner import ModelRunner
from noria.runtime.sampling import sample
from noria.runtime.swap import HostKVCache
from noria.scheduler_output import SampledToken, SamplingInput, ScheduledSequence, SchedulerOutput
from noria.scheduling.build import build_scheduler
from noria.sequence import Request

MAX_STEPS = 5000
SECONDS_PER_STEP = 0.01


@dataclass
class ScheduleRun:
    """What became of some requests, and how.

    tokens, num_preemptions, num_pauses: of each request, by its id, in the order in which they were given.
    num_swap_outs: sequences whose blocks went to the host pool when they were preempted.
    num_swapped_in_blocks, num_prefix_hit_tokens, num_padding_rows: of the run.
    max_num_rows, max_num_tokens: in one step.
    """

    tokens: dict[int, list[int]]
    num_preemptions: dict[int, int]
    num_pauses: dict[int, int]
    num_swap_outs: int = 0
    num_swapped_in_blocks: int = 0
    num_prefix_hit_tokens: int = 0
    num_padding_rows: int = 0
    max_num_rows: int = 0
    max_num_tokens: int = 0

    @classmethod
    def of(cls, requests: Sequence[Request]) -> ScheduleRun:
        ids = [request.request_id for request in requests]
        return cls({id: [] for id in ids}, dict.fromkeys(ids, 0), dict.fromkeys(ids, 0))

    def count(self, output: SchedulerOutput) -> None:
        for request_id in output.preempted_request_ids:
            self.num_preemptions[request_id] += 1
        self.num_swap_outs += len(output.swapped_out_request_ids)
        self.num_swapped_in_blocks += sum(copy.is_swap_in for copy in output.block_copies)
        self.num_prefix_hit_tokens += output.num_prefix_hit_tokens
        self.num_padding_rows += sum(row.is_padding for row in output.rows)
        self.max_num_rows = max(self.max_num_rows, len(output.rows))
        self.max_num_tokens = max(self.max_num_tokens, output.num_tokens)


class HandDrivenEngine:
    """Scheduler and runner of one config, which must say num_kv_blocks, and num_host_blocks if it swaps."""

    def __init__(self, decoder: Decoder, config: EngineConfig) -> None:
        self.runner = _poisoned_runner(decoder, config)
        self.scheduler = build_scheduler(
            config, self.runner.cache.num_blocks, num_host_blocks=self.runner.num_host_blocks
        )
        self._step = 0

    def run(self, requests: Sequence[Request], steps_apart: int = 0, pause_every: int = 0) -> ScheduleRun:
        """All requests to their ends.

        steps_apart: between the arrival of one request and the next. pause_every: so many steps, another request is
        paused until the next is.
        """
        run = ScheduleRun.of(requests)
        coming, paused = list(requests), []
        unfinished = set(run.tokens)
        for step in range(MAX_STEPS):
            while coming and step >= steps_apart * (len(requests) - len(coming)):
                self.scheduler.add(coming.pop(0), now=self._now)
            if pause_every and step % pause_every == 0:
                paused = self._pause_another(requests, step // pause_every, paused, run)
            unfinished -= self._turn(run)
            if not unfinished:
                return run
        raise AssertionError(f"{len(unfinished)} requests have not ended after {MAX_STEPS} steps")

    @property
    def _now(self) -> float:
        return self._step * SECONDS_PER_STEP

    def _pause_another(self, requests: Sequence[Request], turn: int, paused: list[int], run: ScheduleRun) -> list[int]:
        for request_id in paused:
            assert self.scheduler.resume(request_id)
        request_id = requests[turn % len(requests)].request_id
        if not self.scheduler.pause(request_id):
            return []
        run.num_pauses[request_id] += 1
        return [request_id]

    def _turn(self, run: ScheduleRun) -> set[int]:
        """One step; the ids of the requests that it ended."""
        self._step += 1
        output = self.scheduler.schedule(self._now)
        self.scheduler.check_integrity()
        run.count(output)
        updates = self.scheduler.update(output, self.runner.execute(output))
        self.scheduler.check_integrity()
        for update in updates:
            assert update.token is not None, update.error
            run.tokens[update.request_id].append(update.token.token_id)
        return {update.request_id for update in updates if update.finish_reason is not None}


def tokens_by_recomputing(decoder: Decoder, request: Request) -> list[int]:
    """What the request is answered where nothing is scheduled or kept: each token from a pass over all before it."""
    longest = len(request.prompt_token_ids) + request.params.max_tokens
    config = EngineConfig(num_kv_blocks=1, block_size=longest)
    history = list(request.prompt_token_ids)
    for _ in range(request.params.max_tokens):
        prompt, output = history[: len(request.prompt_token_ids)], history[len(request.prompt_token_ids) :]
        sampling = SamplingInput(request.params, request.seed, len(history), prompt, output)
        row = ScheduledSequence(request.request_id, history, 0, [0], sampling)
        result = _poisoned_runner(decoder, config).execute(SchedulerOutput(step=1, rows=(row,)))
        token = result[request.request_id]
        assert isinstance(token, SampledToken)
        history.append(token.token_id)
        if token.token_id in request.stop_token_ids:
            break
    return history[len(request.prompt_token_ids) :]


def _poisoned_runner(decoder: Decoder, config: EngineConfig) -> ModelRunner:
    assert config.num_kv_blocks is not None
    cache = KVCache(decoder.config, config.num_kv_blocks, config.block_size, decoder.dtype, decoder.device)
    cache.memory.fill_(torch.nan)
    host_cache = None
    if config.preemption == "swap":
        assert config.num_host_blocks is not None
        host_cache = HostKVCache(cache, config.num_host_blocks)
        host_cache.memory.fill_(torch.nan)
    return ModelRunner(decoder, cache, sample, host_cache)
