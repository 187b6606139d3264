"""benchmarks/accuracy.py on a tiny random model: its figures against what can be worked out otherwise."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from noria.config_sources import load_engine_config
from noria.kernels.cpu_library import find_libraries
from noria.runtime.build import build_runner
from noria.runtime.model_runner import ModelRunner
from support.tiny_models import VOCAB_SIZE, tiny_model, tiny_model_dir

# where `python benchmarks/accuracy.py` finds its other files
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import accuracy
import accuracy_scoring as scoring
from accuracy_scoring import Answer

needs_cpu_kernels = pytest.mark.skipif(not find_libraries(), reason="the CPU kernels were not built")
PROMPTS = ([0, 17, 40, 99], [0, 5], [0, *range(60, 80)])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return torch_runner(model_dir)


def torch_runner(model_dir: Path) -> ModelRunner:
    options = {"device": "cpu", "kernels": "torch", "num_kv_blocks": "64", "num_threads": "1"}
    return build_runner(load_engine_config(None, options), model_dir)


def random_tokens(count: int) -> list[int]:
    return torch.randint(4, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.inference_mode()
def logits_of_transformers(token_ids: Sequence[int]) -> torch.Tensor:
    return tiny_model("llama")(torch.tensor([list(token_ids)])).logits[0]


def test_windows_hold_every_token_once_and_none_that_nothing_precedes() -> None:
    assert scoring.windows(range(10), 4) == [range(4), range(4, 8), range(8, 10)]
    assert scoring.windows(range(9), 4) == [range(4), range(4, 8)]


def test_the_cache_holds_a_window_or_all_answers() -> None:
    assert scoring.num_blocks_for(512, [[1] * 5], max_answer_tokens=64, block_size=16) == 32
    assert scoring.num_blocks_for(32, [[1] * 5, [1] * 16], max_answer_tokens=16, block_size=16) == 4


def test_log_probs_in_chunks_are_those_of_transformers_in_one_pass(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = random_tokens(50)
    expected = logits_of_transformers(token_ids).log_softmax(-1)
    for chunk in (7, 49, 256):
        monkeypatch.setattr(scoring, "CHUNK_TOKENS", chunk)
        for first in (0, 13, 48):
            pieces = list(scoring.log_probs(runner, token_ids, first))
            torch.testing.assert_close(torch.cat(pieces), expected[first:-1], atol=1e-4, rtol=1e-4)


def test_perplexity_and_divergence_are_those_of_torchs_functions(runner: ModelRunner) -> None:
    texts = [random_tokens(300), random_tokens(20)]
    own = [list(scoring.log_probs(runner, text)) for text in texts]
    # another model than the one that is compared
    shifted = [[(2 * piece).log_softmax(-1) for piece in pieces] for pieces in own]
    found = scoring.compare_text(texts, own, shifted)
    q, p = (torch.cat([piece for pieces in both for piece in pieces]).double() for both in (own, shifted))
    targets = torch.tensor([token for text in texts for token in text[1:]])
    loss, expected_loss = functional.nll_loss(q, targets), functional.nll_loss(p, targets)
    assert found.num_predicted == 299 + 19
    assert found.perplexity == pytest.approx(loss.exp().item(), rel=1e-5)
    assert found.log_ratio == pytest.approx((loss - expected_loss).item(), rel=1e-5)
    assert found.kl == pytest.approx(functional.kl_div(q, p, reduction="batchmean", log_target=True).item(), rel=1e-4)
    assert 0 < found.kl_error < found.kl


def test_greedy_answers_are_the_likeliest_tokens_up_to_an_end(runner: ModelRunner) -> None:
    answers = scoring.greedy_answers(runner, PROMPTS, 12, end_token_ids=())
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer.token_ids) == 12
        logits = logits_of_transformers([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        assert list(answer.token_ids) == logits.argmax(-1).tolist()
        assert scoring.forced_choices(runner, answer) == list(answer.token_ids)
    end = answers[0].token_ids[3]
    ended = scoring.greedy_answers(runner, PROMPTS, 12, end_token_ids={end})
    for answer, shorter in zip(answers, ended, strict=True):
        length = answer.token_ids.index(end) + 1 if end in answer.token_ids else 12
        assert shorter.token_ids == answer.token_ids[:length]


def test_forced_choices_follow_the_given_answer_and_not_the_runners_own(runner: ModelRunner) -> None:
    answer = Answer(tuple(PROMPTS[0]), tuple(random_tokens(9)))
    logits = logits_of_transformers([*answer.prompt_token_ids, *answer.token_ids])
    expected = logits[len(PROMPTS[0]) - 1 : -1].argmax(-1).tolist()
    assert scoring.forced_choices(runner, answer) == expected != list(answer.token_ids)


def test_agreement_by_hand() -> None:
    reference = [Answer((1,), (5, 6, 7, 8)), Answer((2,), (5, 6))]
    own = [Answer((1,), (5, 6, 9, 8)), Answer((2,), (5, 6))]
    found = scoring.compare_answers(reference, forced=[[5, 6, 7, 0], [5, 6]], own=own)
    assert found.num_positions == 6
    assert found.forced_share == 5 / 6
    assert found.mean_equal_tokens == (2 + 2) / 2
    assert found.mean_tokens == 3
    assert found.equal_share == 1 / 2
    # one that goes on after the other's end is not equal
    assert scoring.num_equal_tokens((5, 6, 7), (5, 6)) == 2
    longer = scoring.compare_answers(reference[1:], [[5, 6]], [Answer((2,), (5, 6, 1))])
    assert (longer.mean_equal_tokens, longer.equal_share) == (2, 0)


@needs_cpu_kernels
def test_the_command_tells_what_rounding_costs(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "ANSWER_TOKENS", 8)
    monkeypatch.setattr(accuracy, "PROMPTS", accuracy.PROMPTS[:6])
    text, output = tmp_path / "text.txt", tmp_path / "accuracy.json"
    text.write_text("The mill turns, and the river gives what the wheel can carry. " * 12)
    variants = ("float32:kernels=cpu", "rounded:weight_quantization=int8,kv_cache_dtype=int8")
    options = [word for variant in variants for word in ("--variant", variant)]
    assert accuracy.main(["--model", str(model_dir), "--text", str(text), "--output", str(output), *options]) == 0
    record = json.loads(output.read_text())
    reference, exact, rounded = record["results"]
    assert [one["name"] for one in record["results"]] == ["float32-torch", "float32", "rounded"]
    assert record["machine"]["packages"]["torch"]
    assert reference["text"]["kl"] == 0
    assert reference["answers"]["equal_share"] == exact["answers"]["equal_share"] == 1
    assert exact["text"]["kl"] < 1e-5 < rounded["text"]["kl"]
    assert exact["text"]["perplexity"] == pytest.approx(reference["text"]["perplexity"], rel=1e-4)
    assert rounded["weight_bytes"] < exact["weight_bytes"]
    # keys and values of 2 layers and 2 heads: 16 numbers in 4 bytes each, or in one byte each with a scale of 4
    assert (exact["kv_bytes_per_token"], rounded["kv_bytes_per_token"]) == (2 * 2 * 2 * 64, 2 * 2 * 2 * 20)
    table = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| float32-torch", "| float32", "| rounded"]
    assert len({line.count("|") for line in table}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "no-equals:kernels"], "must be NAME:KEY=VALUE"),
        (["--variant", ":kernels=cpu"], "must be NAME:KEY=VALUE"),
        (["--variant", "wrong:kernel=cpu"], "unknown key 'kernel'"),
        (["--variant", "other:model=embedded"], "model is the same for all variants"),
        (["--variant", "float32-torch:kernels=cpu"], "names must differ"),
        (["--text", "/there/is/no.txt"], "no.txt"),
    ],
)
def test_a_mistake_is_told_before_anything_is_computed(arguments: list[str], message: str, model_dir: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        accuracy.main(["--model", str(model_dir), *arguments])


def test_a_text_of_one_token_is_refused(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("")
    with pytest.raises(SystemExit, match="at least three tokens"):
        accuracy.main(["--model", str(model_dir), "--text", str(path)])


def test_standard_errors_shrink_with_the_text() -> None:
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randn(200, 8, generator=generator).log_softmax(-1) for _ in range(2)]
    token_ids = [0] * 201
    one = scoring.compare_text([token_ids], [pieces[:1]], [pieces[1:]])
    four = scoring.compare_text([token_ids] * 4, [pieces[:1]] * 4, [pieces[1:]] * 4)
    assert four.log_ratio == pytest.approx(one.log_ratio)
    assert four.log_ratio_error == pytest.approx(one.log_ratio_error / 2 * math.sqrt(4 * 199 / (4 * 200 - 1)), rel=1e-9)
