"""Noria's engine in this process, without a server, as `noria bench --offline` drives it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from noria.config import EngineConfig
from noria.config_sources import load_engine_config
from noria.engine.build import build_engine
from noria.sampling_params import sampling_params_from
from noria.sequence import Request
from peers.protocol import Answer, PeerRequest, PeerWorkload, Task, main

MAX_BATCHED_TOKENS = 512


def engine_config(slots: int, num_threads: int, options: Mapping[str, str]) -> EngineConfig:
    """The options over what the comparison sets. Raises ConfigError for an unknown key or a value not of its type."""
    values = {
        "max_num_seqs": str(slots),
        "max_num_batched_tokens": str(max(MAX_BATCHED_TOKENS, slots)),
        "num_threads": str(num_threads),
        "prefix_caching": "false",
        **options,
    }
    return load_engine_config(None, values)


class NoriaEngine:
    def __init__(self, task: Task) -> None:
        config = engine_config(task.slots, task.num_threads, task.options)
        self._engine = build_engine(config, lambda words: print(words, file=sys.stderr)).engine
        self._num_requests = 0
        self.settings = {
            "dtype": config.dtype,
            "batching": config.batching_mode,
            "num_threads": config.num_threads,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "prefix_caching": config.prefix_caching,
            **task.options,
        }

    def generate(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        """Raises the error of a request that failed."""
        engine = self._engine
        answers: dict[int, Answer] = {}
        for request in requests:
            self._num_requests += 1
            sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": request.max_tokens}
            params = sampling_params_from(sampling)
            engine.add(Request(self._num_requests, request.prompt_token_ids, params, seed=0))
            answers[self._num_requests] = Answer([], [])
        while engine.has_work:
            engine.step()
            now = time.perf_counter()
            for output in engine.take_outputs():
                if output.error is not None:
                    raise output.error
                answer = answers[output.request_id]
                answer.token_ids.extend(token.token_id for token in output.tokens)
                answer.times_s.extend(now for _ in output.tokens)
        return list(answers.values())

    def close(self) -> None:
        self._engine.close()


def load(task: Task, workload: PeerWorkload) -> NoriaEngine:
    return NoriaEngine(task)


if __name__ == "__main__":
    main(load, ("noria", "torch"))
