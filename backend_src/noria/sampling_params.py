"""What a client may ask of the sampler and of the scheduler, checked once when the request is parsed.

Names and defaults are those of vLLM's SamplingParams, which the clients of Triton's vLLM backend already send.
Knows nothing of tensors, tokenizers or the vocabulary: token ids are checked against it in `engine.request_limits`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from noria.errors import InvalidRequest

MAX_N = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_NAME_LENGTH = 256
MAX_COUNT = 2**31 - 1
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn, when it ends, and how it is scheduled.

    temperature: 0 is greedy (the lowest id wins a tie), otherwise logits are divided by it.
    top_k: keep the k largest logits; 0 or -1 keeps all.
    top_p: keep the smallest set of largest probabilities that sums to at least top_p.
    min_p: keep probabilities of at least min_p times the largest.
    repetition_penalty: Keskar et al. 2019 (CTRL), over prompt and output; 1 is off.
    presence_penalty, frequency_penalty: subtracted once, or per occurrence, over the output; 0 is off.
    seed: None draws a fresh one for the request; equal seeds give equal tokens, alone and in any batch.
    stop: strings that end the text; not part of it.
    stop_token_ids: tokens that end the text; not part of it.
    min_tokens: no end of sequence and no stop before so many tokens.
    logprobs: None for none, k for the chosen token's and the k likeliest tokens' log-probabilities,
        of the raw model distribution (before penalties and temperature).
    n: so many independent answers to the prompt.
    apply_chat_template: read text_input as one user message, or as a JSON list of messages with role and content.
    skip_special_tokens: leave special tokens out of the text.
    priority: 1 is served first; 0 takes the default level. How many levels there are is the engine's to check.
    cache_salt: only requests of equal salt share cached prefixes.
    user: the tenant that the request is charged to where the engine shares fairly between tenants.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    apply_chat_template: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    user: str = ""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            _check_range(name, getattr(self, name), low, high)
        if self.top_p == 0:
            raise InvalidRequest("top_p must be above 0 and at most 1, not 0")
        if self.seed is not None:
            _check_range("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}")
        self._check_stops()
        for name in ("cache_salt", "user"):
            if len(getattr(self, name)) > MAX_NAME_LENGTH:
                raise InvalidRequest(f"{name} must have at most {MAX_NAME_LENGTH} characters")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_LENGTH:
                raise InvalidRequest(
                    f"each stop string must have 1 to {MAX_STOP_STRING_LENGTH} characters, not {len(text)}"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, not {len(self.stop_token_ids)}"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, MAX_COUNT),
    "min_tokens": (0, MAX_COUNT),
    "top_k": (-1, MAX_COUNT),
    "n": (1, MAX_N),
    "priority": (0, MAX_COUNT),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


def _check_range(name: str, value: float, low: float, high: float) -> None:
    # written so that NaN, which compares false with everything, is refused too
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low} to {high}, not {value}")


def parse_sampling_params(text: str) -> SamplingParams:
    """The `sampling_parameters` tensor: a JSON object whose values may come as strings ("0.1").

    Raises InvalidRequest, naming the key, for malformed JSON, an unknown key or a bad value.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"sampling_parameters is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequest(f"sampling_parameters must be a JSON object, not {type(values).__name__}")
    return sampling_params_from(values)


def sampling_params_from(values: Mapping[str, Any], ignore_unknown: bool = False) -> SamplingParams:
    """Sampling parameters from decoded JSON; `ignore_unknown` is for a request's parameters, where `id` leaks in."""
    unknown = sorted(set(values) - set(_PARSERS))
    if unknown and not ignore_unknown:
        raise InvalidRequest(f"unknown sampling parameter {unknown[0]!r}; valid are {', '.join(_PARSERS)}")
    known = {key: _PARSERS[key](key, value) for key, value in values.items() if key in _PARSERS}
    return SamplingParams(**known)


def _parse_int(key: str, value: Any) -> int:
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    elif isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            number = None
    if number is None:
        raise InvalidRequest(f"{key} must be a whole number, not {value!r:.100}")
    return number


def _parse_float(key: str, value: Any) -> float:
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{key} must be a finite number, not {value!r:.100}")
    return number


def _parse_bool(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise InvalidRequest(f"{key} must be true or false, not {value!r:.100}")


def _parse_name(key: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidRequest(f"{key} must be a string, not {value!r:.100}")
    try:
        # JSON may hold half of a surrogate pair, which is no character
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{key} is not valid Unicode: {error.reason} at character {error.start}") from None
    return value


def _optional(parse: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda key, value: None if value is None else parse(key, value)


def _parse_stop(key: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise InvalidRequest(f"{key} must be a string or a list of strings, not {value!r:.100}")
    return tuple(strings)


def _parse_token_ids(key: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest(f"{key} must be a list of token ids, not {value!r:.100}")
    return tuple(_parse_int(key, item) for item in value)


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _parse_int,
    "min_tokens": _parse_int,
    "temperature": _parse_float,
    "top_k": _parse_int,
    "top_p": _parse_float,
    "min_p": _parse_float,
    "repetition_penalty": _parse_float,
    "presence_penalty": _parse_float,
    "frequency_penalty": _parse_float,
    "seed": _optional(_parse_int),
    "stop": _parse_stop,
    "stop_token_ids": _parse_token_ids,
    "ignore_eos": _parse_bool,
    "logprobs": _optional(_parse_int),
    "n": _parse_int,
    "apply_chat_template": _parse_bool,
    "skip_special_tokens": _parse_bool,
    "priority": lambda key, value: 0 if value is None else _parse_int(key, value),
    "cache_salt": _parse_name,
    "user": _parse_name,
}
assert set(_PARSERS) == {field.name for field in dataclasses.fields(SamplingParams)}
