"""The serving layer over an engine without weights and a Triton that is faked: requests in, responses out."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

from noria.config import EngineConfig
from noria.engine.build import EngineParts
from noria.engine.engine import Engine
from noria.engine.metrics import StatsCounter
from noria.engine.request_limits import request_limits
from noria.scheduler_output import SampledToken, SchedulerOutput, StepResult
from noria.scheduling.build import build_scheduler
from noria.serving.service import GenerationService, ServingMode
from support.byte_tokenizer import ByteTokenizer
from support.fake_pb_utils import FakeRequest, InferenceResponse, TritonError
from support.waiting import TIMEOUT_S, wait_until

NUM_BLOCKS, BLOCK_SIZE, MAX_LEN = 64, 4, 128


class AlphabetRunner:
    """Continues every text with the next letter of the alphabet. `gate` holds the steps back, `failure` fails them."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None

    def execute(self, output: SchedulerOutput) -> StepResult:
        assert self.gate.wait(TIMEOUT_S)
        if self.failure is not None:
            raise self.failure
        tokens = {}
        for row in output.rows:
            if row.sampling is not None:
                token_id = ord("a") + (row.token_ids[-1] - ord("a") + 1) % 26
                top = ((token_id, -0.5), (32, -1.5))[: row.sampling.params.logprobs or 0]
                tokens[row.request_id] = SampledToken(token_id, -0.5, top, rank=1)
        return tokens


class FakeService:
    def __init__(self, mode: str, is_decoupled: bool = True, **config: Any) -> None:
        settings = {"batching_mode": mode, "block_size": BLOCK_SIZE, "max_num_seqs": 4} | config
        self.config = EngineConfig(**settings)
        self.runner = AlphabetRunner()
        tokenizer = ByteTokenizer()
        scheduler = build_scheduler(self.config, NUM_BLOCKS)
        self.engine = Engine(scheduler, self.runner, tokenizer, StatsCounter(NUM_BLOCKS, BLOCK_SIZE))
        limits = request_limits(self.config, MAX_LEN, NUM_BLOCKS * BLOCK_SIZE, tokenizer.vocab_size)
        parts = EngineParts(self.engine, tokenizer, limits, tokenizer.eos_token_ids)  # type: ignore[arg-type]
        self.is_batched = mode != "inflight"
        serving_mode = ServingMode(is_decoupled, is_closed=self.is_batched, is_batched=self.is_batched)
        self.service = GenerationService(parts, self.config, serving_mode, "llm", "1")

    def request(self, *texts: str | bytes, sampling: Any = None, **inputs: Any) -> FakeRequest:
        shape = (len(texts), 1) if self.is_batched else (len(texts),)
        values: dict[str, Any] = {"text_input": [text.encode() if isinstance(text, str) else text for text in texts]}
        if sampling is not None:
            values["sampling_parameters"] = [
                sampling if isinstance(sampling, bytes) else json.dumps(sampling).encode()
            ] * len(texts)
        values |= {
            name: [value] * len(texts) for name, value in inputs.items() if name not in ("parameters", "timeout_us")
        }
        arrays = {
            name: np.array(value, dtype=bool if isinstance(value[0], bool) else np.object_).reshape(shape)
            for name, value in values.items()
        }
        return FakeRequest(arrays, inputs.get("parameters"), inputs.get("timeout_us", 0))

    def ask(self, *requests: FakeRequest) -> list[list[InferenceResponse]]:
        """Every response to each of the requests of one `execute`, once all have had their FINAL."""
        self.service.execute(list(requests))
        for request in requests:
            wait_until(lambda request=request: request.sender.num_finals == 1)
        return [request.sender.responses for request in requests]


def flat(value: Any) -> Any:
    """The only element, whatever the shape."""
    while isinstance(value, list):
        (value,) = value
    return value


def text_of(responses: list[InferenceResponse]) -> str:
    return b"".join(flat(response.value("text_output")) for response in responses).decode()


def error_of(responses: list[InferenceResponse]) -> TritonError:
    assert [response.has_error() for response in responses] == [True]
    return responses[0].error()
