"""Any traffic over an engine that runs ahead, with whatever can go wrong: what each request must get, and what must
always hold. The caller says what happens, and draws it as it likes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from noria.engine.engine import Engine
from noria.engine.metrics import StatsCounter
from noria.engine.outputs import RequestOutput
from noria.errors import EngineFailure
from noria.scheduling.block_hash import block_hash, root_hash
from noria.sequence import FinishReason, Request
from support.byte_tokenizer import ByteTokenizer
from support.engines import AheadHashRunner, HashRunner, expected_output, make_request, make_scheduler

BLOCK_SIZE = 4
# each ends one request in 16 at each token, or thereabouts
STOP_TOKENS = tuple(range(7, 256, 16))
STOP_STRINGS = tuple("0123456789abcdef")
FAILURES = ("row", "launch", "result", "text")


def answer(request: Request) -> tuple[str, list[int], FinishReason | None]:
    """Text, tokens and end of the request where it is alone, one step after the other."""
    engine = Engine(make_scheduler(), HashRunner(64, BLOCK_SIZE), ByteTokenizer(), StatsCounter(64, BLOCK_SIZE))
    engine.add(request)
    while engine.has_work:
        engine.step()
    return joined(engine.take_outputs())


def joined(outputs: Any) -> tuple[str, list[int], FinishReason | None]:
    text = "".join(output.text for output in outputs)
    return text, [token.token_id for output in outputs for token in output.tokens], outputs[-1].finish_reason


class BreakableTokenizer(ByteTokenizer):
    is_broken = False

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self.is_broken:
            raise ZeroDivisionError
        return super().decode(token_ids, skip_special_tokens)


class EngineTraffic:
    """Three slots over a pool in which not many requests fit."""

    def __init__(self, policies: dict[str, Any], num_blocks: int, num_host_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.scheduler = make_scheduler(num_blocks, num_host_blocks, block_size=BLOCK_SIZE, max_num_seqs=3, **policies)
        self.runner = AheadHashRunner(num_blocks, BLOCK_SIZE, num_host_blocks)
        self.tokenizer = BreakableTokenizer()
        self.now = 0.0
        counter = StatsCounter(num_blocks, BLOCK_SIZE)
        self.engine = Engine(
            self.scheduler, self.runner, self.tokenizer, counter, clock=lambda: self.now, ahead=self.runner
        )
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[RequestOutput]] = defaultdict(list)
        self.ended: set[int] = set()
        self.paused: set[int] = set()
        # requests that may fail, whole steps aside
        self.failing: set[int] = set()
        self.num_broken_texts = 0
        self._tokens_by_hash: dict[bytes, list[int]] = {}

    @property
    def live(self) -> list[int]:
        return sorted(self.requests.keys() - self.ended)

    @property
    def reading(self) -> list[int]:
        return sorted(self.requests.keys() - self.ended - self.paused)

    def add(self, prompt: Sequence[int], max_tokens: int, stops: str, patience: int | None, **params: Any) -> None:
        """stops: none, "tokens" or "strings"."""
        if stops == "tokens":
            # they would be banned until then, which the fake does not know of
            params["min_tokens"] = 0
        request = make_request(
            prompt,
            max_tokens,
            deadline=None if patience is None else self.now + patience,
            stop_token_ids=STOP_TOKENS if stops == "tokens" else (),
            stop=STOP_STRINGS if stops == "strings" else (),
            **params,
        )
        self.requests[request.request_id] = request
        self._learn_hashes(request)
        self.engine.add(request)
        self._take_outputs()

    def step(self, failure: str = "", failing: int = 0) -> None:
        """failure: one of FAILURES, or none. failing: the id of the request whose row fails."""
        self.now += 1.0
        self.runner.failing = {failing} if failure == "row" else set()
        self.failing |= self.runner.failing
        self.runner.refuses = failure == "launch"
        self.runner.breaks = failure == "result"
        self.tokenizer.is_broken = failure == "text"
        try:
            self.engine.step()
        except ZeroDivisionError:
            # as the engine's thread does
            self.num_broken_texts += 1
            self.fail_all()
        self.tokenizer.is_broken = self.runner.refuses = self.runner.breaks = False
        self.runner.failing = set()
        self._take_outputs()
        self.check()

    def cancel(self, request_id: int) -> None:
        self.engine.abort(request_id)
        self._take_outputs()
        assert request_id in self.ended

    def pause(self, request_id: int) -> None:
        self.engine.pause(request_id)
        self.paused.add(request_id)

    def resume(self, request_id: int) -> None:
        self.engine.resume(request_id)
        self.paused.remove(request_id)

    def fail_all(self) -> None:
        self.failing |= set(self.live)
        self.engine.fail_all(EngineFailure("unloaded"))
        self._take_outputs()
        assert not self.live
        assert not self.engine.has_work
        assert self.scheduler.num_free_blocks == self.num_blocks

    def check(self) -> None:
        """No block is lost, and those in the prefix cache hold what their hashes say."""
        self.engine.check_integrity()
        for block, content_hash in self.scheduler._cache.pool._hash_by_block.items():
            assert self.runner._blocks[block] == self._tokens_by_hash[content_hash]

    def run_to_the_end(self) -> None:
        """Left alone, everybody ends, and every block comes back."""
        for request_id in sorted(self.paused):
            self.resume(request_id)
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.live
        assert self.engine._launched is None
        assert self.scheduler.num_free_blocks == self.num_blocks
        if self.scheduler._swap is not None:
            assert self.scheduler._swap._pool.num_held == 0
        stats = self.engine.stats()
        assert stats.num_useful_slot_steps <= stats.num_slot_steps
        num_tokens = sum(len(output.tokens) for outputs in self.outputs.values() for output in outputs)
        # a token whose text could not be made has been drawn
        assert num_tokens <= stats.num_generated_tokens <= num_tokens + self.num_broken_texts

    def _learn_hashes(self, request: Request) -> None:
        tokens = [*request.prompt_token_ids, *expected_output(request.prompt_token_ids, request.params.max_tokens)]
        parent = root_hash(request.params.cache_salt)
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            block = tokens[start : start + BLOCK_SIZE]
            parent = block_hash(parent, block)
            self._tokens_by_hash[parent] = block

    def _take_outputs(self) -> None:
        for output in self.engine.take_outputs():
            request_id = output.request_id
            assert request_id not in self.ended, "something came after the end"
            self.outputs[request_id].append(output)
            if output.finish_reason is not None:
                self.ended.add(request_id)
                self.paused.discard(request_id)
                self._check_end(request_id, output)

    def _check_end(self, request_id: int, last: RequestOutput) -> None:
        """What it gets alone, or the beginning of that."""
        text, tokens, reason = joined(self.outputs[request_id])
        expected_text, expected_tokens, expected_reason = answer(_alone(self.requests[request_id]))
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (text, tokens, reason) == (expected_text, expected_tokens, expected_reason)
            return
        assert tokens == expected_tokens[: len(tokens)]
        assert expected_text.startswith(text)
        if isinstance(last.error, EngineFailure):
            assert request_id in self.failing | self.runner.lost


def _alone(request: Request) -> Request:
    params = request.params
    return make_request(
        request.prompt_token_ids,
        params.max_tokens,
        stop_token_ids=tuple(request.stop_token_ids),
        stop=params.stop,
        min_tokens=params.min_tokens,
    )
