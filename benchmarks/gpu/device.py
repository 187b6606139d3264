"""The GPU that is measured, with its clocks; or the CPU under Triton's interpreter, whose times mean nothing."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# of the H200's L2, 60 MB; what is read in turn is to be several times that
UNCACHED_BYTES = 2**29
# cycles of a wait on the device, some 60 ms, in which the host runs ahead
_HEAD_START_CYCLES = 120_000_000

Call = Callable[[], object]


class Gpu:
    """is_interpreted: no GPU; each call is then run once, by the host's clock."""

    def __init__(self, is_interpreted: bool) -> None:
        self.is_interpreted = is_interpreted
        self.device = torch.device("cpu" if is_interpreted else "cuda")

    def synchronize(self) -> None:
        if not self.is_interpreted:
            torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        if self.is_interpreted:
            return {"device": "cpu, Triton's interpreter: the times mean nothing"}
        properties = torch.cuda.get_device_properties(0)
        return {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mb": round(getattr(properties, "L2_cache_size", 0) / 1e6, 1),
            "cuda": torch.version.cuda,
        }

    def free_bytes(self) -> int:
        """Of memory that can be had now."""
        if self.is_interpreted:
            return 2**30
        self.release()
        return torch.cuda.mem_get_info()[0]

    def release(self) -> None:
        """Gives back what is no longer referred to."""
        gc.collect()
        if not self.is_interpreted:
            torch.cuda.empty_cache()

    def poison(self, num_bytes: int) -> None:
        """Leaves NaN (every byte 255) in memory that the next tensor of that size is likely to get."""
        pieces = [torch.full((max(1, num_bytes),), 255, dtype=torch.uint8, device=self.device) for _ in range(3)]
        del pieces

    def call_ms(self, call: Call, num_calls: int = 10) -> float:
        """Median of single calls, each between two events: for calls that take much longer than their launch."""
        if self.is_interpreted:
            return self._span_ms(call)
        call()
        return statistics.median(self._span_ms(call) for _ in range(num_calls))

    def graph_ms(self, calls: Sequence[Call], num_replays: int = 10) -> float:
        """Median of one call, from replays of a graph of all: without the host's time between launches.

        The calls should read different memory, UNCACHED_BYTES in all.
        """
        if self.is_interpreted:
            return self._span_ms(calls[0])
        for call in calls:
            call()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        times = [self._span_ms(graph.replay) for _ in range(num_replays)]
        del graph
        return statistics.median(times) / len(calls)

    def ahead_ms(self, call: Call, num_calls: int) -> float:
        """Of one of so many calls, launched while the device waits: its own time, whatever the host takes.

        The launches of all must fit into the wait and the queue of some 1,000 launches.
        """
        if self.is_interpreted:
            return self._span_ms(call)
        call()
        self.synchronize()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        return self._span_ms(lambda: [call() for _ in range(num_calls)]) / num_calls

    def _span_ms(self, call: Call) -> float:
        if self.is_interpreted:
            started = time.perf_counter()
            call()
            return 1000 * (time.perf_counter() - started)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))

    def random(self, num_numbers: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """[num_numbers] of a normal distribution. In pieces, so that one of tens of gigabytes takes no more memory."""
        out = torch.empty(num_numbers, dtype=dtype, device=self.device)
        for piece in out.split(2**28):
            piece.normal_()
        return out
