"""`benchmarks/peers.py`: its workload, its table, and that a peer which cannot be had is said and not left out."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMAND = BENCHMARKS / "peers.py"
sys.path.insert(0, str(BENCHMARKS))

from peers.installing import InstallError, install, python_of, reason  # noqa: E402
from peers.protocol import (  # noqa: E402
    Answer,
    PeerRequest,
    PeerWorkload,
    Task,
    measure,
    measure_singles,
    read_workload,
)
from peers.registry import CLEARED, PEERS, PeerSpec, noria_variant, variables, with_variables  # noqa: E402
from peers.running import run_peer  # noqa: E402
from peers.summary import markdown, ratio  # noqa: E402
from peers.workload import FIRST_TOKEN_ID, make_workload, write_workload  # noqa: E402

from noria_bench.errors import BenchError  # noqa: E402
from noria_bench.workload import seed_workload  # noqa: E402

VOCAB_SIZE = 1000
STEP_S = 0.001


class StepPeer:
    """Gives each running request a token every STEP_S."""

    settings: dict[str, Any] = {"dtype": "none"}  # noqa: RUF012

    def __init__(self, num_missing: int = 0) -> None:
        self._num_missing = num_missing

    def generate(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        answers = [Answer([], []) for _ in requests]
        for step in range(max(request.max_tokens for request in requests) - self._num_missing):
            time.sleep(STEP_S)
            for request, answer in zip(requests, answers, strict=True):
                if step < request.max_tokens:
                    answer.token_ids.append(step)
                    answer.times_s.append(time.perf_counter())
        return answers

    def close(self) -> None: ...


def run_record(peer: str, repeat: int, tokens_per_s: float, **values: Any) -> dict[str, Any]:
    return {
        **{"peer": peer, "repeat": repeat, "slots": 16, "output_tokens_per_s": tokens_per_s, "ttft_median_s": 1.0},
        **{"icl_median_s": 0.05, "versions": {peer: "1.0"}, "settings": {"dtype": "float32"}, "variables": {}},
        **{"busy_cores_before": 0.1, "busy_cores_after": 0.3, **values},
    }


def test_the_workload_has_the_seed_mix_s_lengths_and_survives_its_file(tmp_path: Path) -> None:
    workload = make_workload(VOCAB_SIZE, 32, seed=3)
    lengths = [(len(request.prompt_token_ids), request.max_tokens) for request in workload.requests]
    assert lengths == [(item.num_prompt_tokens, item.max_tokens) for item in seed_workload(32, seed=3).items]
    assert sorted(length for _, length in lengths) == [20] * 8 + [50] * 8 + [100] * 8 + [500] * 8
    assert len(workload.single.prompt_token_ids) == workload.single.max_tokens == 64
    assert [(len(request.prompt_token_ids), request.max_tokens) for request in workload.prefills] == [(512, 1)] * 5
    every = (*workload.requests, workload.single, *workload.prefills)
    assert all(FIRST_TOKEN_ID <= token < VOCAB_SIZE for request in every for token in request.prompt_token_ids)
    assert len({request.prompt_token_ids for request in every}) == len(every)
    assert make_workload(VOCAB_SIZE, 32, seed=3) == workload != make_workload(VOCAB_SIZE, 32, seed=4)

    write_workload(tmp_path / "workload.json", workload, seed=3)
    assert read_workload(tmp_path / "workload.json") == workload


def test_outputs_and_prompts_scale_apart() -> None:
    whole, scaled = make_workload(VOCAB_SIZE, 8), make_workload(VOCAB_SIZE, 8, scale=0.1, prompt_scale=0.001)
    assert [one.max_tokens for one in scaled.requests] == [one.max_tokens // 10 for one in whole.requests]
    assert {len(one.prompt_token_ids) for one in scaled.requests} == {1}
    assert scaled.max_model_len == 513


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"scale": 0}, "scale must be a finite number above 0, not 0"),
        ({"prompt_scale": float("inf")}, "prompt_scale must be a finite number above 0"),
        ({"num_requests": 0}, "num_requests must be at least 1, not 0"),
        ({"vocab_size": 256}, "vocab_size must be above 256"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_workload_that_cannot_be(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchError, match=words):
        make_workload(**{"vocab_size": VOCAB_SIZE, **values})


def test_a_run_is_measured_by_its_tokens_and_their_times() -> None:
    requests = [PeerRequest((1, 2, 3), 5), PeerRequest((4,), 20)]
    measured = measure(StepPeer(), requests)
    assert (measured["num_prompt_tokens"], measured["num_output_tokens"]) == (4, 25)
    assert measured["output_tokens_per_s"] == pytest.approx(25 / measured["seconds"])
    # sleeps are never shorter than asked
    assert measured["seconds"] >= 20 * STEP_S
    assert STEP_S <= measured["icl_median_s"] <= measured["icl_p99_s"] < measured["seconds"]
    assert STEP_S <= measured["ttft_median_s"] < measured["seconds"]
    singles = measure_singles(StepPeer(), PeerWorkload((), PeerRequest((1,), 10), (PeerRequest((1, 2), 1),)))
    # the decode steps alone: nine gaps for ten tokens
    assert 0 < singles["batch1_tokens_per_s"] <= 1 / STEP_S
    assert 0 < singles["prefill_tokens_per_s"] <= 2 / STEP_S


def test_an_answer_that_is_too_short_is_no_result() -> None:
    with pytest.raises(RuntimeError, match="answer 0 has 4 tokens, not 5"):
        measure(StepPeer(num_missing=1), [PeerRequest((1,), 5)])


def test_ratios_are_taken_within_a_repeat() -> None:
    # the machine was twice as fast in the second repeat: the ratio of the medians would be 1.33
    assert ratio({0: 10.0, 1: 20.0, 2: 40.0}, {0: 5.0, 1: 10.0, 2: 30.0}) == 2.0
    # a repeat that one of them lacks counts for nothing
    assert ratio({0: 10.0, 1: 100.0}, {0: 5.0}) == 2.0
    assert ratio({0: 10.0}, {1: 5.0}) is None


def test_the_table_tells_medians_ratios_failures_and_settings() -> None:
    runs = [
        run_record("noria-a", 0, 60.0, batch1_tokens_per_s=20.0),
        run_record("other", 0, 40.0, batch1_tokens_per_s=10.0),
        run_record("noria-a", 1, 90.0),
        run_record("other", 1, 45.0, busy_cores_after=1.25),
        {**run_record("broken", 0, 0.0), "error": "no | luck", "output_tokens_per_s": None},
    ]
    text = markdown(runs, ["noria-a", "other", "broken", "absent"], ["noria-a"], {"absent": "no such package"})
    lines = text.splitlines()
    assert lines[0] == "| peer | slots | useful output tokens/s | TTFT s | ICL ms | noria-a is |"
    assert lines[2] == "| noria-a | 16 | 75.0 (60.0 to 90.0) | 1 | 50 | 1.00 x |"
    assert lines[3] == "| other | 16 | 42.5 (40.0 to 45.0) | 1 | 50 | 1.75 x |"
    assert lines[4] == "| broken | 16 | failed: no \\| luck |  |  |  |"
    assert lines[5] == "| absent |  | not installed: no such package |  |  |  |"
    assert "| other | 10.0 (10.0 to 10.0) | 2.00 x |" in lines
    assert "- other: other 1.0, dtype float32" in lines
    assert lines[-1] == "- others took at most 1.25 cores before or after a run"


def test_a_variant_of_noria_is_a_name_and_keys() -> None:
    spec = noria_variant("int8:weight_quantization=int8,block_size=32")
    assert (spec.name, spec.options) == ("noria-int8", {"weight_quantization": "int8", "block_size": "32"})
    assert noria_variant("float32:").options == noria_variant("float32").options == {}
    for text in (":a=b", "x:a", "x:=b"):
        with pytest.raises(ValueError, match="--noria must be NAME:KEY=VALUE"):
            noria_variant(text)


def test_a_peer_s_variables_can_be_set() -> None:
    (changed, *others) = with_variables(PEERS, [f"{PEERS[0].name}:OMP_WAIT_POLICY=PASSIVE,OMP_NUM_THREADS=1"])
    assert (changed.name, others) == (PEERS[0].name, list(PEERS[1:]))
    found = variables(changed, None, 2)
    assert (found["OMP_WAIT_POLICY"], found["OMP_NUM_THREADS"]) == ("PASSIVE", "1")
    with pytest.raises(ValueError, match=r"there is no 'nobody'; there are transformers-generate, "):
        with_variables(PEERS, ["nobody:A=1"])


def test_what_a_caller_has_set_for_threads_reaches_no_peer() -> None:
    for spec in PEERS:
        own = variables(spec, Path("venv"), 2)
        assert all(name.startswith(CLEARED) or name in ("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM") for name in own)


def test_a_peer_that_cannot_be_installed_says_why(tmp_path: Path) -> None:
    requirements = tmp_path / "absent.txt"
    requirements.write_text("./nowhere-1.0-py3-none-any.whl\n")
    spec = PeerSpec("absent", "absent", requirements)
    with pytest.raises(InstallError, match=r"nowhere-1\.0-py3-none-any\.whl"):
        install(spec, tmp_path / "venvs", lambda words: None)
    # it is tried again the next time: half an installation is not taken for a whole one
    assert python_of(spec, tmp_path / "venvs").exists()
    assert not list((tmp_path / "venvs").rglob("peer-requirements.sha256"))


def test_a_peer_whose_process_fails_is_a_run_with_an_error(tmp_path: Path) -> None:
    task = Task(str(tmp_path / "workload.json"), 4, 2, "", "")
    result = run_peer(PeerSpec("absent", "absent"), task, tmp_path, tmp_path / "log", timeout_s=60)
    assert "No module named peers.absent" in result["error"]
    assert result["busy_cores_before"] >= 0
    assert result["variables"] == {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2"}


def test_the_reason_is_the_log_s_last_error() -> None:
    assert reason("one\nValueError: first\nOSError: last\nbye\n", "nothing") == "OSError: last"
    assert reason("one\nbye\n", "exit code 3") == "bye"
    assert reason("\n", "exit code 3") == "exit code 3"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "nobody"], "there is no 'nobody'; there are noria-float32, transformers-generate"),
        (["--noria", "x:no_such_key=1"], "unknown key 'no_such_key'"),
        (["--noria", "x:", "--noria", "x:"], "names must differ"),
        (["--slots", "0"], "--slots"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("peers_command", COMMAND)
    assert spec is not None
    assert spec.loader is not None
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    with pytest.raises(SystemExit) as ended:
        command.main(["--output", str(tmp_path / "out"), *arguments])
    assert words in f"{ended.value} {capsys.readouterr().err}"
    assert not (tmp_path / "out").exists()
