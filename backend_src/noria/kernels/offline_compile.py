"""Compiles the kernels that a piece of code launches, for a GPU that need not be there, and says what they take.

Launchers are called as ever, on tensors of the device "meta": what is compiled is what would run, with the same
specialisations. Not under the interpreter. Nothing that serves imports this.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# a block's limit, in bytes: CUDA C++ Programming Guide, table of technical specifications by compute capability
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """registers: of one thread. stack_bytes: of one thread, where spilled registers lie. shared_bytes: of one block."""

    name: str
    capability: int
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    cubin: bytes = field(repr=False)

    def disassembly(self) -> str:
        """SASS."""
        return _cuobjdump(self.cubin, "-sass")

    def count(self, pattern: str) -> int:
        """Lines of the disassembly in which the regular expression is found."""
        return sum(bool(re.search(pattern, line)) for line in self.disassembly().splitlines())


class _AbsentGpu:
    """What Triton's driver says of a GPU, for one that is not there."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def recording(capability: int) -> Iterator[list[CompiledKernel]]:
    """Within it launches compile for `capability` (80 is 8.0), run nothing, and add to the list, each kernel once.

    Patches Triton for the whole process: for a process of its own, or a test that runs alone.
    """
    found: list[CompiledKernel] = []
    hashes: set[str] = set()
    launched: set[JITFunction] = set()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self not in launched:
            # Triton keeps what it compiled by the number of the device, whichever GPU that was
            self.device_caches.clear()
            launched.add(self)
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        if compiled.hash not in hashes:
            hashes.add(compiled.hash)
            found.append(_describe(compiled, capability))
        return compiled

    driver.set_active(_AbsentGpu(capability))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run
        for kernel in launched:
            kernel.device_caches.clear()
        # not reset_active, which looks for a GPU
        driver._active = None


def _describe(compiled: Any, capability: int) -> CompiledKernel:
    cubin = compiled.asm["cubin"]
    usage = _RESOURCES.search(_cuobjdump(cubin, "-res-usage"))
    assert usage is not None, "cuobjdump printed no line of resources"
    return CompiledKernel(
        name=compiled.metadata.name,
        capability=capability,
        num_warps=compiled.metadata.num_warps,
        registers=int(usage[1]),
        stack_bytes=int(usage[2]),
        shared_bytes=compiled.metadata.shared,
        cubin=cubin,
    )


def _cuobjdump(cubin: bytes, option: str) -> str:
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, option, file.name], check=True, capture_output=True, text=True).stdout
