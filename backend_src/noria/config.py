"""EngineConfig: every choice of the engine, as data, checked once and never written back.

Sources, the later over the earlier: the defaults here, `1/engine.json`, the `parameters` of the chosen config.pbtxt,
the environment variable NORIA_ENGINE (a JSON object; `noria serve --engine KEY=VALUE` sets it).
Knows nothing of models on disk or devices: what depends on those is checked where they are opened.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noria.errors import ConfigError

EMBEDDED_MODEL = "embedded"
ENVIRONMENT_VARIABLE = "NORIA_ENGINE"

_TRITONS_PARAMETERS = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")
_CHOICES = {
    "batching_mode": ("inflight", "static", "dynamic"),
    "dtype": ("float32", "bfloat16", "float16"),
    "device": ("auto", "cpu", "cuda"),
}
_RANGES: dict[str, tuple[float, float]] = {
    "block_size": (1, 256),
    "num_kv_blocks": (1, 2**31),
    "kv_cache_gib": (0.001, 1024),
    "max_num_seqs": (1, 4096),
    "max_num_batched_tokens": (1, 2**20),
    "max_model_len": (2, 2**24),
    "max_prompt_len": (1, 2**24),
    "max_output_len": (1, 2**24),
    "max_queue_size": (1, 2**20),
    "max_queue_tokens": (1, 2**31),
    "num_threads": (1, 1024),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine is made of.

    model: `embedded`, a Hugging Face directory, or a .gguf file.
    batching_mode: inflight re-decides the batch at every step; static and dynamic run a closed batch to its end, and
        differ only in how Triton is told to form it.
    block_size: tokens per block of the KV cache.
    num_kv_blocks: blocks of the pool; None takes as many as fit into kv_cache_gib (2**30 bytes).
    max_num_seqs: sequences in one step, the slots.
    max_num_batched_tokens: tokens computed in one step (in-flight mode); longer prompts are computed in chunks.
    max_model_len, max_prompt_len, max_output_len: tokens of a whole sequence, its prompt, its output; None is what the
        model was made for.
    max_queue_size, max_queue_tokens: requests, and their prompt tokens, that may wait; one more is UNAVAILABLE.
    num_threads: compute threads on a CPU; None is one per core that this process may use.
    cache_dir: where converted models are kept; None is $XDG_CACHE_HOME/noria or ~/.cache/noria.
    """

    model: str = EMBEDDED_MODEL
    batching_mode: str = "inflight"
    dtype: str = "float32"
    device: str = "auto"
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_gib: float = 1.0
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    max_prompt_len: int | None = None
    max_output_len: int | None = None
    max_queue_size: int = 1024
    max_queue_tokens: int | None = None
    num_threads: int | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} must be from {low} to {high}, not {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): a step decodes one token for each"
            )
        if not self.model:
            raise ConfigError(f"model must be {EMBEDDED_MODEL!r}, a Hugging Face directory or a .gguf file, not empty")


def default_cache_dir() -> Path:
    """Where converted models and other things that can be made again are kept, unless cache_dir says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "noria"


def load_engine_config(
    path: Path | None, parameters: Mapping[str, str] | None = None, environment: str | None = None
) -> EngineConfig:
    """The engine's configuration from its three sources (see the module's docstring).

    parameters: the config's, all of them strings; those whose keys Triton itself defines have been left out.
    environment: the text of NORIA_ENGINE.
    Raises ConfigError, naming the source, the key and what is valid.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        values |= _read(str(path), decode_object(str(path), text))
    if parameters:
        values |= _read("the config's parameters", dict(parameters))
    if environment:
        values |= _read(f"{ENVIRONMENT_VARIABLE} or --engine", decode_object(ENVIRONMENT_VARIABLE, environment))
    return EngineConfig(**values)


def own_parameters(parameters: Mapping[str, str]) -> dict[str, str]:
    """A config's parameters less those that Triton's Python backend reads itself."""
    return {key: value for key, value in parameters.items() if key not in _TRITONS_PARAMETERS}


def decode_object(source: str, text: str) -> dict[str, Any]:
    """A JSON object from `text`. Raises ConfigError naming `source`."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{source} must hold a JSON object, not {type(values).__name__}")
    return values


def _read(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(values) - set(_TYPES))
    if unknown:
        raise ConfigError(f"{source}: unknown key {unknown[0]!r}; valid are {', '.join(_TYPES)}")
    return {key: _convert(source, key, value) for key, value in values.items()}


def _convert(source: str, key: str, value: Any) -> Any:
    """Strictly: a string is read as the key's type (Triton's parameters are strings), anything else must have it."""
    wanted = _TYPES[key]
    if (value is None or value == "null") and "None" in wanted:
        return None
    if wanted.startswith("str") and isinstance(value, str):
        return value
    if not isinstance(value, bool):
        try:
            if wanted.startswith("int") and isinstance(value, (int, str)):
                return int(value)
            if wanted.startswith("float") and isinstance(value, (int, float, str)):
                return float(value)
        except ValueError:
            pass
    raise ConfigError(f"{source}: {key} must be {_TYPE_WORDS[wanted]}, not {value!r:.100}")


_TYPES = {field.name: str(field.type) for field in dataclasses.fields(EngineConfig)}
_TYPE_WORDS = {
    "str": "a string",
    "str | None": "a string or null",
    "int": "a whole number",
    "int | None": "a whole number or null",
    "float": "a number",
}
