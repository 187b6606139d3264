"""Typed reading of the fields of a JSON object that someone else wrote, with errors that name the field.

Knows nothing of what the fields mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

from noria.errors import ConfigError


class JsonFields:
    """The fields of one object. An absent field and a null one are the same; without a default both are an error.

    source: what the errors call the object, a file name for instance.
    """

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = values

    @classmethod
    def read(cls, path: Path) -> JsonFields:
        """The object in a file. Raises ConfigError if there is no such file or it holds something else."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a JSON object, not {type(values).__name__}")
        return cls(str(path), values)

    def get(self, name: str) -> Any:
        """The field as it is, None if absent."""
        return self.values.get(name)

    @overload
    def integer(self, name: str, default: int = ..., minimum: int = ...) -> int: ...
    @overload
    def integer(self, name: str, default: None, minimum: int = ...) -> int | None: ...
    def integer(self, name: str, default: Any = ..., minimum: int = 1) -> int | None:
        """A whole number of at least `minimum`."""
        value = self._value(name, default)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, f"a whole number of at least {minimum}")
        return value

    def number(self, name: str, default: Any = ...) -> float:
        """A finite number above 0."""
        value = self._value(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(name, "a number above 0")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` numbers above 0."""
        value = self._value(name, ...)
        if not isinstance(value, list) or len(value) != length:
            raise self.error(name, f"a list of {length} numbers")
        return tuple(JsonFields(self.source, {name: item}).number(name) for item in value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        for item in items:
            if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                raise self.error(name, "a token id or a list of token ids")
        return tuple(items)

    def error(self, name: str, valid: str) -> ConfigError:
        """The error that says what `name` must be."""
        value = self.values.get(name)
        found = f"not {value!r:.100}" if name in self.values else "and is missing"
        return ConfigError(f"{self.source}: {name} must be {valid}, {found}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is ...:
            raise self.error(name, "present")
        return default


@contextmanager
def errors_naming(source: str) -> Iterator[None]:
    """Puts `source` in front of a ConfigError that does not begin with it, for checks that do not know the file."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith(source) else f"{source}: {message}") from None
