"""Who comes first: priority levels that age, fair shares, limits per level, default deadlines."""

import pytest

from noria.config import PriorityClass
from noria.errors import InvalidRequest, Overloaded
from noria.scheduling.pace import Pace
from noria.scheduling.scheduler import Scheduler
from noria.scheduling.waiting_order import MAX_IDLE_USERS, FairOrder
from noria.sequence import Request
from support.engines import HashRunner, make_request, make_scheduler, step


def order_of_service(scheduler: Scheduler, runner: HashRunner, now: float = 0.0) -> list[int]:
    """Ids in the order in which they first join, all steps at `now`."""
    joined: list[int] = []
    while scheduler.has_work:
        output = scheduler.schedule(now)
        scheduler.update(output, runner.execute(output))
        joined += [one for one in output.admitted_request_ids if one not in joined]
    return joined


def ids(*requests: Request) -> list[int]:
    return [request.request_id for request in requests]


def test_level_1_comes_first_then_arrival_and_0_is_the_default_level() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=1), HashRunner(64, 4)
    low, default, middle, high = (make_request(priority=priority) for priority in (3, 0, 2, 1))
    for request in (low, default, middle, high):
        scheduler.add(request)
    assert order_of_service(scheduler, runner) == ids(high, default, middle, low)


def test_an_unknown_level_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"priority must be from 1 to 3, or 0 for the default \(2\), not 4"):
        make_scheduler().add(make_request(priority=4))


def test_a_request_that_has_waited_counts_as_more_urgent() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=1, priority_ageing_s=10.0), HashRunner(64, 4)
    low, high = make_request(priority=3), make_request(priority=1)
    scheduler.add(low, now=0.0)
    scheduler.add(high, now=20.0)
    assert order_of_service(scheduler, runner, now=20.0) == ids(low, high)


def test_nobody_starves_under_a_stream_of_urgent_requests() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=1, priority_ageing_s=5.0), HashRunner(64, 4)
    low = make_request(priority=3, max_tokens=4)
    scheduler.add(low)
    for now in range(60):
        scheduler.add(make_request(priority=1, max_tokens=1), float(now))
        output = scheduler.schedule(float(now))
        scheduler.update(output, runner.execute(output))
        if scheduler.find(low.request_id) is None:
            break
    assert scheduler.find(low.request_id) is None


def test_a_more_urgent_request_takes_the_slot_of_the_least_urgent_latest_one() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=3, priority_ageing_s=None), HashRunner(64, 4)
    running = [make_request(priority=priority, max_tokens=20) for priority in (3, 3, 2)]
    for request in running:
        scheduler.add(request)
    step(scheduler, runner)
    urgent = make_request(priority=1)
    scheduler.add(urgent)
    output = step(scheduler, runner)
    assert list(output.preempted_request_ids) == ids(running[1])
    assert {row.request_id for row in output.rows} == set(ids(running[0], running[2], urgent))


def test_equals_and_guaranteed_requests_are_not_driven_out() -> None:
    for settings in ({"admission": "guaranteed_no_evict"}, {}):
        scheduler, runner = make_scheduler(max_num_seqs=1, priority_ageing_s=None, **settings), HashRunner(64, 4)
        scheduler.add(make_request(priority=2 if not settings else 3, max_tokens=20))
        step(scheduler, runner)
        scheduler.add(make_request(priority=2))
        assert not step(scheduler, runner).preempted_request_ids


def test_nobody_is_driven_out_where_that_would_not_let_the_urgent_one_in() -> None:
    scheduler, runner = make_scheduler(8, max_num_seqs=3, priority_ageing_s=None), HashRunner(8, 4)
    important = make_request([1] * 18, 2, priority=1)
    humble = make_request([2] * 4, 8, priority=3)
    scheduler.add(important)
    scheduler.add(humble)
    step(scheduler, runner)
    scheduler.add(make_request([3] * 18, 2, priority=2))
    assert not step(scheduler, runner).preempted_request_ids


