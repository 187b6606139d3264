"""What comes back: pieces of answers as they are streamed, and whole answers.

Knows the text contract's output names; knows nothing of the protocol that carried them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noria_client.errors import INTERNAL, ServerError

# one response: output name -> its values in order, one per answer (num_input_tokens has one)
Outputs = Mapping[str, Sequence[Any]]

# what the contract writes where an answer goes on
UNFINISHED = "None"


@dataclass(frozen=True)
class Delta:
    """The next piece of one answer.

    finish_reason: None while the answer goes on, then "stop" or "length".
    num_input_tokens: of the prompt. num_output_tokens: that this piece stands for.
    cumulative_logprob, logprobs: None unless asked for; the sum so far, and one entry per token of this piece.
    index: which of the n answers.
    """

    text: str
    finish_reason: str | None
    num_input_tokens: int
    num_output_tokens: int
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = None
    index: int = 0


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str
    num_output_tokens: int
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = None


@dataclass(frozen=True)
class Generation:
    """The n answers to one prompt; the properties in the singular are the first one's."""

    num_input_tokens: int
    answers: tuple[Answer, ...]

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(answer.text for answer in self.answers)

    @property
    def finish_reason(self) -> str:
        return self.answers[0].finish_reason

    @property
    def num_output_tokens(self) -> int:
        """Of all answers together."""
        return sum(answer.num_output_tokens for answer in self.answers)

    @property
    def cumulative_logprob(self) -> float | None:
        return self.answers[0].cumulative_logprob

    @property
    def logprobs(self) -> list[Any] | None:
        return self.answers[0].logprobs


class DeltaReader:
    """Turns the responses to one request into deltas, and knows whether all answers have come to their end."""

    def __init__(self) -> None:
        self._num_answers = 0
        self._finished: set[int] = set()

    def read(self, outputs: Outputs) -> list[Delta]:
        """The deltas of one response, one per answer that it has news of. Raises ServerError if it has no text."""
        if "text_output" not in outputs:
            raise ServerError(f"a response without text_output: it has {', '.join(outputs) or 'no outputs'}", INTERNAL)
        self._num_answers = max(self._num_answers, len(outputs["text_output"]))
        deltas = [_delta(outputs, index) for index in range(len(outputs["text_output"]))]
        deltas = [delta for delta in deltas if self._is_news(delta)]
        self._finished.update(delta.index for delta in deltas if delta.finish_reason)
        return deltas

    def _is_news(self, delta: Delta) -> bool:
        """Every response has a place for each answer, also for one that has nothing new or is over."""
        is_new_end = delta.finish_reason is not None and delta.index not in self._finished
        return bool(delta.text) or delta.num_output_tokens > 0 or is_new_end

    def check_complete(self) -> None:
        """Raises ServerError if the stream ended before its answers did (a dropped connection looks like an end)."""
        if self._num_answers == 0 or len(self._finished) < self._num_answers:
            raise ServerError("the stream ended before the answer was finished", INTERNAL)


def collect(deltas: Iterable[Delta]) -> Generation:
    """The whole answers of deltas that came to their end."""
    by_answer: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_answer.setdefault(delta.index, []).append(delta)
    answers = tuple(_join(by_answer[index]) for index in sorted(by_answer))
    return Generation(num_input_tokens=by_answer[0][0].num_input_tokens, answers=answers)


def _join(deltas: list[Delta]) -> Answer:
    entries = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return Answer(
        text="".join(delta.text for delta in deltas),
        finish_reason=next(delta.finish_reason for delta in reversed(deltas) if delta.finish_reason),
        num_output_tokens=sum(delta.num_output_tokens for delta in deltas),
        cumulative_logprob=deltas[-1].cumulative_logprob,
        logprobs=[entry for part in entries for entry in part] if entries else None,
    )


def _delta(outputs: Outputs, index: int) -> Delta:
    finish_reason = _value(outputs, "finish_reason", index)
    logprobs = _value(outputs, "logprobs", index)
    return Delta(
        text=outputs["text_output"][index],
        finish_reason=None if finish_reason in (None, UNFINISHED) else finish_reason,
        num_input_tokens=_value(outputs, "num_input_tokens", 0) or 0,
        num_output_tokens=_value(outputs, "num_output_tokens", index) or 0,
        cumulative_logprob=_value(outputs, "cumulative_logprob", index),
        logprobs=None if logprobs is None else json.loads(logprobs),
        index=index,
    )


def _value(outputs: Outputs, name: str, index: int) -> Any:
    values = outputs.get(name, ())
    return values[index] if index < len(values) else None
