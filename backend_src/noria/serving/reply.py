"""The state of the answer to one client request: what has been generated, what has been sent. Knows no Triton.

A client request holds `num_rows` prompts with `n` answers each; the engine sees num_rows * n requests, the parts.
Owned by the writer thread once the parts are submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from noria.engine.outputs import RequestOutput
from noria.errors import NoriaError
from noria.scheduler_output import SampledToken
from noria.sequence import FinishReason, Request

# of one in the JSON that a response carries
LOGPROB_BYTES = 80


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """The boolean inputs of the text contract, and the shape of the outputs.

    is_batched: the model has a batch dimension, so outputs are [num_rows, n] and not [n].
    """

    is_streamed: bool = False
    includes_prompt: bool = False
    returns_finish_reason: bool = False
    returns_cumulative_logprob: bool = False
    returns_logprobs: bool = False
    returns_num_input_tokens: bool = False
    returns_num_output_tokens: bool = False
    is_batched: bool = False


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """What one response says of one part. cumulative_logprob is over the whole output so far, the rest is new."""

    text: str
    tokens: tuple[SampledToken, ...]
    cumulative_logprob: float
    finish_reason: FinishReason | None


@dataclass(slots=True)
class _Part:
    prompt_text: str
    num_input_tokens: int
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    is_end_told: bool = False


class Reply:
    """Collects the parts' outputs and says when there is something to send.

    num_waiting_bytes: of the next chunk's outputs, about.
    """

    def __init__(self, options: ReplyOptions, requests: Sequence[Request], prompt_texts: Sequence[str], n: int) -> None:
        """requests: row by row, the n answers of a row together. prompt_texts: one a row."""
        self.options = options
        self.num_rows = len(prompt_texts)
        self.n = n
        self.error: NoriaError | None = None
        self.num_waiting_bytes = 0
        self._is_begun = False
        self._parts = {
            request.request_id: _Part(prompt_texts[index // n], len(request.prompt_token_ids))
            for index, request in enumerate(requests)
        }
        if options.includes_prompt:
            for part in self._parts.values():
                part.text = part.prompt_text
                self.num_waiting_bytes += len(part.text.encode())

    @property
    def request_ids(self) -> list[int]:
        return list(self._parts)

    @property
    def live_request_ids(self) -> list[int]:
        return [request_id for request_id, part in self._parts.items() if part.finish_reason is None]

    @property
    def is_finished(self) -> bool:
        """Nothing more will come: every part has ended, or one has failed."""
        return self.error is not None or all(part.finish_reason for part in self._parts.values())

    def has_news(self, stream_interval: int) -> bool:
        """There is an end to send, or, of a stream, text: the first, or beside so many tokens or the end of a part.

        A stream never sends an empty chunk before its end.
        """
        if self.is_finished or not self.has_text:
            return self.is_finished
        return not self._is_begun or any(
            len(part.tokens) >= stream_interval or (part.finish_reason is not None and not part.is_end_told)
            for part in self._parts.values()
        )

    @property
    def has_text(self) -> bool:
        """A stream has some that was not sent."""
        return self.options.is_streamed and any(part.text for part in self._parts.values())

    @property
    def num_input_tokens(self) -> list[int]:
        """One a row."""
        return [part.num_input_tokens for part in list(self._parts.values())[:: self.n]]

    def take(self, output: RequestOutput) -> None:
        if output.error is not None:
            self.error = self.error or output.error
            return
        part = self._parts[output.request_id]
        part.text += output.text
        part.tokens += output.tokens
        part.cumulative_logprob += sum(token.logprob or 0.0 for token in output.tokens)
        part.finish_reason = output.finish_reason
        self.num_waiting_bytes += len(output.text.encode())
        if self.options.returns_logprobs:
            num_logprobs = sum(1 + len(token.top_logprobs) for token in output.tokens)
            self.num_waiting_bytes += num_logprobs * LOGPROB_BYTES

    def pop_chunk(self) -> list[ChunkPart]:
        """All that has come since the last call, part by part. An ended part goes on saying why it ended."""
        chunk = [
            ChunkPart(part.text, tuple(part.tokens), part.cumulative_logprob, part.finish_reason)
            for part in self._parts.values()
        ]
        self.num_waiting_bytes = 0
        self._is_begun = True
        for part in self._parts.values():
            part.text = ""
            part.tokens = []
            part.is_end_told = part.finish_reason is not None
        return chunk
