"""Which batches Triton would form."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from noria.config import EngineConfig
from noria.simulation.batch_former import BatchFormer, DynamicBatching, dynamic_batching_for

CONFIGS = Path(__file__).parents[2] / "model_repository/llm/configs"


def former_with(num_pending: int, settings: DynamicBatching) -> BatchFormer[int]:
    former: BatchFormer[int] = BatchFormer(settings)
    for item in range(num_pending):
        former.add(item, now=10.0)
    return former


def test_the_largest_preferred_size_goes_at_once() -> None:
    settings = DynamicBatching(8, (2, 4), 1.0)
    assert former_with(3, settings).take(10.0) == [0, 1]
    assert former_with(7, settings).take(10.0) == [0, 1, 2, 3]
    assert former_with(7, settings).due_s == -math.inf


def test_less_waits_until_the_oldest_has_waited_the_delay() -> None:
    former = former_with(1, DynamicBatching(8, (4,), 0.5))
    former.add(1, now=10.25)
    assert former.due_s == 10.5
    assert former.take(10.375) == []
    assert former.take(10.5) == [0, 1]
    assert former.due_s == math.inf
    assert former.take(20.0) == []


def test_after_the_delay_all_that_waits_goes_up_to_the_largest_batch() -> None:
    former = former_with(14, DynamicBatching(8, (4,), 0.5))
    assert former.take(60.0) == list(range(8))
    assert former.take(60.0) == list(range(8, 14))


def test_without_preferred_sizes_and_delay_everything_goes_at_once() -> None:
    assert former_with(3, DynamicBatching(8)).take(10.0) == [0, 1, 2]


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_the_values_are_those_of_the_model_repository(mode: str) -> None:
    text = (CONFIGS / f"{mode}.pbtxt").read_text()
    size, preferred, delay = (
        re.findall(r"\d+", text[text.index(f"{name}:") :].splitlines()[0])
        for name in ("max_batch_size", "preferred_batch_size", "max_queue_delay_microseconds")
    )
    config = EngineConfig(batching_mode=mode, max_num_seqs=int(size[0]))
    assert dynamic_batching_for(config) == DynamicBatching(
        int(size[0]), tuple(map(int, preferred)), int(delay[0]) / 1e6
    )


def test_what_triton_would_refuse_is_refused() -> None:
    with pytest.raises(ValueError, match="preferred_batch_sizes must be from 1 to 8, not 9"):
        DynamicBatching(8, (4, 9))
    with pytest.raises(ValueError, match="max_batch_size"):
        DynamicBatching(0)
    with pytest.raises(ValueError, match="max_queue_delay_s"):
        DynamicBatching(8, (), -1.0)
