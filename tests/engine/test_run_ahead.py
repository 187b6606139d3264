"""A step is launched before the last one's tokens are known, and nobody can tell from the answers.

The fake runner computes at once and in order, as a device does, and reads placeholders from what it drew itself. Any
traffic over pools that are too small, with whatever can go wrong, must give each request what it gets alone, or the
beginning of that and an error; and the prefix cache must hold just what its hashes say.
"""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from noria.scheduler_output import SchedulerOutput, StepResult
from noria.scheduling.progress import Progress
from noria.scheduling.sequence_update import SequenceUpdate
from noria.sequence import SequenceStatus
from support.engine_traffic import FAILURES, EngineTraffic
from support.engines import POLICIES

# more often what lets sequences in that do not fit together
TIGHT: dict[str, st.SearchStrategy[Any]] = {
    "admission": st.sampled_from(["max_utilization", "max_utilization", "guaranteed_no_evict"]),
    "admission_headroom": st.sampled_from([0.0, 0.0, 0.15]),
    "max_batch_total_tokens": st.sampled_from([None, None, 60]),
    "max_num_batched_tokens": st.sampled_from([4, 100, 100]),
    "max_preemptions": st.sampled_from([1, 4]),
}


class RunAheadMachine(RuleBasedStateMachine):
    @initialize(
        policies=st.fixed_dictionaries(POLICIES | TIGHT),
        num_blocks=st.integers(6, 9),
        num_host_blocks=st.sampled_from([2, 14]),
    )
    def start(self, policies: dict[str, Any], num_blocks: int, num_host_blocks: int) -> None:
        self.traffic = EngineTraffic(policies, num_blocks, num_host_blocks)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        max_tokens=st.sampled_from([1, 2, 7, 14, 14, 14]),
        stops=st.sampled_from(["", "", "tokens", "strings"]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.5]),
        min_tokens=st.sampled_from([0, 0, 1]),
        patience=st.none() | st.integers(1, 30),
        priority=st.integers(0, 3),
        user=st.sampled_from(["", "ann"]),
        cache_salt=st.sampled_from(["", "a"]),
    )
    def add(self, **request: Any) -> None:
        self.traffic.add(**request)

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.traffic.step()

    @precondition(lambda self: self.traffic.live)
    @rule(failure=st.sampled_from(FAILURES), data=st.data())
    def step_that_fails(self, failure: str, data: st.DataObject) -> None:
        self.traffic.step(failure, data.draw(st.sampled_from(self.traffic.live)))

    @precondition(lambda self: self.traffic.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.traffic.cancel(data.draw(st.sampled_from(self.traffic.live)))

    @precondition(lambda self: self.traffic.reading)
    @rule(data=st.data())
    def stall_a_reader(self, data: st.DataObject) -> None:
        self.traffic.pause(data.draw(st.sampled_from(self.traffic.reading)))

    @precondition(lambda self: self.traffic.paused)
    @rule(data=st.data())
    def a_reader_goes_on(self, data: st.DataObject) -> None:
        self.traffic.resume(data.draw(st.sampled_from(sorted(self.traffic.paused))))

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.check()
            self.traffic.run_to_the_end()


TestRunAhead = RunAheadMachine.TestCase
TestRunAhead.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts in what state results find the sequences that they are for."""
    seen: Counter[str] = Counter()
    take, advance = Progress.take, Progress.advance

    def watch_take(self: Progress, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        for row in output.rows:
            sequence = self._sequences.get(row.request_id)
            if row.sampling is None:
                continue
            if sequence is None:
                seen["ended"] += 1
            elif sequence.status is not SequenceStatus.RUNNING:
                seen[f"{sequence.status.value}, {type(result[row.request_id]).__name__}"] += 1
            elif sequence.num_computed_tokens != row.num_computed_tokens + len(row.token_ids):
                seen["joined again"] += 1
        return take(self, output, result)

    def watch_advance(self: Progress, output: SchedulerOutput) -> tuple[int, ...]:
        late_request_ids = advance(self, output)
        seen["late"] += len(late_request_ids)
        return late_request_ids

    monkeypatch.setattr(Progress, "take", watch_take)
    monkeypatch.setattr(Progress, "advance", watch_advance)
    return seen


def test_busy_traffic_through_all_that_is_to_be_feared(seen: Counter[str]) -> None:
    """Busier than what the machine above draws: the pool is always too small."""
    for seed in range(40):
        try:
            traffic = run_busily(random.Random(seed))
        except Exception as error:
            raise AssertionError(f"with seed {seed}") from error
        stats = traffic.engine.stats()
        seen["placeholder"] += traffic.runner.num_placeholders
        seen["swapped out"] += stats.num_swap_outs
        seen["preempted"] += stats.num_preemptions
        seen["prefix hit"] += stats.num_prefix_hit_tokens
    feared = ["ended", "late", "joined again", "placeholder", "swapped out", "preempted", "prefix hit"]
    feared += [f"{status}, SampledToken" for status in ("waiting", "swapped", "paused")] + ["paused, RowFailure"]
    assert [name for name in feared if not seen[name]] == []


def run_busily(draw: random.Random) -> EngineTraffic:
    policies = {
        "preemption": draw.choice(["recompute", "swap"]),
        "prefix_caching": draw.random() < 0.7,
        "chunked_prefill": draw.random() < 0.7,
        "max_num_batched_tokens": draw.choice([6, 100]),
        "prefill_batching": draw.choice(["mixed", "mixed", "separate"]),
        "prefill_order": draw.choice(["fcfs", "equal_progress"]),
        "fair_share": draw.random() < 0.3,
        "admission_headroom": 0.0,
        "max_preemptions": 50,
    }
    traffic = EngineTraffic(policies, num_blocks=draw.randint(6, 9), num_host_blocks=draw.choice([3, 14]))
    for _ in range(150):
        act(traffic, draw)
    traffic.run_to_the_end()
    return traffic


def act(traffic: EngineTraffic, draw: random.Random) -> None:
    if len(traffic.live) < 6:
        traffic.add(
            [draw.randint(0, 1) for _ in range(draw.randint(1, 10))],
            max_tokens=draw.choice([1, 7, 14, 14, 14]),
            stops=draw.choice(["", "", "", "tokens", "strings"]),
            patience=draw.choice([None, None, None, draw.randint(1, 60)]),
            priority=draw.randint(0, 3),
            repetition_penalty=draw.choice([1.0] * 15 + [1.5]),
        )
    kind = draw.random()
    if kind < 0.1 and traffic.reading:
        traffic.pause(draw.choice(traffic.reading))
    elif kind < 0.25 and traffic.paused:
        traffic.resume(draw.choice(sorted(traffic.paused)))
    elif kind < 0.27 and traffic.live:
        traffic.cancel(draw.choice(traffic.live))
    elif kind < 0.275:
        traffic.fail_all()
    elif kind < 0.32 and traffic.live:
        traffic.step(draw.choice(["row", *FAILURES]), draw.choice(traffic.live))
    else:
        traffic.step()
