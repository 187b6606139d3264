"""The client is usable where Noria's server package is not: it never imports it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import noria_bench.load
import noria_client.client

FOLDERS = [Path(module.__file__).parent for module in (noria_client.client, noria_bench.load)]
FILES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return modules


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_imports_nothing_of_the_server_package(path: Path) -> None:
    heads = {module.split(".")[0] for module in imported_modules(path)}
    assert not heads & {"noria", "torch", "transformers", "triton_python_backend_utils"}
