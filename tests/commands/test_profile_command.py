"""`noria profile`: what it prints and writes, and what it says of mistakes. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from noria.cli import main
from noria.kernels.cpu_library import STAGES, find_libraries
from noria.profiling.profiler import OTHER_PARTS, TORCH_PARTS
from support.tiny_models import tiny_model_dir

CASES = ["1 sequence", "3 sequences", "prefill 24"]
KERNELS = [
    pytest.param("cpu", marks=pytest.mark.skipif(not find_libraries(), reason="the CPU kernels were not built")),
    "torch",
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_figure_is_there(
    kernels: str, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    engine = [f"kernels={kernels}", "num_kv_blocks=64", "num_threads=1"]
    arguments = ["--model", str(model_dir), *(word for text in engine for word in ("--engine", text))]
    arguments += ["--batch", "1,3,1", "--context", "20", "--prefill", "24", "--seconds", "0.01", "--json", str(path)]
    assert main(["profile", *arguments]) == 0
    out = capsys.readouterr().out
    parts = [*(STAGES if kernels == "cpu" else TORCH_PARTS), *OTHER_PARTS]
    for words in ("num_threads 1", "weights float32", "KV float32, 512 bytes a token", "GB/s", "others took", *parts):
        assert words in out
    # a row in each of the two tables
    assert [out.count(name) for name in CASES] == [2, 2, 2]

    content = json.loads(path.read_text())
    assert content["command"][:2] == ["noria", "profile"]
    assert content["machine"]["num_cores"] >= 1
    assert content["busy_cores_before"] >= 0
    assert content["weights"] == {
        "dtype": "float32",
        "head_dtype": "float32",
        "bytes_per_step": (61440 + 304 * 64) * 4,
    }
    assert [case["name"] for case in content["cases"]] == CASES
    for case in content["cases"]:
        step, limits = case["step"], content["limits"]
        assert step["floor_ms"] == max(step["read_ms"], step["compute_ms"]) > 0
        assert step["read_ms"] == pytest.approx(step["bytes_read"] / limits["read_bytes_per_s"] * 1e3)
        assert step["ratio"] == pytest.approx(step["median_ms"] / step["floor_ms"])
        assert step["fastest_ratio"] == pytest.approx(step["fastest_ms"] / step["floor_ms"])
        assert list(case["parts"])[: len(parts)] == parts
        floors = [case["parts"][part] for part in ("linear", "head", "attention")]
        assert step["bytes_read"] == sum(part["bytes_read"] for part in floors)
        # they are known either way; what they took, of the compiled kernels alone
        assert all(("ratio" in part) == (kernels == "cpu") for part in floors)
        for run in case["runs"]:
            assert sum(run["parts_ms"].values()) == pytest.approx(run["step_ms"])
            assert list(run["parts_ms"]) == parts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "1,two"], "--batch must be numbers of sequences as in 1,4,8, not '1,two'"),
        (["--batch", "0"], "--batch must be"),
        (["--context", "-1"], "--context must be at least 0, not -1"),
        (["--prefill", "-1"], "--prefill must be at least 0"),
        (["--temperature", "-0.1"], "--temperature must be at least 0"),
        (["--seconds", "0"], "--seconds must be above 0, not 0"),
        (["--json", "/proc/none/profile.json"], "--json /proc/none/profile.json cannot be written"),
        (["--engine", "max_seqs=8"], "max_seqs"),
    ],
)
def test_mistakes_are_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_a_prompt_may_be_left_out(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(model_dir), "--engine", "num_kv_blocks=64", "--context", "0", "--seconds", "0.01"]
    assert main(["profile", *arguments, "--batch", "2", "--prefill", "0"]) == 0
    assert "prefill" not in capsys.readouterr().out
