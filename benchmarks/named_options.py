"""`NAME:KEY=VALUE,...`, as options of the benchmarks name their variants."""

from __future__ import annotations


def named_options(option: str, text: str) -> tuple[str, dict[str, str]]:
    """The name, and values by key; none after NAME alone. Raises ValueError, naming `option`."""
    name, _, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    if not name or any(not key or not is_equal for key, is_equal, _ in pairs):
        raise ValueError(f"{option} must be NAME:KEY=VALUE,... and not {text!r}")
    return name, {key: value for key, _, value in pairs}
