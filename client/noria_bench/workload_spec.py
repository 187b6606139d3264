"""What a workload's file says, checked: how requests are to be drawn, and when they come.

Nothing is drawn here; `workload_build` makes requests of it, `workload_file` makes it from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noria_bench.lengths import LengthLaw
from noria_bench.ramps import RampPiece

CLOSED, POISSON, GAMMA, CONSTANT, TRACE = ARRIVAL_LAWS = ("closed", "poisson", "gamma", "constant", "trace")
SEED = "seed"
DEFAULT_SAMPLING: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """law: of ARRIVAL_LAWS; closed sends as soon as the load allows.

    rate: requests a second; None where the classes or a ramp have rates. burstiness: coefficient of variation of the
    gaps, of gamma alone. speed: of trace alone: 2 makes the same arrivals come twice as fast.
    ramp: how the rate changes with time; the workload ends with it.
    """

    law: str = CLOSED
    rate: float | None = None
    burstiness: float = 1.0
    speed: float = 1.0
    ramp: tuple[RampPiece, ...] = ()

    @property
    def is_open(self) -> bool:
        return self.law != CLOSED


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A `share` of a class's prompts begins with the same num_tokens, or all but its last where it has no more.

    num_groups: of so many prefixes a prompt has one.
    """

    num_tokens: int
    share: float = 1.0
    num_groups: int = 1


@dataclass(frozen=True, slots=True)
class Cancels:
    """A `share` of a class's requests is cancelled after so many tokens, or one before its last if that is sooner."""

    share: float
    after_tokens: LengthLaw


@dataclass(frozen=True, slots=True)
class TraceSource:
    """path: see `traces.read_trace`, also for the limits. format: None is recognised by the content."""

    path: Path
    format: str | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    is_clipping: bool = True


@dataclass(frozen=True, slots=True)
class ClassSpec:
    """Requests of one kind. Lengths come from both laws, or from the trace.

    share: weight among the classes. rate: its own, instead of a share of the whole; in requests a second.
    slo: as `slo.parse_slo` reads it. sampling: over the workload's; priority, user and cache_salt are in it.
    """

    name: str = "default"
    share: float = 1.0
    rate: float | None = None
    prompt_tokens: LengthLaw | None = None
    output_tokens: LengthLaw | None = None
    trace: TraceSource | None = None
    slo: str | None = None
    cancels: Cancels | None = None
    shared_prefix: SharedPrefix | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """num_requests: None is as many as come in duration_s, in a ramp or in the traces. num_warm_up: of these the first,
    which are sent and not summed up. is_seed: it is `workload.seed_workload`, and has no classes.
    text: what prompts are cut from; None is the text shipped with the package.
    document: what the file said, with paths from the working directory, for a result to keep:
        `workload_file.parse_workload` makes an equal spec of it.
    """

    num_requests: int | None
    classes: tuple[ClassSpec, ...] = ()
    arrivals: Arrivals = field(default_factory=Arrivals)
    duration_s: float | None = None
    num_warm_up: int = 0
    sampling: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_SAMPLING))
    text: Path | None = None
    is_seed: bool = False
    document: Mapping[str, Any] = field(default_factory=dict)
