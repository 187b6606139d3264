"""The client is usable where Noria's server package is not: it never imports it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import noria_client.client

FILES = sorted(Path(noria_client.client.__file__).parent.glob("*.py"))


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
