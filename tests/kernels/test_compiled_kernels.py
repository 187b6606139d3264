"""Every Triton kernel compiles for each GPU it is meant for: `noria.kernels.compile_report`, in a process of its own.

No GPU is needed. `pytest -s` shows the report's table.
"""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from noria.kernels import compile_report
from noria.kernels.compile_cases import all_cases
from noria.kernels.compile_report import ATTENTION_KERNELS, CompiledCase
from noria.kernels.language import CAPABILITIES
from noria.kernels.offline_compile import MAX_SHARED_BYTES

# one of each of the kernels' launchers
KERNELS = {
    *ATTENTION_KERNELS,
    *("_rms_norm_kernel", "_swiglu_kernel", "_rotation_kernel", "_rope_kv_write_kernel"),
    *("_copy_blocks_kernel", "_move_blocks_kernel"),
    *("_penalise_kernel", "_maxima_kernel", "_sums_kernel", "_draw_kernel", "_logprobs_kernel"),
    *("matmul_kernel", "few_rows_kernel", "sum_splits_kernel"),
}
# of the matrix instructions of the Ampere, Hopper and Blackwell generations
WIDEST_MATRIX = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}


def report(path, *options):
    """Exit status and rows. Nothing is taken from what was compiled before."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "noria.kernels.compile_report", "--json", path / "report.json", *options]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    print(run.stdout)
    return run.returncode, json.loads((path / "report.json").read_text())


def check(rows):
    for row in rows:
        case = f"{row['capability']} {row['case']}: {row['kernel']}"
        assert row["shared_bytes"] <= MAX_SHARED_BYTES[row["capability"]], case
        if row["kernel"] in ATTENTION_KERNELS:
            assert row["stack_bytes"] == 0, case
        if row["kernel"] in ("_decode_kernel", "_prefill_kernel"):
            check_attention(row, case)


def check_attention(row, case):
    words = row["case"].split()
    is_quantised = not {"int8", "fp8"}.isdisjoint(words)
    loads = {int(size): count for size, count in row["loads"].items()}
    assert set(loads) <= ({4, 8, 16} if is_quantised else {4, 16}), case
    instructions, widest = set(row["matrix_instructions"]), WIDEST_MATRIX[row["capability"]]
    if "fp32" in words:
        assert not instructions, case
    elif is_quantised:
        # whose tiles may be too small for the widest
        assert instructions in ({"HMMA"}, {widest}), case
    else:
        is_wide = row["kernel"] == "_prefill_kernel" and "deterministic" not in words
        assert instructions == {widest if is_wide else "HMMA"}, case
        # 4 bytes are the id of a block, or one of the numbers that a row has. Were keys or values read by 4 bytes, each
        # 16 of the other's would have four of these beside them
        assert loads[4] < 2 * loads[16], case


@pytest.mark.slow
def test_every_kernel_at_every_tile_for_one_generation(tmp_path):
    """Minutes: the others at every tile are `python -m noria.kernels.compile_report`."""
    status, rows = report(tmp_path, "--capability", "90")
    assert status == 0
    check(rows)
    assert {row["kernel"] for row in rows} == KERNELS
    listed = {row["case"] for row in rows if "attention" in row["case"]}
    assert listed == {case.name for case in all_cases().values() if "attention" in case.name}


@pytest.mark.slow
def test_attention_for_every_generation(tmp_path):
    status, rows = report(tmp_path, "--essential")
    assert status == 0
    check(rows)
    for capability in CAPABILITIES:
        assert {"_decode_kernel", "_prefill_kernel"} <= {
            row["kernel"] for row in rows if row["capability"] == capability
        }


ROW = CompiledCase(
    capability=90,
    case="attention",
    kernel="_decode_kernel",
    num_warps=4,
    registers=255,
    stack_bytes=0,
    shared_bytes=MAX_SHARED_BYTES[90],
    matrix_instructions={"HMMA": 8},
    loads={4: 1, 16: 8},
    digest="0",
)
SPILLED = dataclasses.replace(ROW, stack_bytes=8, digest="1")
OTHER_SPILLED = dataclasses.replace(SPILLED, kernel="_draw_kernel")
TOO_LARGE = dataclasses.replace(OTHER_SPILLED, shared_bytes=MAX_SHARED_BYTES[90] + 1)


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [
        ([ROW, OTHER_SPILLED], None),
        ([ROW, SPILLED], "90 attention: _decode_kernel: 8 bytes of registers are spilled"),
        ([TOO_LARGE], "90 attention: _draw_kernel: 232449 bytes of shared memory, of 232448"),
        ("CompilationError: no such thing", "90 attention: CompilationError: no such thing"),
    ],
)
def test_a_fault_shows_in_the_status(outcome, fault, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(compile_report, "IS_INTERPRETED", False)
    monkeypatch.setattr(compile_report, "compile_all", lambda *_: iter([(90, "attention", outcome)]))
    assert compile_report.main(["--json", str(tmp_path / "report.json")]) == (0 if fault is None else 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == (fault or "2 kernels, 0 faults")


def test_the_interpreter_compiles_nothing(monkeypatch):
    monkeypatch.setattr(compile_report, "IS_INTERPRETED", True)
    with pytest.raises(SystemExit, match="TRITON_INTERPRET must not be set"):
        compile_report.main([])
