"""The Triton language, where it is installed. Without it torch's operators, which stand in the same files, still load.

Kernels run on NVIDIA GPUs. With TRITON_INTERPRET=1 in the environment before this is imported, Triton's interpreter
runs them on the CPU, thousands of times slower: for tests.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

try:
    import triton
    import triton.language as tl
except ImportError:
    # what is left of a kernel is a function that nobody calls: `runtime.kernel_choice` asks first
    triton = SimpleNamespace(jit=lambda function=None, **options: function or (lambda kernel: kernel))
    tl = SimpleNamespace(constexpr=lambda value: value)

# GPUs that the kernels are compiled and checked for: A100; H100, H200; B200
CAPABILITIES = (80, 90, 100)
FP8_CAPABILITY = 90
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's own switch. A slot or block out of range then is printed and stops the process' GPU context; else it is left
# out.
IS_DEBUG = os.environ.get("TRITON_DEBUG") == "1"


def gpu_capability() -> int:
    """Of the GPU that kernels are compiled for, 90 for 9.0; the interpreter takes Hopper's tiles."""
    return 90 if IS_INTERPRETED else triton.runtime.driver.active.get_current_target().arch
