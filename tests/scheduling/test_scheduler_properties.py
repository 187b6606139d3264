"""Any sequence of arrivals, steps, cancels, failures, stalled readers and deadlines, under any combination of policies,
over pools that are too small and shrink.

The fake model's next token is a hash of what it reads back from the blocks, so a right output shows that no block was
lost, shared wrongly or overwritten, whatever was preempted, swapped or found in the prefix cache in between.
"""

from collections import defaultdict
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from noria.errors import InvalidRequest, Overloaded
from noria.sequence import FinishReason, Request
from support.engines import POLICIES, HashRunner, expected_output, make_request, make_scheduler

BLOCK_SIZE = 4
MAX_NUM_SEQS = 3
MAX_QUEUE_SIZE = 6


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        mode=st.sampled_from(["inflight", "inflight", "inflight", "static"]),
        policies=st.fixed_dictionaries(POLICIES),
        num_blocks=st.integers(3, 12),
        num_host_blocks=st.sampled_from([0, 2, 12]),
    )
    def start(self, mode: str, policies: dict[str, Any], num_blocks: int, num_host_blocks: int) -> None:
        self.policies = {"batching_mode": mode, **policies}
        self.num_blocks = num_blocks
        self.scheduler = make_scheduler(
            num_blocks,
            num_host_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_queue_size=MAX_QUEUE_SIZE,
            **self.policies,
        )
        self.pool = self.scheduler._cache.pool
        self.runner = HashRunner(num_blocks, BLOCK_SIZE, num_host_blocks)
        self.now = 0.0
        self.num_withheld = 0
        self.live: dict[int, Request] = {}
        self.paused: set[int] = set()
        self.outputs: dict[int, list[int]] = defaultdict(list)
        # requests of which a row failed, perhaps before it was to be sampled
        self.poisoned: set[int] = set()
        self.num_ended = 0
        self.num_accepted = 0

    @property
    def is_closed(self) -> bool:
        return self.policies["batching_mode"] == "static"

    # few different tokens, so that prompts have beginnings in common
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 20),
        patience=st.none() | st.integers(1, 30),
        batch_id=st.integers(0, 2),
        priority=st.integers(0, 3),
        user=st.sampled_from(["", "ann", "bob"]),
        cache_salt=st.sampled_from(["", "a"]),
    )
    def add(self, prompt: list[int], max_tokens: int, patience: int | None, batch_id: int, **params: Any) -> None:
        deadline = None if patience is None else self.now + patience
        request = make_request(prompt, max_tokens, deadline=deadline, batch_id=batch_id, **params)
        if -(-(len(prompt) + max_tokens) // BLOCK_SIZE) > self.num_blocks - self.num_withheld:
            self.restore()
        try:
            self.scheduler.add(request, self.now)
        except InvalidRequest:
            num_tokens, most = len(prompt) + max_tokens, self.policies["max_batch_total_tokens"] or 10**6
            is_too_long_to_fit = num_tokens > min(self.num_blocks * BLOCK_SIZE, most)
            assert is_too_long_to_fit or (not self.policies["chunked_prefill"] and num_tokens > self.prefill_budget)
        except Overloaded:
            assert self.scheduler.num_waiting >= MAX_QUEUE_SIZE
        else:
            self.num_accepted += 1
            self.live[request.request_id] = request

    @property
    def prefill_budget(self) -> int:
        return min(self.policies["max_num_batched_tokens"], self.policies["max_prefill_tokens"] or 10**6)

    @rule(fails=st.booleans())
    def step(self, fails: bool) -> None:
        output = self.schedule()
        self.runner.failing = {output.rows[0].request_id} if fails and output.rows else set()
        self.poisoned |= self.runner.failing
        result = self.runner.execute(output)
        for update in self.scheduler.update(output, result):
            self.take(update)

    @rule()
    def step_that_fails_as_a_whole(self) -> None:
        """The copies of the step have not been made, and what its rows had computed is damaged."""
        output = self.schedule()
        if output.rows:
            for request_id in self.scheduler.abandon(output):
                self.end(request_id)
        else:
            self.runner.execute(output)

    def schedule(self) -> Any:
        self.now += 1.0
        for request_id in self.scheduler.expire(self.now):
            deadline = self.live[request_id].deadline
            assert deadline is not None
            assert deadline <= self.now
            self.end(request_id)
        output = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        # somebody computes something at every step, unless all are paused
        assert bool(output.rows) == bool(set(self.live) - self.paused)
        assert len(output.rows) <= MAX_NUM_SEQS
        assert len({row.request_id for row in output.rows}) == len(output.rows)
        assert not self.paused & {row.request_id for row in output.rows}
        if not self.is_closed:
            self.check_budgets(output)
        for request_id in self.live:
            sequence = self.scheduler.find(request_id)
            assert sequence is not None
            assert sequence.num_preemptions <= self.policies["max_preemptions"]
        if self.policies["admission"] == "guaranteed_no_evict" or self.is_closed:
            assert not output.preempted_request_ids
        return output

    def check_budgets(self, output: Any) -> None:
        assert output.num_tokens <= self.policies["max_num_batched_tokens"]
        assert not any(row.is_padding for row in output.rows)
        is_decode = {
            row.request_id: len(row.token_ids) == 1
            and row.sampling is not None
            and row.num_computed_tokens >= len(self.live[row.request_id].prompt_token_ids)
            for row in output.rows
        }
        prompts = [row for row in output.rows if not is_decode[row.request_id]]
        if self.policies["max_prefill_tokens"]:
            num_chunk_tokens = sum(len(row.token_ids) for row in prompts if len(row.token_ids) > 1)
            assert num_chunk_tokens <= self.policies["max_prefill_tokens"]
        if not self.policies["chunked_prefill"]:
            assert all(row.sampling is not None for row in output.rows)
        joined = set(output.admitted_request_ids)
        if self.policies["prefill_batching"] == "separate" and prompts:
            assert not any(is_decode[row.request_id] and row.request_id not in joined for row in output.rows)

    def take(self, update: Any) -> None:
        request_id, token, reason = update.request_id, update.token, update.finish_reason
        request = self.live[request_id]
        if token is None:
            assert request_id in self.poisoned
            self.end(request_id)
            return
        self.outputs[request_id].append(token.token_id)
        assert self.outputs[request_id] == expected_output(request.prompt_token_ids, len(self.outputs[request_id]))
        if reason is not None:
            assert reason is FinishReason.LENGTH
            assert len(self.outputs[request_id]) == request.params.max_tokens
            self.end(request_id)

    def end(self, request_id: int) -> None:
        """Once for each request: a second time there is nothing to delete."""
        del self.live[request_id]
        self.paused.discard(request_id)
        self.num_ended += 1
        assert self.scheduler.find(request_id) is None

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        assert self.scheduler.finish(request_id, FinishReason.CANCELLED)
        assert not self.scheduler.finish(request_id, FinishReason.CANCELLED)
        self.end(request_id)

    @precondition(lambda self: set(self.live) - self.paused)
    @rule(data=st.data())
    def stall_a_reader(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(set(self.live) - self.paused)))
        if self.scheduler.pause(request_id):
            assert not self.is_closed
            assert not self.scheduler.pause(request_id)
            self.paused.add(request_id)
        else:
            assert self.is_closed

    @precondition(lambda self: self.paused)
    @rule(data=st.data())
    def a_reader_goes_on(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.paused)))
        assert self.scheduler.resume(request_id)
        self.paused.remove(request_id)

    @rule(seconds=st.floats(0, 100))
    def change_the_clock(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: not self.is_closed)
    @rule(num_blocks=st.integers(1, 12))
    def shrink_the_pool(self, num_blocks: int) -> None:
        """As far as the longest live request still fits: below that nobody could go on."""
        needs = [
            -(-(len(request.prompt_token_ids) + request.params.max_tokens) // BLOCK_SIZE)
            for request in self.live.values()
        ]
        most = self.num_blocks - self.num_withheld - max(needs, default=0)
        self.num_withheld += self.pool.withhold(max(0, min(num_blocks, most, self.scheduler._cache.num_unpromised)))

    @rule()
    def restore(self) -> None:
        self.pool.restore()
        self.num_withheld = 0

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert set(self.scheduler.live_request_ids()) == set(self.live)
            assert self.scheduler.num_paused == len(self.paused)
            num_known = self.pool.num_free + self.pool.num_cached + self.pool.num_held + self.num_withheld
            assert num_known == self.num_blocks

    def teardown(self) -> None:
        """Left alone, everybody ends, and every block comes back."""
        if not hasattr(self, "scheduler"):
            return
        self.restore()
        for request_id in sorted(self.paused):
            self.a_reader_goes_on_with(request_id)
        for _ in range(2000):
            if not self.live:
                break
            self.step(fails=False)
        assert not self.live
        assert self.num_ended == self.num_accepted
        assert self.scheduler.num_free_blocks == self.num_blocks
        if self.scheduler._swap is not None:
            assert self.scheduler._swap._pool.num_held == 0

    def a_reader_goes_on_with(self, request_id: int) -> None:
        assert self.scheduler.resume(request_id)
        self.paused.remove(request_id)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
