"""LimitMeter: how fast this machine reads memory, and how fast the model's own kernels multiply, here and now.

The rate of multiplying is that of the kernel which serves, on inputs that stay in each thread's cache: what it would do
if memory were infinitely fast. Knows nothing of the model but its kind of weights.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from noria.kernels.cpu_library import load_library
from noria.kernels.cpu_weights import CpuWeights
from noria.profiling.floor import MachineLimits

READ_BYTES = 2**28
# each limit is the best of so many
NUM_TRIALS = 4
# short, so that some are likely to meet no neighbour
PRODUCT_SECONDS = 0.008
PRODUCT_ROWS = 48
PRODUCT_INPUTS = 256
# with the rows they fit into the 512 KiB of a small second-level cache
PRODUCT_WEIGHT_BYTES = 2**18
TORCH_PRODUCT_SIZE = 512


class LimitMeter:
    """Holds what it reads and multiplies, so that each measurement begins at once."""

    def __init__(self, num_threads: int, dtype: torch.dtype, has_cpu_kernels: bool, is_quantized: bool) -> None:
        """num_threads: as many as torch uses in this process. dtype: of the weights where torch computes with them."""
        size = max(READ_BYTES, 4 * _last_level_cache_bytes())
        self._memory = torch.ones(size // torch.float32.itemsize)
        self._product: _CompiledProducts | _TorchProduct
        self._float_product: _CompiledProducts | _TorchProduct
        if has_cpu_kernels:
            self._float_product = _CompiledProducts(num_threads, is_quantized=False)
            self._product = _CompiledProducts(num_threads, is_quantized=True) if is_quantized else self._float_product
        else:
            self._product = self._float_product = _TorchProduct(dtype)

    def measure(self) -> MachineLimits:
        """Takes about a tenth of a second."""
        float_rate = _best_rate(self._float_product)
        rate = float_rate if self._product is self._float_product else _best_rate(self._product)
        return MachineLimits(max(self._bytes_per_s() for _ in range(NUM_TRIALS)), rate, float_rate)

    def _bytes_per_s(self) -> float:
        """All threads read a buffer that no cache holds."""
        begin_s = time.perf_counter()
        self._memory.sum()
        return self._memory.nbytes / (time.perf_counter() - begin_s)


def _last_level_cache_bytes() -> int:
    """0 where the system does not say."""
    try:
        return max(0, os.sysconf("SC_LEVEL3_CACHE_SIZE"))
    except (ValueError, OSError):
        return 0


def _best_rate(product: _CompiledProducts | _TorchProduct) -> float:
    return max(product.macs_per_s() for _ in range(NUM_TRIALS))


def _calls_per_s(call: Callable[[], object]) -> float:
    num_calls, begin_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - begin_s) < PRODUCT_SECONDS or not num_calls:
        call()
        num_calls += 1
    return num_calls / elapsed_s


class _CompiledProducts:
    """The compiled kernel, by all threads at once, each on a product of its own."""

    def __init__(self, num_threads: int, is_quantized: bool) -> None:
        library = load_library()
        self._products = [_CompiledProduct(library, is_quantized) for _ in range(num_threads)]

    def macs_per_s(self) -> float:
        barrier = Barrier(len(self._products))
        with ThreadPoolExecutor(len(self._products)) as pool:
            return sum(pool.map(lambda product: product.macs_per_s(barrier), self._products))


class _CompiledProduct:
    def __init__(self, library: ctypes.CDLL, is_quantized: bool) -> None:
        self._library = library
        num_outputs = PRODUCT_WEIGHT_BYTES // PRODUCT_INPUTS // (1 if is_quantized else torch.float32.itemsize)
        self._num_macs = PRODUCT_ROWS * num_outputs * PRODUCT_INPUTS
        weight = torch.randn(num_outputs, PRODUCT_INPUTS)
        self._x, self._y = torch.randn(PRODUCT_ROWS, PRODUCT_INPUTS), torch.empty(PRODUCT_ROWS, num_outputs)
        self._weights = CpuWeights(library, is_quantized)
        self._linear = self._weights.pack(weight)

    def macs_per_s(self, barrier: Barrier) -> float:
        """Of the calling thread, from when all have come to the barrier. ctypes lets the others run meanwhile."""
        self._call()
        barrier.wait()
        return self._num_macs * _calls_per_s(self._call)

    def _call(self) -> None:
        self._library.noria_linear(self._linear, self._x.data_ptr(), PRODUCT_ROWS, self._y.data_ptr())


class _TorchProduct:
    """torch's matrix product, with all its threads."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._a, self._b = (torch.randn(TORCH_PRODUCT_SIZE, TORCH_PRODUCT_SIZE).to(dtype) for _ in range(2))
        torch.mm(self._a, self._b)

    def macs_per_s(self) -> float:
        return TORCH_PRODUCT_SIZE**3 * _calls_per_s(lambda: torch.mm(self._a, self._b))
