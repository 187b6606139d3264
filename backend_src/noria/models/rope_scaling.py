"""Rotary position embedding: the ways in which a model stretches its frequencies, and the frequencies themselves.

Knows the fields of config.json that state them. Knows nothing of tensors: how q and k are rotated is the decoder's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from noria.errors import ConfigError
from noria.models.json_fields import JsonFields

_DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Every frequency divided by `factor` (position interpolation, Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.

    low_freq_factor, high_freq_factor: turns within original_max_position_embeddings below which a frequency is
        stretched in full, and above which it is kept.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class RopeFactors:
    """One divisor per frequency, [head_dim / 2]: the tensor `rope_freqs` of a GGUF file."""

    factors: tuple[float, ...]


RopeScaling = LinearRopeScaling | Llama3RopeScaling | RopeFactors


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> list[float]:
    """Radians per position of each rotated pair, [head_dim / 2]: theta ** (-2i / head_dim), then scaled.

    Su et al. 2021, arXiv:2104.09864, section 3.2.2.
    """
    frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    match scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor):
            return [frequency / factor for frequency in frequencies]
        case RopeFactors(factors):
            return [frequency / factor for frequency, factor in zip(frequencies, factors, strict=True)]
        case Llama3RopeScaling():
            return [_llama3_frequency(frequency, scaling) for frequency in frequencies]


def _llama3_frequency(frequency: float, scaling: Llama3RopeScaling) -> float:
    """`apply_scaling` of Meta's llama-models, models/llama3/model.py: kept * f + (1 - kept) * f / factor."""
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = min(max(kept, 0.0), 1.0)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


def parse_rope(config: JsonFields, head_dim: int, max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of a config.json: `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    Raises ConfigError for a kind of scaling that is not one of this file's.
    """
    # the same precedence as transformers': a file that was edited by hand may hold both
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(stated, dict):
        raise config.error("rope_parameters", "an object")
    fields = JsonFields(f"{config.source}: rope_parameters", stated)
    theta = fields.number("rope_theta", config.number("rope_theta", _DEFAULT_THETA))
    for holder in (config, fields):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.error("partial_rotary_factor", "1 or absent")
    kind = fields.get("rope_type") or fields.get("type") or "default"
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, LinearRopeScaling(fields.number("factor"))
        case "llama3":
            return theta, _parse_llama3(fields, config, max_position_embeddings)
        case "longrope":
            return theta, _parse_factors(fields, head_dim)
    raise ConfigError(f"{fields.source}: rope_type must be default, linear or llama3, not {kind!r:.100}")


def _parse_llama3(fields: JsonFields, config: JsonFields, max_position_embeddings: int) -> Llama3RopeScaling:
    original = config.integer("original_max_position_embeddings", None)
    scaling = Llama3RopeScaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position_embeddings=original
        or fields.integer("original_max_position_embeddings", max_position_embeddings),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.error("high_freq_factor", f"above low_freq_factor ({scaling.low_freq_factor})")
    return scaling


def _parse_factors(fields: JsonFields, head_dim: int) -> RopeFactors:
    """LongRoPE whose factors are the same at every length, which is how `rope_to_hf` states those of a GGUF file."""
    short = fields.numbers("short_factor", head_dim // 2)
    if short != fields.numbers("long_factor", head_dim // 2):
        raise fields.error("long_factor", "the same as short_factor: a change with the length is not supported")
    if fields.get("attention_factor") != 1.0:
        raise fields.error("attention_factor", "1: scaling the attention is not supported")
    return RopeFactors(short)


def rope_to_hf(theta: float, scaling: RopeScaling | None, max_position_embeddings: int) -> dict[str, Any]:
    """The `rope_parameters` that state this, readable for `parse_rope` and for transformers."""
    match scaling:
        case None:
            return {"rope_type": "default", "rope_theta": theta}
        case LinearRopeScaling(factor):
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        case RopeFactors(factors):
            return {
                "rope_type": "longrope",
                "rope_theta": theta,
                "short_factor": list(factors),
                "long_factor": list(factors),
                "attention_factor": 1.0,
                "factor": 1.0,
                "original_max_position_embeddings": max_position_embeddings,
            }
        case Llama3RopeScaling():
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
