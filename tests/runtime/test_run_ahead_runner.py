"""The real runner, its kernels in the interpreter: steps launched ahead give the tokens of steps taken in turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from noria.config import EngineConfig
from noria.engine.engine import Engine
from noria.engine.metrics import StatsCounter
from noria.engine.outputs import EngineStats
from noria.models.decoder import Decoder
from noria.runtime.build import build_runner
from noria.runtime.cuda_graphs import DecodeGraphs
from noria.runtime.model_runner import ModelRunner
from noria.sampling_params import SamplingParams
from noria.scheduler_output import (
    PLACEHOLDER,
    PendingStep,
    SampledToken,
    SamplingInput,
    ScheduledSequence,
    SchedulerOutput,
    StepResult,
)
from noria.scheduling.build import build_scheduler
from noria.sequence import Request
from support.byte_tokenizer import ByteTokenizer
from support.quick_interpreter import quick_interpreter  # noqa: F401
from support.tiny_models import tiny_model_dir

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in:RuntimeWarning"),
]

CONFIG = EngineConfig(
    device="cpu",
    kernels="triton",
    num_threads=1,
    block_size=16,
    num_kv_blocks=3,
    max_num_seqs=3,
    preemption="swap",
    num_host_blocks=4,
    admission_headroom=0.0,
)


# the three come to five blocks together
MAX_TOKENS = (8, 16, 5)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # the smallest heads that the kernels know
    return tiny_model_dir(
        tmp_path_factory.mktemp("model"), "llama", head_dim=64, num_attention_heads=2, num_key_value_heads=1
    )


class CountingRunner:
    """num_placeholders: tokens that the host did not know."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_placeholders = 0

    def execute(self, output: SchedulerOutput) -> StepResult:
        raise AssertionError("steps are to be submitted")

    def submit(self, output: SchedulerOutput) -> PendingStep:
        self.num_placeholders += sum(row.token_ids[-1] == PLACEHOLDER for row in output.rows)
        return self._runner.submit(output)


def answers(model_dir: Path, is_ahead: bool) -> tuple[dict[int, list[SampledToken]], int, EngineStats]:
    """Tokens of each request, how many placeholders were filled in, and what it took."""
    runner = build_runner(CONFIG, model_dir)
    assert runner.can_run_ahead
    ahead = CountingRunner(runner)
    scheduler = build_scheduler(CONFIG, runner.cache.num_blocks, runner.num_host_blocks)
    counter = StatsCounter(runner.cache.num_blocks, CONFIG.block_size)
    engine = Engine(scheduler, runner, ByteTokenizer(), counter, ahead=ahead if is_ahead else None)
    prompts = ((5, 6, 7, 8) * 3, (9, 10), (5, 6, 7, 8) * 3 + (3,))
    kinds = ({"temperature": 0.0}, {"logprobs": 2}, {"top_p": 0.8, "top_k": 40})
    for index, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True)):
        params = SamplingParams(max_tokens=MAX_TOKENS[index], **kind)  # type: ignore[arg-type]
        engine.add(Request(index, prompt, params, seed=40 + index))
    tokens: dict[int, list[SampledToken]] = {index: [] for index in range(len(prompts))}
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        for output in engine.take_outputs():
            assert output.error is None
            tokens[output.request_id] += output.tokens
    return tokens, ahead.num_placeholders, engine.stats()


@pytest.mark.slow
def test_the_same_tokens_as_in_turn(model_dir: Path) -> None:
    in_turn, no_placeholders, _ = answers(model_dir, is_ahead=False)
    ahead, num_placeholders, stats = answers(model_dir, is_ahead=True)
    assert ahead == in_turn
    assert tuple(len(tokens) for tokens in ahead.values()) == MAX_TOKENS
    assert (no_placeholders, num_placeholders > 15) == (0, True)
    assert stats.num_swap_outs > 0
    assert len({token.token_id for token in ahead[0]}) > 4


def row(request_id: int, token_ids: list[int], start: int) -> ScheduledSequence:
    sampling = SamplingInput(SamplingParams(temperature=0), seed=0, position=start + len(token_ids))
    return ScheduledSequence(request_id, token_ids, start, [request_id], sampling)


def step(*rows: ScheduledSequence) -> SchedulerOutput:
    return SchedulerOutput(step=1, rows=rows)


def test_placeholders_are_of_the_requests_that_they_stand_for(model_dir: Path) -> None:
    """The rows stand in another order than in the step before, and one has known tokens before its placeholder."""
    runner = build_runner(CONFIG, model_dir)
    first = runner.execute(step(row(0, [5, 6], 0), row(1, [7], 0), row(2, [8, 9, 3], 0)))
    drawn = {request_id: token.token_id for request_id, token in first.items() if isinstance(token, SampledToken)}
    assert len(set(drawn.values())) == 3
    expected = runner.execute(step(row(2, [8, 9, 3, drawn[2]], 0), row(0, [drawn[0]], 2), row(1, [drawn[1]], 1)))
    runner.execute(step(row(0, [5, 6], 0), row(1, [7], 0), row(2, [8, 9, 3], 0)))
    rows = row(2, [8, 9, 3, PLACEHOLDER], 0), row(0, [PLACEHOLDER], 2), row(1, [PLACEHOLDER], 1)
    assert runner.execute(step(*rows)) == expected


class EagerGraph:
    """Computes anew at each replay, from and to the same places."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self.output = compute()
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.output.copy_(self._compute())


def test_placeholders_in_a_graph(model_dir: Path) -> None:
    """What is written over the graph's inputs after the copy, before the replay."""
    runner = build_runner(CONFIG, model_dir)
    first = step(row(0, [5, 6], 0), row(1, [7, 4, 2], 0), row(2, [8, 9, 3], 0))
    drawn = {request_id: token.token_id for request_id, token in runner.execute(first).items()}  # type: ignore[union-attr]
    expected = runner.execute(step(row(2, [drawn[2]], 3), row(0, [drawn[0]], 2), row(1, [50], 3)))
    graphs: list[EagerGraph] = []

    def capture(compute: Callable[[], Tensor]) -> EagerGraph:
        graphs.append(EagerGraph(compute))
        return graphs[-1]

    assert isinstance(runner.decoder, Decoder)
    runner.graphs = DecodeGraphs(runner.decoder, runner.cache, (4,), capture)
    runner.execute(first)
    rows = row(2, [PLACEHOLDER], 3), row(0, [PLACEHOLDER], 2), row(1, [50], 3)
    assert runner.execute(step(*rows)) == expected
    assert [graph.num_replays for graph in graphs] == [1]


def test_a_placeholder_of_nobody_who_was_drawn_is_an_error(model_dir: Path) -> None:
    runner = build_runner(CONFIG, model_dir)
    with pytest.raises(ValueError, match=r"no token for the requests \[1\]"):
        runner.execute(step(row(1, [PLACEHOLDER], 1)))
    runner.execute(step(row(0, [5], 0)))
    with pytest.raises(ValueError, match=r"no token for the requests \[1\]"):
        runner.execute(step(row(0, [PLACEHOLDER], 1), row(1, [PLACEHOLDER], 1)))


def test_other_kernels_wait_for_each_step(model_dir: Path) -> None:
    assert not build_runner(EngineConfig(device="cpu", num_kv_blocks=4, num_threads=1), model_dir).can_run_ahead
