"""The engine in its three modes on the seed mix, without a server: useful tokens/s of Llama-3.2-1B's shape.

Static and dynamic run the same closed batches: what tells them apart is how long a server waits for one to fill, and
here all requests are there from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gpu.device import Gpu
from gpu.engines import EngineRun, Item, engine_config, run_engine, seed_mix
from gpu.model_checks import capture_for
from gpu.random_models import KV_BLOCK_SIZE, bytes_read, random_decoder, random_runner
from gpu.rows import Row
from gpu.sizes import Sizes
from gpu.stages import Unit
from noria.runtime.cuda_graphs import DecodeGraphs, ladder
from noria.runtime.model_runner import ModelRunner

STAGE = "engine"
STATIC_TARGET = 2.5
# the row that Transformers' figures are compared with
PEER_ROW = "in-flight, the requests that Transformers gets"


class EngineSpeed:
    """One runner for all of one number of slots: weights, cache and graphs are the same in every mode."""

    def __init__(self, sizes: Sizes, gpu: Gpu) -> None:
        self.sizes, self.gpu = sizes, gpu
        self.dtype = torch.float32 if gpu.is_interpreted else torch.bfloat16
        self._runner: ModelRunner | None = None
        self._runs: dict[tuple[int, str], EngineRun] = {}

    def units(self) -> Iterator[Unit]:
        yield Unit("weights, cache and graphs", self._build, 20)
        yield Unit("the peers' requests", self._peer_row(self.sizes.slots[0][0]), 5)
        for slots, num_inflight, num_static, num_dynamic in self.sizes.slots:
            yield Unit(f"in-flight, {slots} slots", self._measure("inflight", slots, num_inflight), 15)
            yield Unit(f"static, {slots} slots", self._measure("static", slots, num_static), 15)
            yield Unit(f"dynamic, {slots} slots", self._measure("dynamic", slots, num_dynamic), 5)
            yield Unit(f"variants, {slots} slots", self._variants(slots, num_static), 15)

    def _build(self) -> Sequence[Row]:
        """What else there is in the first second, too: graphs, and the memory that they take."""
        before = self.gpu.free_bytes()
        runner = self._runner = self._new_runner(max(entry[0] for entry in self.sizes.slots))
        assert runner.graphs is not None, "no graphs were recorded"
        cache_bytes = runner.cache.memory.nbytes
        taken = max(0, before - self.gpu.free_bytes() - cache_bytes) / 2**30
        weights = bytes_read(runner.decoder.config, self.dtype.itemsize) / 2**30
        note = (
            f"{len(runner.graphs.sizes)} graphs of up to {runner.graphs.sizes[-1]} rows; of it {weights:.2f} GiB are "
            f"weights, counted once; and a cache of {cache_bytes / 2**30:.2f} GiB"
        )
        return [Row(STAGE, "memory beside the cache", taken, "GiB", note=note)]

    def _measure(self, mode: str, slots: int, num_requests: int) -> Callable[[], Sequence[Row]]:
        def run() -> Sequence[Row]:
            done = self._run(mode, slots, self._items(num_requests))
            title = {"inflight": "in-flight"}.get(mode, mode)
            rows = [self._row(f"{title}, {slots} slots, {num_requests} requests", done)]
            self._runs[slots, mode] = done
            if mode == "static" and (slots, "inflight") in self._runs:
                ratio = self._runs[slots, "inflight"].tokens_per_s / done.tokens_per_s
                rows.append(Row(STAGE, f"in-flight over static, {slots} slots", ratio, "x", STATIC_TARGET))
            return rows

        return run

    def _variants(self, slots: int, num_requests: int) -> Callable[[], Sequence[Row]]:
        """In-flight with the host's work in the GPU's way, and with prompts in steps of their own, between graphs."""

        def run() -> Sequence[Row]:
            items = self._items(num_requests)
            ahead = {"run_ahead": False}, "without running ahead"
            separate = {"prefill_batching": "separate"}, "prompts in separate steps"
            return [
                self._row(
                    f"in-flight, {words}, {slots} slots, {num_requests} requests",
                    self._run("inflight", slots, items, **values),
                )
                for values, words in (({}, "as it comes"), ahead, separate)
            ]

        return run

    def _peer_row(self, slots: int) -> Callable[[], Sequence[Row]]:
        return lambda: [self._row(PEER_ROW, self._run("inflight", slots, self._items(self.sizes.peer_requests)))]

    def _items(self, num_requests: int) -> list[Item]:
        return seed_mix(num_requests, self.sizes.models["1B"].vocab_size, self.sizes.output_scale)

    def _row(self, name: str, done: EngineRun) -> Row:
        note = (
            f"{done.num_tokens} tokens in {done.seconds:.1f} s, {done.num_steps} steps of "
            f"{1e3 * done.seconds / done.num_steps:.1f} ms, {done.num_replayed_steps} of them graphs"
        )
        return Row(STAGE, name, done.tokens_per_s, "tokens/s", note=note)

    def _run(self, mode: str, slots: int, items: Sequence[Item], **values: Any) -> EngineRun:
        if self._runner is None:
            self._runner = self._new_runner(max(entry[0] for entry in self.sizes.slots))
        config = engine_config(
            mode,
            slots,
            self.sizes.max_num_batched_tokens,
            num_kv_blocks=self._runner.cache.num_blocks,
            prefix_caching=False,
            **values,
        )
        return run_engine(self._runner, config, items)

    def _new_runner(self, max_slots: int) -> ModelRunner:
        """With a cache that holds the longest requests in all slots: none is ever preempted."""
        items = self._items(max(entry[1] for entry in self.sizes.slots))
        longest = max(len(item.prompt_token_ids) + item.max_tokens for item in items) + KV_BLOCK_SIZE
        decoder = random_decoder(self.sizes.models["1B"], self.dtype, self.gpu.device)
        num_blocks = max_slots * (-(-longest // KV_BLOCK_SIZE) + 1) + 64
        runner = random_runner(decoder, num_blocks, self.gpu, has_cuda_graphs=not self.gpu.is_interpreted)
        if self.gpu.is_interpreted:
            runner.graphs = DecodeGraphs(decoder, runner.cache, (max_slots,), capture_for(self.gpu))
        else:
            runner.warm_up(max_slots, max(ladder(max_slots)[-1], self.sizes.max_num_batched_tokens))
        # and what only a whole run compiles
        config = engine_config("inflight", max_slots, 64, num_kv_blocks=runner.cache.num_blocks, prefix_caching=False)
        run_engine(runner, config, [Item(item.prompt_token_ids, 4) for item in items[:2]])
        return runner
