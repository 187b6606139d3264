"""One request of the text contract, before it takes the form of a protocol.

Knows the contract's input names. Sampling parameters are passed on as they are: the server knows which are valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# a text, or the messages of a conversation, each with `role` and `content`, for the model's chat template
Prompt = str | Sequence[Mapping[str, str]]

# The client's own deadline comes this much after the server's, so that the server's answer, which says more, wins.
DEADLINE_GRACE_S = 1.0


# a server that does not say within this what its model is like will not answer it either
TRAITS_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ModelTraits:
    """What a client must know of a model before it can form a request for it."""

    max_batch_size: int
    is_decoupled: bool

    @property
    def tensor_shape(self) -> list[int]:
        """A model that batches takes its inputs with a batch dimension, one that does not takes them without."""
        return [1, 1] if self.max_batch_size > 0 else [1]


@dataclass(frozen=True)
class TextRequest:
    """timeout_s: the server ends the request after so long; None for no limit.

    priority: 1 is the highest, 0 the model's default. It goes to Triton's own queue and, as Triton does not pass it on
    over gRPC, among the sampling parameters to the model.
    """

    text: str
    is_streamed: bool
    sampling: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    priority: int = 0

    def inputs(self) -> dict[str, str | bool]:
        """The input tensors, each of one element. Always the same set: Triton's dynamic batcher never puts requests
        together that differ in which optional inputs they have."""
        wants_logprobs = self.sampling.get("logprobs") is not None
        sampling = dict(self.sampling) | ({"priority": self.priority} if self.priority else {})
        return {
            "text_input": self.text,
            "stream": self.is_streamed,
            "sampling_parameters": json.dumps(sampling),
            "exclude_input_in_output": True,
            "return_finish_reason": True,
            "return_cumulative_logprob": wants_logprobs,
            "return_logprobs": wants_logprobs,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
        }

    @property
    def timeout_us(self) -> int | None:
        return None if self.timeout_s is None else round(self.timeout_s * 1e6)

    @property
    def client_timeout_s(self) -> float | None:
        return None if self.timeout_s is None else self.timeout_s + DEADLINE_GRACE_S


def build_request(
    prompt: Prompt, is_streamed: bool, timeout_s: float | None, priority: int, sampling: Mapping[str, Any]
) -> TextRequest:
    """A prompt that is a list of messages asks for the chat template; sampling values of None are left out."""
    given = {name: value for name, value in sampling.items() if value is not None}
    if not isinstance(prompt, str):
        given = {"apply_chat_template": True} | given
        prompt = json.dumps([dict(message) for message in prompt])
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be above 0, not {timeout_s}")
    return TextRequest(prompt, is_streamed, given, timeout_s, priority)
