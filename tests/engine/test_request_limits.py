"""What a request may have at most: of the model, of the configuration, of its priority class."""

from typing import Any

import pytest

from noria.config import EngineConfig, PriorityClass
from noria.engine.request_limits import RequestLimits, request_limits
from noria.errors import ConfigError, InvalidRequest
from noria.sampling_params import SamplingParams


def limits(num_pool_tokens: int = 1000, **config: Any) -> RequestLimits:
    return request_limits(EngineConfig(**config), model_max_len=100, num_pool_tokens=num_pool_tokens, vocab_size=50)


def check(subject: RequestLimits, num_prompt_tokens: int, max_tokens: int = 1, **params: Any) -> None:
    subject.check([1] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens, **params))


CLASSES = {
    1: PriorityClass(max_prompt_len=10, max_output_len=5),
    3: PriorityClass(max_output_len=8),
}


@pytest.mark.parametrize(
    ("config", "num_prompt_tokens", "params", "message"),
    [
        ({}, 0, {}, "text_input must hold at least one token"),
        ({}, 100, {}, "text_input has 100 tokens; this model takes at most 99"),
        ({"max_prompt_len": 20}, 21, {}, "text_input has 21 tokens; this model takes at most 20"),
        ({"num_pool_tokens": 16}, 16, {}, "text_input has 16 tokens; this model takes at most 15"),
        ({}, 90, {"max_tokens": 11}, "max_tokens must be from 1 to 10 for a prompt of 90 tokens, not 11"),
        ({"max_output_len": 6}, 5, {"max_tokens": 7}, "max_tokens must be from 1 to 6"),
        ({}, 5, {"stop_token_ids": (50,)}, "stop_token_ids must be from 0 to 49, not 50"),
        ({}, 11, {"priority": 1}, "text_input has 11 tokens; requests of priority 1 may have at most 10"),
        ({}, 5, {"priority": 1, "max_tokens": 6}, "max_tokens must be from 1 to 5 for requests of priority 1, not 6"),
        ({}, 5, {"priority": 3, "max_tokens": 9}, "max_tokens must be from 1 to 8 for requests of priority 3, not 9"),
        ({"default_priority_level": 1}, 11, {}, "requests of priority 1 may have at most 10"),
    ],
)
def test_what_is_too_much_is_refused_by_name_and_number(
    config: dict[str, Any], num_prompt_tokens: int, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check(limits(**{"priority_classes": CLASSES} | config), num_prompt_tokens, **params)
    assert message in str(raised.value)


def test_a_limit_is_what_may_be_reached() -> None:
    subject = limits(priority_classes=CLASSES)
    check(subject, 10, priority=1, max_tokens=5)
    # without a limit of its own, or of a class without limits
    check(subject, 50, priority=3, max_tokens=8)
    check(subject, 50, max_tokens=50)


def test_a_class_does_not_lift_the_limits_of_all() -> None:
    subject = limits(max_prompt_len=20, priority_classes={1: PriorityClass(max_prompt_len=30)})
    with pytest.raises(InvalidRequest, match="this model takes at most 20"):
        check(subject, 25, priority=1)


def test_more_than_the_model_was_made_for_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="max_model_len must be at most 100"):
        limits(max_model_len=101)
