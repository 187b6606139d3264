"""Triton's interpreter, twice as fast for kernels that call many functions."""

from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test module to import. The interpreter patches the language at each launch and at each call of a function.

    At calls it is needed once, for tl.core, which functions of Triton's own library see, and which stays patched.
    """
    is_core_patched = False

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_core_patched
        if not is_core_patched and tl.core in self.fn.__globals__.values():
            interpreter._patch_lang(self.fn)
            is_core_patched = True
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
