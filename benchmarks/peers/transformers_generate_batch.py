"""Transformers' continuous batching as a peer: the manager behind `generate_batch`, kept between calls.

`generate_batch` itself takes one max_new_tokens for all requests and makes a cache anew in every call; its manager
takes one for each request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from peers.protocol import Answer, PeerRequest, PeerWorkload, Task, main

PAGE_SIZE = 256
MAX_BATCH_TOKENS = 512
# the scheduler admits no prompt while less than 15 % of the blocks are free
FREE_SHARE = 0.15
RESULT_TIMEOUT_S = 60.0


class TransformersGenerateBatch:
    def __init__(self, task: Task, max_model_len: int) -> None:
        torch.set_num_threads(task.num_threads)
        model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32).eval()
        blocks_per_request = math.ceil(max_model_len / PAGE_SIZE)
        config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=math.ceil(task.slots * blocks_per_request / (1 - FREE_SHARE)) + 2,
            max_batch_tokens=max(MAX_BATCH_TOKENS, task.slots),
            max_requests_per_batch=task.slots,
            allow_block_sharing=False,
        )
        # -1 is never drawn: none is ended by a token
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = model.init_continuous_batching(generation, config)
        self._manager.start()
        self.settings = {
            "dtype": "float32",
            "batching": "continuous",
            "attention": model.config._attn_implementation,
            "num_threads": torch.get_num_threads(),
            "page_size": PAGE_SIZE,
            "num_blocks": config.num_blocks,
            "max_batch_tokens": config.max_batch_tokens,
            "prefix_caching": False,
        }

    def generate(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        """Raises RuntimeError when the manager's thread has ended or a request failed."""
        places = {
            self._manager.add_request(
                list(request.prompt_token_ids), max_new_tokens=request.max_tokens, record_timestamps=True
            ): place
            for place, request in enumerate(requests)
        }
        answers: dict[int, Answer] = {}
        while len(answers) < len(requests):
            result = self._manager.get_result(timeout=RESULT_TIMEOUT_S)
            if result is None and not self._manager.is_running():
                raise RuntimeError("the continuous batching manager has stopped")
            if result is None or not result.is_finished():
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            answers[places[result.request_id]] = Answer(result.generated_tokens, result.timestamps)
        return [answers[place] for place in range(len(requests))]

    def close(self) -> None:
        self._manager.stop(block=True)


def load(task: Task, workload: PeerWorkload) -> TransformersGenerateBatch:
    return TransformersGenerateBatch(task, workload.max_model_len)


if __name__ == "__main__":
    main(load, ("transformers", "torch"))
