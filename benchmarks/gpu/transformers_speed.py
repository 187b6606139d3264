"""Transformers on the same weights and requests: `generate` in padded batches, and its continuous batching."""

from __future__ import annotations

import importlib.metadata
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gpu.device import Gpu
from gpu.engines import Item, seed_mix
from gpu.rows import Row
from gpu.sizes import Sizes
from gpu.stages import Unit
from gpu.transformers_models import transformers_model

STAGE = "peers"
GENERATE_BATCH_ROW = "Transformers, generate_batch's manager"
# tokens of one of the manager's blocks, its default; and the share that it keeps free before it takes a request
PAGE_SIZE, FREE_SHARE = 256, 0.15
TIMEOUT_S = 90.0


class TransformersSpeed:
    """Useful tokens/s: what each request asked for, not what a padded batch computes."""

    def __init__(self, sizes: Sizes, gpu: Gpu) -> None:
        self.sizes, self.gpu = sizes, gpu
        self.dtype = torch.float32 if gpu.is_interpreted else torch.bfloat16
        self._slots = sizes.slots[0][0]
        self._model: Any = None

    def units(self) -> Iterator[Unit]:
        yield Unit("generate_batch", self._generate_batch, 50)
        yield Unit("generate", self._generate, 25)

    def _new_model(self) -> Any:
        if self._model is None:
            self._model = transformers_model(self.sizes.models["1B"], self.dtype, self.gpu.device, std=0.02)
        return self._model

    def _items(self) -> list[Item]:
        vocab_size = self.sizes.models["1B"].vocab_size
        return seed_mix(self.sizes.peer_requests, vocab_size, self.sizes.output_scale)

    def _note(self, num_tokens: int, seconds: float, num_requests: int) -> str:
        version = importlib.metadata.version("transformers")
        attention = self._model.config._attn_implementation
        words = f"{num_tokens} tokens of {num_requests} requests in {seconds:.1f} s, {self._slots} slots"
        return f"{words}, Transformers {version}, attention {attention}"

    def _generate(self) -> Sequence[Row]:
        """One batch of as many requests as there are slots: batches do not differ."""
        model, items = self._new_model(), self._items()[: self._slots]
        self._padded(model, items, max_new_tokens=4)
        self.gpu.synchronize()
        started = time.perf_counter()
        self._padded(model, items, max(item.max_tokens for item in items))
        self.gpu.synchronize()
        seconds = time.perf_counter() - started
        num_tokens = sum(item.max_tokens for item in items)
        note = self._note(num_tokens, seconds, len(items))
        return [Row(STAGE, "Transformers, generate in padded batches", num_tokens / seconds, "tokens/s", note=note)]

    @torch.inference_mode()
    def _padded(self, model: Any, items: Sequence[Item], max_new_tokens: int) -> None:
        longest = max(len(item.prompt_token_ids) for item in items)
        ids = torch.zeros(len(items), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, longest - len(item.prompt_token_ids) :] = torch.tensor(item.prompt_token_ids)
            mask[row, longest - len(item.prompt_token_ids) :] = 1
        device = self.gpu.device
        out = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
        )
        assert out.shape[1] == longest + max_new_tokens, f"{out.shape[1] - longest} tokens in place of {max_new_tokens}"

    def _generate_batch(self) -> Sequence[Row]:
        """The manager behind `generate_batch`, which takes a max_new_tokens for each request."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        model, items = self._new_model(), self._items()
        longest = max(len(item.prompt_token_ids) + item.max_tokens for item in items)
        num_blocks = math.ceil(self._slots * math.ceil(longest / PAGE_SIZE) / (1 - FREE_SHARE)) + 2
        values = {
            "num_blocks": num_blocks,
            "max_batch_tokens": max(self._slots, self.sizes.max_num_batched_tokens),
            "max_requests_per_batch": self._slots,
            "allow_block_sharing": False,
        }
        # -1 is never drawn: none is ended by a token
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        manager = model.init_continuous_batching(generation, ContinuousBatchingConfig(**values))
        manager.start()
        try:
            self._answers(manager, [Item(item.prompt_token_ids, 4) for item in items[:4]])
            started = time.perf_counter()
            num_tokens, num_requests = self._answers(manager, items)
            seconds = time.perf_counter() - started
            note = self._note(num_tokens, seconds, num_requests)
        finally:
            manager.stop(block=True, timeout=10)
        if num_requests < len(items):
            note = f"of {len(items)} requests these were done in time: {note}"
        return [Row(STAGE, GENERATE_BATCH_ROW, num_tokens / seconds, "tokens/s", note=note, details=values)]

    def _answers(self, manager: Any, items: Sequence[Item]) -> tuple[int, int]:
        """Tokens, and requests, that are done before TIMEOUT_S. Raises RuntimeError where the manager failed."""
        until = time.perf_counter() + TIMEOUT_S
        for item in items:
            manager.add_request(list(item.prompt_token_ids), max_new_tokens=item.max_tokens)
        num_tokens = num_requests = 0
        while num_requests < len(items) and time.perf_counter() < until:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("the continuous batching manager has stopped")
            if result is None or not result.is_finished():
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            num_tokens += len(result.generated_tokens)
            num_requests += 1
        return num_tokens, num_requests