def test_limits_of_a_level_refuse_its_requests_alone() -> None:
    classes = {3: PriorityClass(max_queue_size=1), 2: PriorityClass(max_queue_tokens=5)}
    scheduler = make_scheduler(max_num_seqs=1, priority_classes=classes)
    scheduler.add(make_request())
    scheduler.schedule()
    scheduler.add(make_request(priority=3))
    with pytest.raises(Overloaded, match="max_queue_size of priority 3 is 1 requests; try again later"):
        scheduler.add(make_request(priority=3))
    scheduler.add(make_request(priority=2))
    with pytest.raises(
        Overloaded, match="holds 3 prompt tokens, this request has 3, max_queue_tokens of priority 2 is 5"
    ):
        scheduler.add(make_request(priority=2))
    scheduler.add(make_request(priority=1))


def test_a_refusal_says_when_to_come_back_once_requests_have_ended() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=1, max_queue_size=1), HashRunner(64, 4)
    for now in (0.0, 4.0, 8.0):
        scheduler.add(make_request(max_tokens=1), now)
        scheduler.update(output := scheduler.schedule(now), runner.execute(output))
    scheduler.add(make_request(), 8.0)
    scheduler.add(make_request(), 8.0)
    with pytest.raises(Overloaded, match=r"a request ends every 4\.0 s or so; retry after 4 s"):
        scheduler.add(make_request(), 8.0)


def test_a_level_gives_its_requests_a_deadline() -> None:
    scheduler = make_scheduler(
        default_timeout_s=100.0, priority_classes={3: PriorityClass(default_timeout_s=10.0)}, max_num_seqs=1
    )
    own, low, default = make_request(priority=3, deadline=1000.0), make_request(priority=3), make_request()
    for request in (own, low, default):
        scheduler.add(request, now=5.0)
    assert scheduler.next_deadline == 15.0
    assert scheduler.expire(15.0) == ids(low)
    assert scheduler.expire(105.0) == ids(default)
    assert scheduler.live_request_ids() == ids(own)


def test_fair_share_serves_the_user_who_was_given_least() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=1, fair_share=True), HashRunner(64, 4)
    greedy = [make_request(user="greedy", max_tokens=8) for _ in range(4)]
    modest = [make_request(user="modest", max_tokens=2) for _ in range(4)]
    for request in (*greedy, *modest):
        scheduler.add(request)
    # a request of greedy's costs 3 + 16, one of modest's 3 + 4
    expected = [greedy[0], *modest[:3], greedy[1], modest[3], *greedy[2:]]
    assert order_of_service(scheduler, runner) == ids(*expected)


def test_the_service_of_two_backlogged_users_never_differs_by_more_than_the_bound() -> None:
    """VTC, theorem 4.3: at most twice the larger of the input's weight times its length and the output's times M."""
    scheduler, runner = make_scheduler(max_num_seqs=4, fair_share=True, num_blocks=256), HashRunner(256, 4)
    # ann asks for much more per request than bob
    for _ in range(40):
        scheduler.add(make_request([1] * 12, 16, user="ann"))
        scheduler.add(make_request([2] * 3, 2, user="bob"))
    users = {request_id: scheduler.find(request_id).request.params.user for request_id in scheduler.live_request_ids()}  # type: ignore[union-attr]
    service = {"ann": 0.0, "bob": 0.0}
    while {sequence.request.params.user for sequence in scheduler._waiting} == {"ann", "bob"}:
        output = scheduler.schedule()
        for row in output.rows:
            service[users[row.request_id]] += len(row.token_ids) if row.num_computed_tokens == 0 else 0
        for update in scheduler.update(output, runner.execute(output)):
            service[users[update.request_id]] += 2
        assert abs(service["ann"] - service["bob"]) <= 2 * max(12, 2 * 4 * 16)
    assert min(service.values()) > 200


