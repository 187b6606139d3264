"""A step between its launch and its result, and what the engine asks of a runner for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from noria.scheduler_output import PendingStep, SchedulerOutput, StepResult


class Runner(Protocol):
    """Computes what the scheduler decided: `runtime.model_runner.ModelRunner`, or a fake in tests."""

    def execute(self, output: SchedulerOutput) -> StepResult: ...


class AheadRunner(Runner, Protocol):
    """One that can be given the next step before the last is over, and puts the last one's tokens into it."""

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Launches the step and waits for nothing. Steps are computed in the order of these calls."""


@dataclass(frozen=True, slots=True)
class StepAtOnce:
    """A PendingStep that nobody computes until it is asked for its result."""

    compute: Callable[[], StepResult]

    def result(self) -> StepResult:
        return self.compute()


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """A PendingStep that could not be launched."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """started_s: when its computing could begin: the scheduler had been asked, and the step before it was over.

    late_request_ids: rows whose request ended while it was launched; they are computed for nothing.
    """

    output: SchedulerOutput
    pending: PendingStep
    started_s: float
    late_request_ids: tuple[int, ...] = ()
