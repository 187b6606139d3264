"""Compiles every Triton kernel for GPUs that need not be there, and says what each takes of one.

    python -m noria.kernels.compile_report [--capability 80 90 100] [--essential] [--json FILE]

A table: registers and bytes of spilled registers of a thread, shared memory of a block, matrix instructions, and loads
from global memory by their width. The status is 1 where an attention kernel spills, a block takes more shared memory
than the GPU has, or a kernel does not compile. Minutes of two processors; nothing that serves imports this.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from noria.kernels.compile_cases import all_cases
from noria.kernels.language import CAPABILITIES, IS_INTERPRETED
from noria.kernels.offline_compile import MAX_SHARED_BYTES, CompiledKernel, recording

# of kernels whose spilled registers would be read and written once a tile of keys
ATTENTION_KERNELS = ("_decode_kernel", "_merge_kernel", "_prefill_kernel")

_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
# mma, wgmma, tcgen05.mma
_MATRIX = re.compile(r"HMMA|HGMMA|UTCHMMA")
_LOAD = re.compile(r"LDG|LDGSTS")
_LOAD_BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True, slots=True)
class CompiledCase:
    """One kernel of a case: see CompiledKernel. digest: of its code.

    matrix_instructions: by name. loads: from global memory, by bytes, of the disassembly, as if each ran once.
    """

    capability: int
    case: str
    kernel: str
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    matrix_instructions: dict[str, int]
    loads: dict[int, int]
    digest: str

    @property
    def fault(self) -> str | None:
        if self.stack_bytes > 0 and self.kernel in ATTENTION_KERNELS:
            return f"{self.stack_bytes} bytes of registers are spilled"
        if self.shared_bytes > MAX_SHARED_BYTES[self.capability]:
            return f"{self.shared_bytes} bytes of shared memory, of {MAX_SHARED_BYTES[self.capability]}"
        return None


def compile_case(job: tuple[int, str]) -> list[CompiledCase] | str:
    """job: capability and name. A string is what went wrong. Patches Triton while it runs."""
    capability, name = job
    try:
        with recording(capability) as kernels:
            all_cases()[name].launch()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [_described(name, kernel) for kernel in kernels]


def _described(case: str, kernel: CompiledKernel) -> CompiledCase:
    matrix_instructions, loads = _instructions(kernel)
    return CompiledCase(
        capability=kernel.capability,
        case=case,
        kernel=kernel.name,
        num_warps=kernel.num_warps,
        registers=kernel.registers,
        stack_bytes=kernel.stack_bytes,
        shared_bytes=kernel.shared_bytes,
        matrix_instructions=matrix_instructions,
        loads=loads,
        digest=hashlib.sha256(kernel.cubin).hexdigest(),
    )


# of kernels that several cases have; to disassemble one takes half as long as to compile it
@cache
def _instructions(kernel: CompiledKernel) -> tuple[dict[str, int], dict[int, int]]:
    opcodes = [opcode.split(".") for opcode in _OPCODE.findall(kernel.disassembly())]
    return (
        dict(Counter(name for name, *_ in opcodes if _MATRIX.fullmatch(name))),
        dict(Counter(_load_bytes(suffixes) for name, *suffixes in opcodes if _LOAD.fullmatch(name))),
    )


def _load_bytes(suffixes: list[str]) -> int:
    return next((_LOAD_BYTES[suffix] for suffix in suffixes if suffix in _LOAD_BYTES), 4)


def compile_all(
    capabilities: Sequence[int], is_essential: bool, num_processes: int
) -> Iterator[tuple[int, str, list[CompiledCase] | str]]:
    """Capability, name and outcome of each case in turn."""
    jobs = [
        (capability, case.name)
        for capability in capabilities
        for case in all_cases().values()
        if case.min_capability <= capability and (capability in case.essential_for or not is_essential)
    ]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as processes:
        for job, outcome in zip(jobs, processes.map(compile_case, jobs), strict=True):
            yield *job, outcome


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if IS_INTERPRETED:
        sys.exit("compile_report: TRITON_INTERPRET must not be set: nothing is compiled for the interpreter")
    rows: list[CompiledCase] = []
    faults: list[str] = []
    # kernels that an earlier case had are not printed again
    seen: set[tuple[int, str]] = set()
    print(_line("GPU", "kernel", "registers", "spilled", "shared KB", "matrix", "16-byte", "other loads", "case"))
    for capability, name, outcome in compile_all(options.capability, options.essential, options.processes):
        if isinstance(outcome, str):
            faults.append(f"{capability} {name}: {outcome}")
            continue
        rows.extend(outcome)
        for row in outcome:
            if (capability, row.digest) in seen:
                continue
            seen.add((capability, row.digest))
            print(_line(*_columns(row)), flush=True)
            if row.fault:
                faults.append(f"{capability} {name}: {row.kernel}: {row.fault}")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    print(f"{len(seen)} kernels, {len(faults)} faults")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m noria.kernels.compile_report", description="Compiles every Triton kernel; needs no GPU."
    )
    parser.add_argument(
        "--capability",
        type=int,
        nargs="+",
        choices=CAPABILITIES,
        default=CAPABILITIES,
        help="compute capabilities, 90 for 9.0 (default: %(default)s)",
    )
    parser.add_argument("--essential", action="store_true", help="attention in bfloat16, and each other kernel once")
    parser.add_argument("--processes", type=int, default=2, help="that compile side by side (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all figures there, too")
    return parser


def _columns(row: CompiledCase) -> tuple[object, ...]:
    matrix = ", ".join(f"{count} {name}" for name, count in row.matrix_instructions.items())
    others = ", ".join(f"{count} of {size}" for size, count in sorted(row.loads.items()) if size != 16)
    shared = f"{row.shared_bytes / 1024:.1f}"
    kernel = row.kernel.strip("_").removesuffix("_kernel")
    return (
        row.capability,
        kernel,
        row.registers,
        row.stack_bytes,
        shared,
        matrix,
        row.loads.get(16, 0),
        others,
        row.case,
    )


def _line(*columns: object) -> str:
    widths = (">3", "<13", ">9", ">7", ">9", "<11", ">7", "<20", "<0")
    return "  ".join(f"{column!s:{width}}" for column, width in zip(columns, widths, strict=True))


if __name__ == "__main__":
    sys.exit(main())