def test_idle_time_earns_no_credit() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=1, fair_share=True), HashRunner(64, 4)
    for _ in range(3):
        scheduler.add(make_request(user="early", max_tokens=20))
    for _ in range(45):
        step(scheduler, runner)
    # two of early's have been served; late starts level with the third, not with two requests to his credit
    late = [make_request(user="late", max_tokens=20) for _ in range(2)]
    early = make_request(user="early", max_tokens=20)
    for request in (late[0], early, late[1]):
        scheduler.add(request)
    order = [one for one in order_of_service(scheduler, runner) if one in ids(*late, early)]
    assert order == ids(late[0], early, late[1])


def test_a_fair_share_is_no_reason_to_starve() -> None:
    """A stream of users who were never served would go before one who was, for ever, but for ageing."""
    scheduler, runner = make_scheduler(max_num_seqs=1, fair_share=True, priority_ageing_s=20.0), HashRunner(64, 4)
    scheduler.add(make_request(user="alice", max_tokens=20))
    for _ in range(20):
        step(scheduler, runner)
    scheduler.add(make_request(user="fresh", max_tokens=1))
    patient = make_request(user="alice", max_tokens=2)
    scheduler.add(patient, now=0.0)
    for now in range(100):
        scheduler.add(make_request(user=f"fresh {now}", max_tokens=1), float(now))
        scheduler.update(output := scheduler.schedule(float(now)), runner.execute(output))
        if scheduler.find(patient.request_id) is None:
            break
    assert scheduler.find(patient.request_id) is None
    assert now >= 20


def test_of_users_who_were_given_the_same_the_first_to_arrive_comes_next() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=1, fair_share=True), HashRunner(64, 4)
    requests = [make_request(user=user) for user in ("zed", "ann", "moe")]
    for request in requests:
        scheduler.add(request)
    assert order_of_service(scheduler, runner) == ids(*requests)


def test_users_who_come_once_are_forgotten() -> None:
    scheduler, runner = make_scheduler(fair_share=True), HashRunner(64, 4)
    for number in range(MAX_IDLE_USERS + 500):
        scheduler.add(make_request(user=str(number), max_tokens=1))
        step(scheduler, runner)
    order = scheduler._waiting._orders[2]
    assert isinstance(order, FairOrder)
    assert len(order._service) <= MAX_IDLE_USERS + 1
    assert len(order._heap) <= 1


def test_an_urgent_prompt_goes_before_a_long_one_that_is_less_urgent() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=8, priority_ageing_s=None), HashRunner(64, 4)
    scheduler.add(make_request(range(60), priority=3))
    step(scheduler, runner)
    urgent = make_request([7, 8, 9], priority=1)
    scheduler.add(urgent)
    output = step(scheduler, runner)
    assert {row.request_id: len(row.token_ids) for row in output.rows}[urgent.request_id] == 3
    assert output.num_tokens == 8


def test_blocks_that_only_the_victims_share_are_freed_with_them() -> None:
    scheduler, runner = make_scheduler(10, max_num_seqs=4, priority_ageing_s=None), HashRunner(10, 4)
    shared = list(range(24))
    low = [make_request([*shared, number], 8, priority=3) for number in range(2)]
    scheduler.add(low[0])
    step(scheduler, runner)
    scheduler.add(low[1])
    step(scheduler, runner)
    urgent = make_request([50] * 30, 4, priority=1)
    scheduler.add(urgent)
    output = step(scheduler, runner)
    assert set(output.preempted_request_ids) == set(ids(*low))
    assert urgent.request_id in output.admitted_request_ids


def test_nobody_is_driven_out_in_the_step_in_which_he_joined() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=1, fair_share=True, priority_ageing_s=10.0), HashRunner(64, 4)
    for now in range(0, 60, 3):
        scheduler.add(make_request(user=str(now), priority=1 + now % 3, max_tokens=5), float(now))
        output = scheduler.schedule(float(now))
        assert not set(output.admitted_request_ids) & set(output.preempted_request_ids)
        scheduler.update(output, runner.execute(output))


def test_a_retry_hint_speaks_of_the_last_minute() -> None:
    pace = Pace()
    for now in (0.0, 1.0):
        pace.note_end(now)
    assert pace.retry_hint(now=2.0).endswith("retry after 2 s")
    assert pace.retry_hint(now=86400.0) == "try again later"
