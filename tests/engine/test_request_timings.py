"""What a request's timings say, through an engine whose clock the test turns."""

import pytest

from noria.engine.engine import Engine
from noria.engine.metrics import StatsCounter
from noria.engine.outputs import EngineStats, RequestOutput
from noria.engine.request_timings import RequestTimings
from noria.scheduler_output import SchedulerOutput, StepResult
from noria.sequence import FinishReason, Request
from support.byte_tokenizer import ByteTokenizer
from support.engines import HashRunner, make_request, make_scheduler


class TimedEngine:
    """Every step takes `step_s` seconds; nothing else takes any."""

    def __init__(self, num_blocks: int = 64, **config: object) -> None:
        self.now = 100.0
        self.step_s = 1.0
        self._runner = HashRunner(num_blocks, 4)
        scheduler = make_scheduler(num_blocks, **config)
        counter = StatsCounter(num_blocks, 4, unix_clock=lambda: 0.0)
        self.engine = Engine(scheduler, self, ByteTokenizer(), counter, clock=lambda: self.now)
        self.ends: dict[int, RequestOutput] = {}

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.now += self.step_s
        return self._runner.execute(output)

    def step(self, *step_seconds: float) -> None:
        for self.step_s in step_seconds:
            self.engine.step()
            self.ends |= {output.request_id: output for output in self.engine.take_outputs() if output.finish_reason}

    def run(self) -> None:
        while self.engine.has_work:
            self.step(1.0)

    def timings(self, request: Request) -> RequestTimings:
        timings = self.ends[request.request_id].timings
        assert timings is not None
        return timings

    def stats(self) -> EngineStats:
        return self.engine.stats()


def test_all_times_of_an_answer_from_the_moment_it_was_handed_over() -> None:
    fixture = TimedEngine()
    request = make_request(prompt=[1, 2, 3], max_tokens=4, priority=1)
    # it came 2 s before the engine, which was in a step, could take it; its tokens take 1, 2, 5 and 3 s
    fixture.engine.add(request, arrived_s=98.0)
    fixture.step(1.0, 2.0, 5.0, 3.0)
    assert fixture.timings(request) == RequestTimings(
        level=1,
        finish_reason=FinishReason.LENGTH,
        num_prompt_tokens=3,
        num_output_tokens=4,
        num_preemptions=0,
        queue_s=2.0,
        ttft_s=3.0,
        tpot_s=10.0 / 3,
        max_gap_s=5.0,
        e2e_s=13.0,
    )
    assert fixture.stats().step_seconds == 11.0


def test_one_token_has_no_gaps() -> None:
    fixture = TimedEngine()
    request = make_request(max_tokens=1)
    fixture.engine.add(request)
    fixture.run()
    timings = fixture.timings(request)
    assert (timings.ttft_s, timings.tpot_s, timings.max_gap_s, timings.e2e_s) == (1.0, None, None, 1.0)


def test_who_is_cancelled_in_the_queue_was_never_scheduled() -> None:
    fixture = TimedEngine(max_num_seqs=1)
    running, waiting = make_request(max_tokens=9), make_request(max_tokens=9)
    for request in (running, waiting):
        fixture.engine.add(request)
    fixture.step(1.0, 1.0)
    fixture.engine.abort(waiting.request_id)
    fixture.engine.abort(running.request_id)
    fixture.run()
    fixture.ends |= {output.request_id: output for output in fixture.engine.take_outputs()}
    assert (fixture.timings(waiting).queue_s, fixture.timings(waiting).ttft_s) == (None, None)
    assert (fixture.timings(running).queue_s, fixture.timings(running).num_output_tokens) == (0.0, 2)
    assert not fixture.timings(running).is_answer


def test_preemptions_are_counted_and_the_queue_time_ends_with_the_first_step() -> None:
    # two of up to 8 blocks each, in a pool of 10
    fixture = TimedEngine(num_blocks=10, admission_headroom=0.0)
    requests = [make_request(prompt=range(8), max_tokens=20) for _ in range(2)]
    for request in requests:
        fixture.engine.add(request)
    fixture.run()
    first, second = map(fixture.timings, requests)
    assert (first.num_preemptions, second.num_preemptions) == (0, fixture.stats().num_preemptions)
    assert second.num_preemptions >= 1
    assert first.queue_s == second.queue_s == 0.0
    assert second.max_gap_s is not None
    assert first.max_gap_s is not None
    assert second.max_gap_s > first.max_gap_s == 1.0
    assert second.num_output_tokens == 20


def test_a_refused_request_counts_in_its_level_and_one_that_can_never_be_served_in_none() -> None:
    fixture = TimedEngine(max_num_seqs=1, max_queue_size=1)
    for priority in (1, 2, 3):
        fixture.engine.add(make_request(priority=priority))
    fixture.engine.add(make_request(max_tokens=10_000))
    fixture.engine.skip(make_request(priority=3))
    stats = fixture.stats()
    assert [(level.level, level.num_rejected, level.num_cancelled) for level in stats.levels] == [
        (1, 0, 0),
        (2, 0, 0),
        (3, 1, 1),
    ]
    assert (stats.num_invalid, stats.num_failed) == (1, 2)
    # prompts of accepted requests only
    assert stats.num_prompt_tokens == 6


def test_what_waits_and_runs_is_counted_in_tokens_and_by_level() -> None:
    fixture = TimedEngine(max_num_seqs=2)
    for priority, length in ((1, 5), (2, 6), (2, 7), (3, 8)):
        fixture.engine.add(make_request(prompt=range(length), max_tokens=3, priority=priority))
    assert fixture.stats().num_waiting_tokens == 26
    fixture.step(1.0)
    stats = fixture.stats()
    assert [level.num_waiting for level in stats.levels] == [0, 1, 1]
    assert (stats.num_running_tokens, stats.num_waiting_tokens) == (11, 15)
    assert (stats.num_context_requests, stats.num_context_tokens, stats.num_decode_requests) == (2, 11, 0)
    fixture.step(1.0)
    stats = fixture.stats()
    assert (stats.num_context_requests, stats.num_context_tokens, stats.num_decode_requests) == (0, 0, 2)
    fixture.run()
    stats = fixture.stats()
    assert (stats.num_running_tokens, stats.num_waiting_tokens, stats.num_decode_requests) == (0, 0, 0)


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_closed_batchs_padding_shows_as_empty_slots(mode: str) -> None:
    fixture = TimedEngine(batching_mode=mode, max_num_seqs=4)
    for max_tokens in (1, 2, 3):
        fixture.engine.add(make_request(max_tokens=max_tokens))
    seen = []
    for _ in range(3):
        fixture.step(1.0)
        seen.append(fixture.stats().num_empty_slots)
    # one slot was never filled, then one more is padding; when all have ended there is no batch
    assert seen == [1, 2, 0]
