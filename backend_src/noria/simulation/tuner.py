"""Searches for the configuration that keeps an SLO at the highest rate of arrivals, by simulating it.

First a ladder: unlike candidates at a growing rate, until the next rung would break the SLO for all. Then a climb: the
survivors, and what is one knob away from the best, are tried at slightly more than the best rate so far, one short run
each, and only who passes is searched for its own highest rate. At the end the finalists run long, and the winner under
several seeds. Every run of a seed sends the same requests, at arrivals that only the rate stretches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from noria.errors import ConfigError
from noria.simulation.trial import Bench, Measurement, Trial
from noria.simulation.tuning_space import Candidate, TuningSpace

# of a rate that is looked for
TOLERANCE = 0.025
STEP = 1.15
# by how much a challenger must carry more than the best
MIN_GAIN = 1.03
MAX_ROUNDS = 8
NUM_FINALISTS = 3
# of the best rate, at which the front is measured
FRONT_SHARES = (0.9, 0.75, 0.5, 0.25)
# latencies as close as this are the same
FRONT_TOLERANCE = 0.01
SEEDS = (0, 1, 2)

RunAll = Callable[[Callable[[Trial], Measurement], Sequence[Trial]], Iterable[Measurement]]


@dataclass(frozen=True, slots=True)
class TuningResult:
    """rates: the highest at which `best` keeps the SLO, by seed, in requests a second. rate: at which it does under
    every seed. winner: its run at that rate for each seed.

    front: runs that keep the SLO and that no other beats in rate, ttft_p95 and tpot_p95 together, the highest rate
        first. All but the winner's are short.
    """

    best: Candidate
    rate: float
    rates: tuple[float, ...]
    winner: tuple[Measurement, ...]
    front: tuple[Measurement, ...]
    num_trials: int


@dataclass(slots=True)
class RateSearch:
    """Looks for the highest rate at which the SLO is kept, from that of `trial` on: steps until one side breaks it and
    the other does not, then halves. low: the highest known to keep it, high: the lowest known not to."""

    trial: Trial
    low: float = 0.0
    high: float = math.inf

    @property
    def is_done(self) -> bool:
        return self.high <= (1 + TOLERANCE) * self.low

    def note(self, is_kept: bool) -> None:
        """What came of `trial`, which becomes the next one."""
        rate = self.trial.rate
        if is_kept:
            self.low, rate = rate, rate * STEP
        else:
            self.high, rate = rate, rate / STEP
        if self.low and self.high < math.inf:
            rate = math.sqrt(self.low * self.high)
        self.trial = replace(self.trial, rate=rate)


class Tuner:
    """run_all: like `map`; may run trials side by side. say: told in a sentence what has been found."""

    def __init__(
        self, space: TuningSpace, bench: Bench, run_all: RunAll = map, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._space = space
        self._bench = bench
        self._run_all = run_all
        self._say = say
        self._num_trials = 0

    def run(self) -> TuningResult:
        """Raises ConfigError, saying what is broken by how much, if nothing that was tried keeps the SLO."""
        first = self._first_rung()
        kept = [one.trial.candidate for one in first if one.is_kept]
        leaders, rate = self._climb(*self._ladder(kept, first[0].trial.rate))
        best, rate = self._final(leaders, rate)
        self._say(f"{rate:.3g} requests/s: {best}; now under other seeds")
        rates = (rate, *self._max_rates([RateSearch(Trial(best, rate, seed, is_long=True)) for seed in SEEDS[1:]]))
        rate, winner = self._common_rate(best, min(rates))
        others = [*leaders, *self._space.neighbours(best)[:4], *_best_closed(first)]
        front = self._front([one for one in others if one != best], winner[0])
        return TuningResult(best, rate, rates, tuple(winner), tuple(front), self._num_trials)

    def _first_rung(self) -> list[Measurement]:
        """Of unlike candidates, the best first, at a rate at which at least one keeps the SLO."""
        rate = self._bench.usual_rate
        measured = self._measure(self._space.starts(), rate)
        while not measured[0].is_kept and rate > self._bench.lowest_rate:
            rate = max(rate / 5, self._bench.lowest_rate)
            measured = self._measure(self._space.starts(), rate)
        while not measured[0].is_kept:
            # one knob at a time from the least bad
            better = self._measure(self._space.neighbours(measured[0].trial.candidate), rate)
            if better[0].excess >= measured[0].excess:
                raise ConfigError(self._refusal(measured[0]))
            measured = [better[0], *measured]
        return measured

    def _refusal(self, least_bad: Measurement) -> str:
        key, rate = least_bad.worst_key, least_bad.trial.rate
        return (
            f"no configuration keeps {self._bench.slo}: even at {rate:.2g} requests/s, where hardly two requests meet, "
            f"the best has {key}={least_bad.figures[key]:.3g}, {least_bad.excess:.3g} times what is asked for "
            f"({least_bad.trial.candidate})"
        )

    def _ladder(self, survivors: list[Candidate], rate: float) -> tuple[list[Candidate], float]:
        """Who keeps the SLO at the highest rung that anybody does, the best first, and that rung."""
        while higher := self._keeping(survivors, 2 * rate):
            survivors, rate = higher, 2 * rate
        self._say(f"{len(survivors)} configurations keep the SLO at {rate:.3g} requests/s, none at {2 * rate:.3g}")
        return survivors, rate

    def _climb(self, passing: list[Candidate], rate: float) -> tuple[list[Candidate], float]:
        """The successive best, the last first, and the last one's highest rate."""
        leaders: list[Candidate] = []
        for _ in range(MAX_ROUNDS):
            best = passing[0]
            (rate,) = self._max_rates([RateSearch(Trial(best, rate))])
            self._say(f"{rate:.3g} requests/s: {best}")
            leaders.insert(0, best)
            challengers = passing[1:] + [one for one in self._space.neighbours(best) if one not in passing]
            passing = self._keeping(challengers, MIN_GAIN * rate)
            if not passing:
                break
            rate *= MIN_GAIN
        return leaders, rate

    def _final(self, leaders: list[Candidate], rate: float) -> tuple[Candidate, float]:
        """Who carries most in long runs: in short ones the luckiest leads."""
        finalists = leaders[:NUM_FINALISTS]
        rates = self._max_rates([RateSearch(Trial(one, rate, is_long=True)) for one in finalists])
        return max(zip(finalists, rates, strict=True), key=lambda pair: pair[1])

    def _common_rate(self, best: Candidate, rate: float) -> tuple[float, list[Measurement]]:
        """The highest rate up to `rate` at which every seed keeps the SLO: who keeps it at one may break it below."""
        while True:
            trials = [Trial(best, rate, seed, is_long=True) for seed in SEEDS]
            winner = self._run(trials)
            if all(one.is_kept for one in winner):
                return rate, winner
            rate /= 1 + TOLERANCE

    def _max_rates(self, searches: Sequence[RateSearch]) -> list[float]:
        """The highest rate that each finds. Raises ConfigError if there is none down to the lowest."""
        while pending := [search for search in searches if not search.is_done]:
            for search, run in zip(pending, self._run([search.trial for search in pending]), strict=True):
                search.note(run.is_kept)
                if search.trial.rate < self._bench.lowest_rate:
                    candidate = search.trial.candidate
                    raise ConfigError(f"{candidate} keeps {self._bench.slo} in some runs, in others at no rate")
        return [search.low for search in searches]

    def _front(self, others: Sequence[Candidate], winner: Measurement) -> list[Measurement]:
        candidates = list(others)
        runs = [winner]
        for share in FRONT_SHARES:
            runs += self._measure([winner.trial.candidate, *candidates], share * winner.trial.rate)
        front: list[Measurement] = []
        for run in runs:
            if run.is_kept and not any(_beats(other, run) for other in front):
                front.append(run)
        return front

    def _keeping(self, candidates: Sequence[Candidate], rate: float) -> list[Candidate]:
        return [one.trial.candidate for one in self._measure(candidates, rate) if one.is_kept]

    def _measure(self, candidates: Sequence[Candidate], rate: float) -> list[Measurement]:
        """Short runs, the one that keeps the SLO best first."""
        return sorted(self._run([Trial(one, rate) for one in candidates]), key=lambda one: one.excess)

    def _run(self, trials: Sequence[Trial]) -> list[Measurement]:
        self._num_trials += len(trials)
        return list(self._run_all(self._bench, trials))


def _best_closed(measured: Sequence[Measurement]) -> list[Candidate]:
    """The best of each closed mode, for comparison."""
    best: dict[str, Candidate] = {}
    for one in measured:
        if one.trial.candidate.batching is not None:
            best.setdefault(one.trial.candidate.config.batching_mode, one.trial.candidate)
    return list(best.values())


def _beats(one: Measurement, other: Measurement) -> bool:
    """At no lower a rate, with latencies that are no longer, or hardly."""
    return one.trial.rate >= other.trial.rate and all(
        one.figures[key] <= (1 + FRONT_TOLERANCE) * other.figures[key] for key in ("ttft_p95", "tpot_p95")
    )
