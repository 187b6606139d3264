"""The compiled CPU kernels' libraries that run on this processor, by instruction set."""

from __future__ import annotations

import ctypes

from noria.kernels.cpu_library import find_libraries, load_from


def libraries_that_run() -> dict[str, ctypes.CDLL]:
    loaded = [load_from(path) for path in find_libraries().values()]
    return {library.noria_instruction_set().decode(): library for library in loaded if library.noria_cpu_is_supported()}


def fastest_instruction_set() -> str:
    return next(iter(libraries_that_run()))
