"""Texts from results as they may be shown: errors, labels and titles come from anywhere."""

from __future__ import annotations

import unicodedata

MAX_LENGTH = 400
# control characters, halves of surrogate pairs, and marks that turn the direction of what follows
_UNFIT = {"Cc", "Cs", "Cn", "Co"}
_DIRECTIONS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_NAMES = {"inflight": "in-flight"}


def plain(text: object, max_length: int = MAX_LENGTH) -> str:
    """One line of printable characters; what cannot be shown is U+FFFD, what is too long ends in an ellipsis."""
    line = " ".join(str(text).split())
    fit = "".join(
        "\ufffd" if unicodedata.category(one) in _UNFIT or one in _DIRECTIONS else one for one in line[: max_length + 1]
    )
    return fit if len(fit) <= max_length else fit[: max_length - 1] + "…"


def shortened(text: str, max_length: int) -> str:
    """Without its middle where it is too long: names often differ in their ends."""
    if len(text) <= max_length:
        return text
    num_tail = (max_length - 1) // 2
    return f"{text[: max_length - 1 - num_tail]}…{text[-num_tail:]}"


def label_name(label: str, max_length: int = 60) -> str:
    return shortened(plain(_NAMES.get(label, label)), max_length)
