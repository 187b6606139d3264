"""Reads JSON and YAML strictly: a key that nobody asks for, or of another type, is an error that says what is valid."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from noria_bench.errors import BenchError

T = TypeVar("T")

# requests, tokens or groups; what is beyond is a slip, and would take hours or all memory
MAX_WHOLE = 10_000_000


class Section:
    """A mapping of a document. Each key is taken once; `close` refuses those that were not.

    source: the document, as errors call it. path: of this mapping within it, empty at the top.
    """

    def __init__(self, values: object, source: str, path: str = "") -> None:
        self._source = source
        self._path = path
        if not isinstance(values, Mapping):
            raise self.error(None, "a mapping of keys to values", values)
        self._values = dict(values)
        self._taken: list[str] = []

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def where(self, key: str | None) -> str:
        """How errors call a key of this mapping; None is the mapping itself."""
        path = ".".join(part for part in (self._path, key) if part)
        return f"{self._source}: {path}" if path else self._source

    def error(self, key: str | None, valid: str, value: object) -> BenchError:
        return BenchError(f"{self.where(key)} must be {valid}, not {value!r:.200}")

    def take(self, key: str) -> Any:
        """The value, None if there is none."""
        self._taken.append(key)
        return self._values.get(key)

    def number(self, key: str, default: T, minimum: float = 0.0, *, is_above: bool = False) -> float | T:
        """is_above: the minimum itself is too low."""
        value = self.take(key)
        if value is None:
            return default
        if not _is_number(value) or value < minimum or (is_above and value == minimum):
            raise self.error(key, f"a finite number {'above' if is_above else 'of at least'} {minimum:g}", value)
        return float(value)

    def share(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if value > 1:
            raise self.error(key, "a number from 0 to 1", value)
        return value

    def whole(self, key: str, default: T, minimum: int = 1) -> int | T:
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"a whole number of at least {minimum}", value)
        if value > MAX_WHOLE:
            raise self.error(key, f"a whole number of at most {MAX_WHOLE}", value)
        return value

    def text(self, key: str, default: T, choices: Sequence[str] = ()) -> str | T:
        value = self.take(key)
        if value is None:
            return default
        if not isinstance(value, str) or not value or (choices and value not in choices):
            raise self.error(key, f"one of {', '.join(choices)}" if choices else "a text", value)
        return value

    def section(self, key: str) -> Section | None:
        value = self.take(key)
        return None if value is None else Section(value, self._source, ".".join(filter(None, (self._path, key))))

    def sections(self, key: str) -> list[Section]:
        """Those of a list; none if there is no such key."""
        value = self.take(key)
        if value is not None and (not isinstance(value, list) or not value):
            raise self.error(key, "a list of at least one mapping", value)
        path = ".".join(filter(None, (self._path, key)))
        return [Section(one, self._source, f"{path}[{place}]") for place, one in enumerate(value or ())]

    def close(self) -> None:
        """Raises BenchError for keys that nobody has asked for."""
        for key in self._values:
            if key not in self._taken:
                raise BenchError(f"{self.where(None)}: unknown key {key!r}; valid are {', '.join(self._taken)}")


def read_document(path: Path) -> dict[str, Any]:
    """A file's mapping; JSON if its name ends in .json, else YAML. Raises BenchError, for keys that come twice too."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read {path}: {error}") from None
    read = _read_json if path.suffix == ".json" else _read_yaml
    try:
        values = read(text)
    except ValueError as error:
        raise BenchError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise BenchError(f"{path} must hold a mapping of keys to values")
    return values


def _read_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique)


def _read_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _unique([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {error}") from None


def _unique(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} comes twice in one mapping")
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
