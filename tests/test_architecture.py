"""Imports go one way. An arrow that runs against the layers fails here, and so does a top-level import of too much."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "backend_src" / "noria"
CONTRACTS = {
    *("errors", "presets", "config", "config_sources", "kernel_settings"),
    *("sampling_params", "sequence", "scheduler_output"),
}
# layer: the layers that it may import
ALLOWED = {
    "errors": set(),
    "sampling_params": {"errors"},
    "kernel_settings": {"errors"},
    "config": {"errors", "kernel_settings", "presets"},
    "config_sources": {"config", "errors", "presets"},
    "presets": set(),
    "sequence": {"sampling_params", "errors"},
    "scheduler_output": {"sampling_params"},
    "kernels": set(),
    "models": {"kernels", *CONTRACTS},
    "runtime": {"models", "kernels", *CONTRACTS},
    "scheduling": CONTRACTS,
    "simulation": {"scheduling", *CONTRACTS},
    "engine": {"runtime", "models", "scheduling", *CONTRACTS},
    "serving": {"engine", *CONTRACTS},
    "timeline": {"engine", *CONTRACTS},
    # the command line: starts servers, and converts a model before one starts
    "commands": {
        *("serving", "models", "offline", "timeline", "simulation", "calibration", "recorded_costs", "profiling"),
        *CONTRACTS,
    },
    # the two that know both the real engine and the simulated one
    "calibration": {"engine", "runtime", "models", "scheduling", "simulation", *CONTRACTS},
    "profiling": {"calibration", "engine", "runtime", "models", "kernels", *CONTRACTS},
    "recorded_costs": {"timeline", "simulation", *CONTRACTS},
    "cli": {"commands", "errors"},
    "offline": {"engine", *CONTRACTS},
}
FILES = sorted(SOURCE.rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "__init__.py"], ids=lambda path: path.stem)
def test_imports_go_one_way(path: Path) -> None:
    layer = layer_of(path)
    for module in imported_modules(path):
        if module.startswith("noria."):
            target = module.split(".")[1]
            assert target == layer or target in ALLOWED[layer], f"{layer} must not import {module}"
        if module.startswith("triton_python_backend_utils"):
            assert layer == "serving"
        if module.startswith("noria_client"):
            assert layer in ("cli", "commands", "offline")
        if module.startswith("noria_bench"):
            # the definitions of what is measured are the simulator's too
            assert layer in ("cli", "commands", "offline", "simulation", "calibration", "recorded_costs")


def test_scheduling_needs_the_standard_library_only_and_no_thread_or_clock() -> None:
    allowed = {"__future__", "array", "collections", "dataclasses", "hashlib", "heapq", "noria", "sys", "typing"}
    for path in SOURCE.glob("scheduling/*.py"):
        assert {module.split(".")[0] for module in imported_modules(path)} <= allowed, path


def test_packages_import_nothing() -> None:
    assert all(not path.read_text() for path in SOURCE.rglob("__init__.py"))


def test_the_size_of_files() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    assert {path.name: length for path, length in lengths.items() if length > 300} == {}


def test_the_entry_point_stays_small() -> None:
    assert len((SOURCE.parents[1] / "model_repository/llm/1/model.py").read_text().splitlines()) < 120
