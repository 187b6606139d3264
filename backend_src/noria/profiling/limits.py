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
from typing import Protocol

import torch
from torch import Tensor

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
# at most; with the rows they fit into the 512 KiB of a small second-level cache
PRODUCT_WEIGHT_BYTES = 2**18
TORCH_PRODUCT_SIZE = 512


class _Product(Protocol):
    def macs_per_s(self) -> float: ...


class LimitMeter:
    """Holds what it reads and multiplies, so that each measurement begins at once."""

    def __init__(self, num_readers: int, weights: _Product, head: _Product, attention: _Product) -> None:
        """num_readers: threads beside each other, each of which reads with all threads of torch's operators.
        The products may be the same one."""
        size = max(READ_BYTES, 4 * _last_level_cache_bytes())
        self._parts = torch.ones(size // torch.float32.itemsize).chunk(num_readers)
        self._weights, self._head, self._attention = weights, head, attention

    def measure(self) -> MachineLimits:
        """Takes about a tenth of a second."""
        products = {id(product): product for product in (self._weights, self._head, self._attention)}
        rates = {key: _best_rate(product) for key, product in products.items()}
        return MachineLimits(
            bytes_per_s=max(self._bytes_per_s() for _ in range(NUM_TRIALS)),
            weight_macs_per_s=rates[id(self._weights)],
            attention_macs_per_s=rates[id(self._attention)],
            head_macs_per_s=rates[id(self._head)],
        )

    def _bytes_per_s(self) -> float:
        """All threads read a buffer that no cache holds."""
        barrier = Barrier(len(self._parts))
        with ThreadPoolExecutor(len(self._parts)) as pool:
            begins_s, ends_s = zip(*pool.map(lambda part: _read(part, barrier), self._parts), strict=True)
        return sum(part.nbytes for part in self._parts) / (max(ends_s) - min(begins_s))


def compiled_limits(num_threads: int, weights: str, head: str) -> LimitMeter:
    """Of the compiled kernels with so many threads. weights, head: names of cpu_library.WEIGHT_FORMATS."""
    products = {name: _CompiledProducts(num_threads, name) for name in {weights, head, "float32"}}
    return LimitMeter(num_threads, products[weights], products[head], products["float32"])


def torch_limits(dtype: torch.dtype) -> LimitMeter:
    """Of torch's operators with as many threads as it uses in this process."""
    product = _TorchProduct(dtype)
    return LimitMeter(1, product, product, product)


def _read(numbers: Tensor, barrier: Barrier) -> tuple[float, float]:
    """When it began and ended, from when all threads have come to the barrier."""
    barrier.wait()
    begin_s = time.perf_counter()
    numbers.sum()
    return begin_s, time.perf_counter()


def _last_level_cache_bytes() -> int:
    """0 where the system does not say."""
    try:
        return max(0, os.sysconf("SC_LEVEL3_CACHE_SIZE"))
    except (ValueError, OSError):
        return 0


def _best_rate(product: _Product) -> float:
    return max(product.macs_per_s() for _ in range(NUM_TRIALS))


def _calls_per_s(call: Callable[[], object]) -> float:
    num_calls, begin_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - begin_s) < PRODUCT_SECONDS or not num_calls:
        call()
        num_calls += 1
    return num_calls / elapsed_s


class _CompiledProducts:
    """The compiled kernel, by all threads at once, each on a product of its own."""

    def __init__(self, num_threads: int, weight_format: str) -> None:
        library = load_library()
        self._products = [_CompiledProduct(library, weight_format) for _ in range(num_threads)]

    def macs_per_s(self) -> float:
        barrier = Barrier(len(self._products))
        with ThreadPoolExecutor(len(self._products)) as pool:
            return sum(pool.map(lambda product: product.macs_per_s(barrier), self._products))


class _CompiledProduct:
    def __init__(self, library: ctypes.CDLL, weight_format: str) -> None:
        self._library = library
        num_outputs = (
            PRODUCT_WEIGHT_BYTES // PRODUCT_INPUTS // (torch.float32.itemsize if weight_format == "float32" else 1)
        )
        self._num_macs = PRODUCT_ROWS * num_outputs * PRODUCT_INPUTS
        weight = torch.randn(num_outputs, PRODUCT_INPUTS)
        self._x, self._y = torch.randn(PRODUCT_ROWS, PRODUCT_INPUTS), torch.empty(PRODUCT_ROWS, num_outputs)
        self._weights = CpuWeights(library)
        self._linear = self._weights.pack(weight_format, weight)

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
