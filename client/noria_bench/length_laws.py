"""Laws of lengths as people write them: `lognormal:128:0.8:512`, {law: lognormal, mean: 128, cv: 0.8}, or just 128."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from noria_bench.errors import BenchError
from noria_bench.lengths import (
    ClampedLognormalLength,
    ConstantLength,
    ExponentialLength,
    LengthLaw,
    LognormalLength,
    MixedLength,
    UniformLength,
)
from noria_bench.workload import SEED_OUTPUT_TOKENS, SEED_PROMPT_MEDIAN, SEED_PROMPT_RANGE, SEED_PROMPT_SIGMA

_LAWS: Mapping[str, type] = {
    "constant": ConstantLength,
    "uniform": UniformLength,
    "exponential": ExponentialLength,
    "lognormal": LognormalLength,
}
MIX = "mix"
# the seed workload's laws of outputs and of prompts
_NAMED: Mapping[str, LengthLaw] = {
    "seed_mix": MixedLength(SEED_OUTPUT_TOKENS),
    "seed_prompts": ClampedLognormalLength(SEED_PROMPT_MEDIAN, SEED_PROMPT_SIGMA, *SEED_PROMPT_RANGE),
}
LAW_NAMES = (*_LAWS, MIX, *_NAMED)


def _form(name: str) -> str:
    if name == MIX:
        return "mix:LENGTH:LENGTH..."
    parameters = fields(_LAWS[name]) if name in _LAWS else ()
    return name + "".join(
        f":{one.name.upper()}" if _is_required(one) else f"[:{one.name.upper()}]" for one in parameters
    )


def _is_required(parameter: Field[Any]) -> bool:
    return parameter.default is MISSING


LAW_FORMS = ", ".join(map(_form, LAW_NAMES))


def parse_law(value: object, field: str = "lengths") -> LengthLaw:
    """value: a number, a text as in LAW_FORMS, or a mapping with `law` and the law's parameters by name.

    field: what an error calls it. Raises BenchError naming the laws there are.
    """
    if isinstance(value, str):
        name, *texts = value.split(":")
        return _make(field, value, name, _numbers(field, value, name, texts))
    if isinstance(value, int) and not isinstance(value, bool):
        return _make(field, value, "constant", {"length": value})
    if isinstance(value, Mapping):
        return _make(field, value, str(value.get("law")), {key: one for key, one in value.items() if key != "law"})
    raise BenchError(f"{field} must be a whole number or a law of lengths ({LAW_FORMS}), not {value!r}")


def _numbers(field: str, value: str, name: str, texts: Sequence[str]) -> dict[str, Any]:
    """The parameters of a law that is written as a text."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        raise _wrong(field, value, name) from None
    numbers = [int(number) if number.is_integer() else number for number in numbers]
    if name == MIX:
        return {"lengths": numbers}
    names = [one.name for one in fields(_LAWS[name])] if name in _LAWS else []
    if len(numbers) > len(names):
        raise _wrong(field, value, name)
    return dict(zip(names, numbers, strict=False))


def _make(field: str, value: object, name: str, parameters: Mapping[str, Any]) -> LengthLaw:
    if name in _NAMED and not parameters:
        return _NAMED[name]
    try:
        if name == MIX and parameters.keys() == {"lengths"}:
            return MixedLength(tuple(_whole("lengths", length) for length in parameters["lengths"]))
        if name in _LAWS and _fits(_LAWS[name], parameters):
            law: LengthLaw = _LAWS[name](**_typed(_LAWS[name], parameters))
            return law
    except (TypeError, ValueError) as error:
        raise BenchError(f"{field} {value!r}: {error}") from None
    raise _wrong(field, value, name)


def _fits(law: type, parameters: Mapping[str, Any]) -> bool:
    required = {one.name for one in fields(law) if _is_required(one)}
    return required <= parameters.keys() <= {one.name for one in fields(law)}


def _typed(law: type, parameters: Mapping[str, Any]) -> dict[str, Any]:
    whole = {one.name for one in fields(law) if one.type == "int"}
    return {name: (_whole if name in whole else _number)(name, value) for name, value in parameters.items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    return value


def _whole(name: str, value: Any) -> int:
    if _number(name, value) != int(value):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    return int(value)


def _wrong(field: str, value: object, name: str) -> BenchError:
    form = _form(name) if name in LAW_NAMES else LAW_FORMS
    return BenchError(f"{field} must be a law of lengths as {form}, not {value!r}")
