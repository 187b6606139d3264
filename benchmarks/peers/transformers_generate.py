"""Transformers' `generate` as a peer: padded static batches of `slots` requests, in order.

A batch runs until its longest answer ends; a row that has its tokens goes on being computed and the rest is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

from peers.protocol import Answer, PeerRequest, PeerWorkload, Task, main


class _StepClock(StoppingCriteria):
    """Called after each step: notes when, stops nothing."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)  # type: ignore[return-value]


class TransformersGenerate:
    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.num_threads)
        self._slots = task.slots
        self._model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32).eval()
        # none is ended by a token
        self._model.generation_config.eos_token_id = None
        self.settings = {
            "dtype": "float32",
            "batching": "padded static",
            "attention": self._model.config._attn_implementation,
            "num_threads": torch.get_num_threads(),
        }

    def generate(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        answers = []
        for start in range(0, len(requests), self._slots):
            answers += self._generate_batch(requests[start : start + self._slots])
        return answers

    def _generate_batch(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        longest = max(len(request.prompt_token_ids) for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.int64)  # [num_requests, longest], padded on the left
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            num_tokens = len(request.prompt_token_ids)
            ids[row, longest - num_tokens :] = torch.tensor(request.prompt_token_ids)
            mask[row, longest - num_tokens :] = 1
        clock = _StepClock()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(request.max_tokens for request in requests),
                pad_token_id=0,
                stopping_criteria=[clock],
            )
        rows = output[:, longest:].tolist()
        return [
            Answer(row[: request.max_tokens], clock.times_s[: request.max_tokens])
            for request, row in zip(requests, rows, strict=True)
        ]

    def close(self) -> None:
        """Nothing outlives the process."""


def load(task: Task, workload: PeerWorkload) -> TransformersGenerate:
    return TransformersGenerate(task)


if __name__ == "__main__":
    main(load, ("transformers", "torch"))
