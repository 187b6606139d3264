"""Checks a request against what this engine and model can do, before it costs anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from noria.config import EngineConfig, PriorityClass
from noria.errors import ConfigError, InvalidRequest
from noria.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Tokens that a prompt, an output and both together may have; ids below vocab_size are tokens.

    priority_classes: what requests of a level may have, if it is less. default_priority_level: of those that name none.
    """

    max_prompt_len: int
    max_output_len: int
    max_model_len: int
    num_pool_tokens: int
    vocab_size: int
    priority_classes: Mapping[int, PriorityClass] = field(default_factory=dict)
    default_priority_level: int = 1

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises InvalidRequest naming the input or parameter, its value and the limit."""
        num_prompt_tokens = len(prompt_token_ids)
        if num_prompt_tokens == 0:
            raise InvalidRequest("text_input must hold at least one token")
        max_prompt_len = min(self.max_prompt_len, self.max_model_len - 1, self.num_pool_tokens - 1)
        if num_prompt_tokens > max_prompt_len:
            raise InvalidRequest(
                f"text_input has {num_prompt_tokens} tokens; this model takes at most {max_prompt_len}"
            )
        self._check_class(num_prompt_tokens, params)
        room = min(self.max_model_len, self.num_pool_tokens) - num_prompt_tokens
        max_tokens = min(self.max_output_len, room)
        if params.max_tokens > max_tokens:
            raise InvalidRequest(
                f"max_tokens must be from 1 to {max_tokens} for a prompt of {num_prompt_tokens} tokens, "
                f"not {params.max_tokens}"
            )
        for token_id in params.stop_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(f"stop_token_ids must be from 0 to {self.vocab_size - 1}, not {token_id}")

    def _check_class(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        level = params.priority or self.default_priority_level
        limits = self.priority_classes.get(level, PriorityClass())
        if limits.max_prompt_len is not None and num_prompt_tokens > limits.max_prompt_len:
            raise InvalidRequest(
                f"text_input has {num_prompt_tokens} tokens; requests of priority {level} may have at most "
                f"{limits.max_prompt_len}"
            )
        if limits.max_output_len is not None and params.max_tokens > limits.max_output_len:
            raise InvalidRequest(
                f"max_tokens must be from 1 to {limits.max_output_len} for requests of priority {level}, "
                f"not {params.max_tokens}"
            )


def request_limits(config: EngineConfig, model_max_len: int, num_pool_tokens: int, vocab_size: int) -> RequestLimits:
    """The limits of `config` over a model made for `model_max_len` tokens. Raises ConfigError if they exceed it."""
    max_model_len = config.max_model_len or model_max_len
    if max_model_len > model_max_len:
        raise ConfigError(
            f"max_model_len must be at most {model_max_len}, what the model was made for, not {max_model_len}"
        )
    return RequestLimits(
        max_prompt_len=config.max_prompt_len or max_model_len,
        max_output_len=config.max_output_len or max_model_len,
        max_model_len=max_model_len,
        num_pool_tokens=num_pool_tokens,
        vocab_size=vocab_size,
        priority_classes=config.priority_classes,
        default_priority_level=config.default_priority_level,
    )
