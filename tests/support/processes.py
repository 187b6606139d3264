"""Processes that others have started."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> set[int]:
    """Processes that any thread of `pid` has started and that are still there."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}
