"""Counts the kernels that Triton compiles in this process, and those that it finds in its cache."""

from __future__ import annotations

from typing import Any

from gpu.rows import Row
from noria.kernels.language import IS_INTERPRETED


class Compilations:
    def __init__(self, stage: str) -> None:
        self._stage = stage
        self.num_kernels = 0
        self._missed: list[str] = []
        self._seconds = 0.0
        if not IS_INTERPRETED:
            from triton import knobs

            knobs.compilation.listener = self._note

    def row(self) -> Row:
        names = ", ".join(sorted(set(self._missed)))
        note = f"{len(self._missed)} of them compiled in {self._seconds:.0f} s{': ' + names if names else ''}"
        return Row(self._stage, "kernels of this stage", float(self.num_kernels), note=note)

    def _note(self, *, src: Any, times: Any, cache_hit: bool, **_others: Any) -> None:
        self.num_kernels += 1
        if not cache_hit:
            self._missed.append(src.name)
            self._seconds += times.total / 1e6
