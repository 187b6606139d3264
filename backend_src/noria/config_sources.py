"""Where an engine's configuration comes from, and how each source is read.

The later over the earlier: EngineConfig's defaults, `1/engine.json`, the `parameters` of the chosen config.pbtxt, the
environment variable NORIA_ENGINE (a JSON object; `noria serve --engine KEY=VALUE` sets it). A `preset` stands for the
keys in `presets`: over earlier sources, under the other keys of its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noria.config import EngineConfig, PriorityClass
from noria.errors import ConfigError
from noria.presets import PRESETS

ENVIRONMENT_VARIABLE = "NORIA_ENGINE"

_TRITONS_PARAMETERS = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")


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
    own = _convert_all(source, values, _TYPES)
    preset = own.get("preset")
    # an unknown one is refused with the rest of the values
    return {**PRESETS.get(preset, {}), **own} if preset else own


def _convert_all(source: str, values: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    unknown = sorted(set(values) - set(types))
    if unknown:
        raise ConfigError(f"{source}: unknown key {unknown[0]!r}; valid are {', '.join(types)}")
    return {key: _convert(source, key, value, types[key]) for key, value in values.items()}


def _convert(source: str, key: str, value: Any, wanted: str) -> Any:
    """Strictly: a string is read as the key's type (Triton's parameters are strings), anything else must have it."""
    if (value is None or value == "null") and "None" in wanted:
        return None
    if wanted == "Mapping[int, PriorityClass]":
        return _priority_classes(f"{source}: {key}", value)
    if wanted.startswith("str") and isinstance(value, str):
        return value
    if wanted == "bool" and isinstance(value, (bool, str)):
        word = str(value).lower()
        if word in ("true", "false"):
            return word == "true"
    if not isinstance(value, bool):
        try:
            if wanted.startswith("int") and isinstance(value, (int, str)):
                return int(value)
            if wanted.startswith("float") and isinstance(value, (int, float, str)):
                return float(value)
        except ValueError:
            pass
    raise ConfigError(f"{source}: {key} must be {_TYPE_WORDS[wanted]}, not {value!r:.100}")


def _priority_classes(source: str, value: Any) -> dict[int, PriorityClass]:
    """{"1": {"max_queue_size": 8}}, as JSON or as its text."""
    values = decode_object(source, value) if isinstance(value, str) else value
    if not isinstance(values, dict) or not all(isinstance(entry, dict) for entry in values.values()):
        raise ConfigError(f"{source} must be an object of objects, by level, not {value!r:.100}")
    if not all(str(level).isdecimal() for level in values):
        raise ConfigError(f'{source}: its keys must be priority levels, such as "1", not {list(values)!r:.100}')
    return {
        int(level): PriorityClass(**_convert_all(f"{source} {level}", entry, _CLASS_TYPES))
        for level, entry in values.items()
    }


_TYPES = {entry.name: str(entry.type) for entry in dataclasses.fields(EngineConfig)}
_CLASS_TYPES = {entry.name: str(entry.type) for entry in dataclasses.fields(PriorityClass)}
_TYPE_WORDS = {
    "bool": "true or false",
    "str": "a string",
    "str | None": "a string or null",
    "int": "a whole number",
    "int | None": "a whole number or null",
    "float": "a number",
    "float | None": "a number or null",
}
