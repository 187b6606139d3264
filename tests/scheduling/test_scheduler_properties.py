"""Any sequence of arrivals, steps, cancels, failures and deadlines, in every mode, over pools that are too small.

The fake model's next token is a hash of what it reads back from the blocks, so a right output shows that no block was
lost, shared or overwritten, whatever was preempted in between.
"""

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from noria.errors import InvalidRequest, Overloaded
from noria.sequence import FinishReason, Request
from support.engines import HashRunner, expected_output, make_request, make_scheduler

BLOCK_SIZE = 4
MAX_NUM_SEQS = 3
MAX_NUM_BATCHED_TOKENS = 6


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(mode=st.sampled_from(["inflight", "static"]), num_blocks=st.integers(3, 12))
    def start(self, mode: str, num_blocks: int) -> None:
        self.mode = mode
        self.num_blocks = num_blocks
        self.scheduler = make_scheduler(
            num_blocks,
            batching_mode=mode,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_queue_size=6,
        )
        self.runner = HashRunner(num_blocks, BLOCK_SIZE)
        self.now = 0.0
        self.live: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = defaultdict(list)

    @rule(
        prompt=st.lists(st.integers(0, 255), min_size=1, max_size=20),
        max_tokens=st.integers(1, 20),
        patience=st.none() | st.integers(1, 30),
        batch_id=st.integers(0, 2),
    )
    def add(self, prompt: list[int], max_tokens: int, patience: int | None, batch_id: int) -> None:
        deadline = None if patience is None else self.now + patience
        request = make_request(prompt, max_tokens, deadline=deadline, batch_id=batch_id)
        try:
            self.scheduler.add(request)
        except InvalidRequest:
            assert len(prompt) + max_tokens > self.num_blocks * BLOCK_SIZE
        except Overloaded:
            assert self.scheduler.num_waiting >= 6
        else:
            self.live[request.request_id] = request

    @rule(fails=st.booleans())
    def step(self, fails: bool) -> None:
        self.now += 1.0
        for request_id in self.scheduler.expire(self.now):
            deadline = self.live.pop(request_id).deadline
            assert deadline is not None
            assert deadline <= self.now
        output = self.scheduler.schedule()
        self.scheduler.check_integrity()
        # whoever is live goes on: somebody computes something at every step
        assert bool(output.rows) == bool(self.live)
        assert len(output.rows) <= MAX_NUM_SEQS
        if self.mode == "inflight":
            assert output.num_tokens <= MAX_NUM_BATCHED_TOKENS
            assert not any(row.is_padding for row in output.rows)
        self.runner.failing = {output.rows[0].request_id} if fails and output.rows else set()
        for update in self.scheduler.update(output, self.runner.execute(output)):
            self._take(update)

    def _take(self, update: object) -> None:
        request_id, token, reason = update.request_id, update.token, update.finish_reason  # type: ignore[attr-defined]
        request = self.live[request_id]
        if token is None:
            assert request_id in self.runner.failing
            del self.live[request_id]
            return
        self.outputs[request_id].append(token.token_id)
        assert self.outputs[request_id] == expected_output(request.prompt_token_ids, len(self.outputs[request_id]))
        if reason is not None:
            assert reason is FinishReason.LENGTH
            assert len(self.outputs[request_id]) == request.params.max_tokens
            del self.live[request_id]

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.live:
            request_id = data.draw(st.sampled_from(sorted(self.live)))
            assert self.scheduler.finish(request_id, FinishReason.CANCELLED)
            assert not self.scheduler.finish(request_id, FinishReason.CANCELLED)
            del self.live[request_id]

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert set(self.scheduler.live_request_ids()) == set(self.live)

    def teardown(self) -> None:
        """Left alone, everybody ends, and every block comes back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.live:
                break
            self.step(fails=False)
        assert not self.live
        assert self.scheduler.num_free_blocks == self.num_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
