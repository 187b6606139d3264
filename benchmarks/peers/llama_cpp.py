"""llama.cpp as a peer: its low-level decoding, batched as its server batches.

Each step decodes one token of every running sequence and fills the rest of n_batch with prompts. A sequence that ends
leaves its cells and its number to the next one that waits. Each sequence has a KV stream of its own (kv_unified off):
in a unified one every token attends over the cells of all sequences.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

from peers.protocol import Answer, PeerRequest, PeerWorkload, Task, main

NUM_BATCH_TOKENS = 512
# a stream's cells come in multiples of it
CELL_GRANULARITY = 256


@dataclass
class _Running:
    """place: of its request. next_token: None until the prompt has been computed whole."""

    place: int
    request: PeerRequest
    sequence: int
    num_computed: int = 0
    next_token: int | None = None
    answer: Answer = field(default_factory=lambda: Answer([], []))


class LlamaCpp:
    def __init__(self, task: Task, max_model_len: int) -> None:
        model = llama_cpp.llama_model_load_from_file(task.gguf.encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {task.gguf}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = task.slots * -(-max_model_len // CELL_GRANULARITY) * CELL_GRANULARITY
        params.n_batch = params.n_ubatch = max(NUM_BATCH_TOKENS, task.slots)
        params.n_seq_max = task.slots
        params.n_threads = params.n_threads_batch = task.num_threads
        params.kv_unified = False
        params.flash_attn_type = int(task.options.get("flash_attn", params.flash_attn_type))
        self._slots, self._max_batch_tokens = task.slots, params.n_batch
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self._num_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        description = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(model, description, len(description))
        self.settings = {
            "weights": description.value.decode(),
            "batching": "continuous",
            "num_threads": task.num_threads,
            "n_batch": params.n_batch,
            "n_ubatch": params.n_ubatch,
            "kv_unified": False,
            "kv_dtype": "f16",
            "flash_attn_type": params.flash_attn_type,
            "system": llama_cpp.llama_print_system_info().decode().strip(),
        }

    def generate(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        waiting = deque(enumerate(requests))
        free = deque(range(self._slots))
        running: list[_Running] = []
        answers: dict[int, Answer] = {}
        while waiting or running:
            while waiting and free:
                running.append(_Running(*waiting.popleft(), free.popleft()))
            self._step(running)
            for one in [one for one in running if len(one.answer.token_ids) == one.request.max_tokens]:
                llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), one.sequence, -1, -1)
                answers[one.place] = one.answer
                running.remove(one)
                free.append(one.sequence)
        return [answers[place] for place in range(len(requests))]

    def _step(self, running: Sequence[_Running]) -> None:
        """One llama_decode; each sequence whose known tokens are then computed gets a token. Raises RuntimeError."""
        self._batch.n_tokens = 0
        outputs: list[tuple[_Running, int]] = []
        # decodes first, so that no prompt can keep them out
        for one in sorted(running, key=lambda one: one.next_token is None):
            if one.next_token is not None:
                outputs.append((one, self._add(one, one.next_token, is_output=True)))
                continue
            prompt = one.request.prompt_token_ids
            end = min(len(prompt), one.num_computed + self._max_batch_tokens - self._batch.n_tokens)
            for place in range(one.num_computed, end):
                index = self._add(one, prompt[place], is_output=place == len(prompt) - 1)
            if end == len(prompt):
                outputs.append((one, index))
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        for one, index in outputs:
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, index), (self._num_tokens,))
            one.next_token = int(logits.argmax())
            one.answer.token_ids.append(one.next_token)
        now = time.perf_counter()
        for one, _ in outputs:
            one.answer.times_s.append(now)

    def _add(self, one: _Running, token_id: int, is_output: bool) -> int:
        """Its index in the batch."""
        batch, index = self._batch, self._batch.n_tokens
        batch.token[index] = token_id
        batch.pos[index] = one.num_computed
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = one.sequence
        batch.logits[index] = is_output
        batch.n_tokens += 1
        one.num_computed += 1
        return int(index)

    def close(self) -> None:
        """Nothing outlives the process."""


def load(task: Task, workload: PeerWorkload) -> LlamaCpp:
    llama_cpp.llama_backend_init()
    return LlamaCpp(task, workload.max_model_len)


if __name__ == "__main__":
    main(load, ("llama-cpp-python",))
