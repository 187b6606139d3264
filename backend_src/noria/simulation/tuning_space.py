"""Which configurations are worth a try, and which are one step away from another. Simulates nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.simulation.batch_former import DynamicBatching
from noria.simulation.requests import SimRequest

MAX_NUM_SEQS = tuple(2**power for power in range(10))
MAX_NUM_BATCHED_TOKENS = tuple(2**power for power in range(4, 15))
PREFILL_SHARES = (0.25, 0.5)
HEADROOMS = (0.0, 0.01, 0.05, 0.15)
DELAYS_S: Mapping[str, Sequence[float]] = {"static": (0.05, 0.2, 0.5, 2.0), "dynamic": (100e-6, 0.01, 0.05, 0.2)}
START_NUM_SEQS = (4, 16, 64)
# in powers of two: where a limit allows few slots, half as many may be no better, and a quarter be
MAX_DISTANCE = 3
# chunked_prefill, prefill_batching
PROMPTS = ((True, "mixed"), (True, "separate"), (False, "mixed"), (False, "separate"))

INFLIGHT_KNOBS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_prefill_tokens",
    "chunked_prefill",
    "prefill_batching",
    "prefill_order",
    "admission",
    "admission_headroom",
    "insertion",
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine, and for the closed modes the queue in front of it."""

    config: EngineConfig
    batching: DynamicBatching | None = None

    @property
    def knobs(self) -> dict[str, Any]:
        """The engine's keys that were chosen."""
        names = ("max_num_seqs",) if self.batching else INFLIGHT_KNOBS
        return {name: getattr(self.config, name) for name in names}

    def __str__(self) -> str:
        config, batching = self.config, self.batching
        if batching is not None:
            sizes = "/".join(map(str, batching.preferred_batch_sizes)) or "any"
            delay = f"{1e3 * batching.max_queue_delay_s:g} ms"
            return f"{config.batching_mode}: batches of {batching.max_batch_size} (preferred {sizes}), delay {delay}"
        prompts = f"{'chunked' if config.chunked_prefill else 'whole'} {config.prefill_batching}"
        words = [f"{config.max_num_seqs} slots", f"{config.max_num_batched_tokens} tokens", prompts, config.admission]
        words += [f"prefill {config.max_prefill_tokens}"] if config.max_prefill_tokens else []
        words += [f"headroom {config.admission_headroom:g}"]
        words += [config.prefill_order] if config.prefill_order != "fcfs" else []
        words += [config.insertion] if config.insertion != "immediate" else []
        return f"inflight: {', '.join(words)}"


class TuningSpace:
    """bases: the configuration of each mode to be tried, whose other keys stay as they are.

    num_blocks: of the KV cache. No candidate has more slots than there are blocks for: for requests of mean length in
    flight, for the longest in a closed batch, which holds all that its members may come to.
    Raises ConfigError if a request of the workload does not fit at all.
    """

    def __init__(self, bases: Mapping[str, EngineConfig], num_blocks: int, requests: Sequence[SimRequest]) -> None:
        self._bases = {mode: replace(config, preset=None) for mode, config in bases.items()}
        lengths = [request.num_prompt_tokens + request.max_output_tokens for request in requests]
        self._longest = max(lengths)
        mean = sum(request.num_prompt_tokens + request.num_output_tokens for request in requests) / len(requests)
        for config in self._bases.values():
            self._check(config, num_blocks)
        self._max_slots = {
            mode: num_blocks // -(-int(mean if mode == "inflight" else self._longest) // config.block_size)
            for mode, config in self._bases.items()
        }

    def starts(self) -> list[Candidate]:
        """Unlike each other, for a search to begin with."""
        found: list[Candidate] = []
        for mode, base in self._bases.items():
            found += self._inflight(base, {}) if mode == "inflight" else ()
            for slots in START_NUM_SEQS:
                size = min(slots, self._max_slots[mode])
                if mode == "inflight":
                    for chunked, batching in PROMPTS:
                        found += self._inflight(base, {**self._prompts(base, chunked, batching), "max_num_seqs": size})
                else:
                    found += self._closed(base, size, DELAYS_S[mode][0])
        return _unique(found)

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Those that differ by one knob; sizes by a factor of up to 2**MAX_DISTANCE, the nearest first."""
        if candidate.batching is not None:
            moves = self._closed_moves(candidate, candidate.batching)
        else:
            moves = (
                neighbour
                for changes in self._inflight_moves(candidate.config)
                for neighbour in self._inflight(candidate.config, changes)
            )
        return [neighbour for neighbour in _unique(moves) if neighbour != candidate]

    def _inflight_moves(self, config: EngineConfig) -> Iterator[dict[str, Any]]:
        for distance in range(1, MAX_DISTANCE + 1):
            for name, values in (("max_num_seqs", MAX_NUM_SEQS), ("max_num_batched_tokens", MAX_NUM_BATCHED_TOKENS)):
                yield from ({name: value} for value in _next_to(getattr(config, name), values, distance))
        yield from (self._prompts(config, chunked, batching) for chunked, batching in PROMPTS)
        yield {"max_prefill_tokens": None}
        yield from ({"max_prefill_tokens": int(share * config.max_num_batched_tokens)} for share in PREFILL_SHARES)
        yield from ({"prefill_order": order} for order in ("fcfs", "equal_progress") if config.chunked_prefill)
        yield from ({"admission": admission} for admission in ("max_utilization", "guaranteed_no_evict"))
        yield from ({"admission_headroom": value} for value in _next_to(config.admission_headroom, HEADROOMS))
        yield from ({"insertion": insertion} for insertion in ("immediate", "waiting_served_ratio"))

    def _prompts(self, config: EngineConfig, is_chunked: bool, batching: str) -> dict[str, Any]:
        """Whole prompts with a budget for the longest request, where there is less."""
        kind = {"chunked_prefill": is_chunked, "prefill_batching": batching}
        if is_chunked or config.max_num_batched_tokens >= self._longest:
            return kind
        budget = 2 ** (self._longest - 1).bit_length()
        return kind | {"max_num_batched_tokens": budget, "max_prefill_tokens": None}

    def _inflight(self, base: EngineConfig, changes: Mapping[str, Any]) -> Iterator[Candidate]:
        """The candidate, if it can be and serves every request."""
        try:
            config = replace(base, **changes)
        except ConfigError:
            return
        budget = min(config.max_num_batched_tokens, config.max_prefill_tokens or config.max_num_batched_tokens)
        # one that is preempted has its output computed again together with its prompt
        if not config.chunked_prefill and budget < self._longest:
            return
        if config.max_num_seqs <= self._max_slots["inflight"]:
            yield Candidate(config)

    def _closed_moves(self, candidate: Candidate, batching: DynamicBatching) -> Iterator[Candidate]:
        config = candidate.config
        size, delay_s = batching.max_batch_size, batching.max_queue_delay_s
        for distance in range(1, MAX_DISTANCE + 1):
            for other in _next_to(size, MAX_NUM_SEQS, distance):
                yield from self._closed(config, int(other), delay_s)
        for other_s in _next_to(delay_s, DELAYS_S[config.batching_mode]):
            yield from self._closed(config, size, other_s)
        for preferred in self._preferred(config.batching_mode, size):
            yield Candidate(config, replace(batching, preferred_batch_sizes=preferred))

    def _closed(self, base: EngineConfig, size: int, delay_s: float) -> Iterator[Candidate]:
        if size <= self._max_slots[base.batching_mode]:
            # the token budget is not for closed batches, but the configuration must be valid
            budget = max(base.max_num_batched_tokens, size)
            config = replace(base, max_num_seqs=size, max_num_batched_tokens=budget)
            yield Candidate(config, DynamicBatching(size, self._preferred(base.batching_mode, size)[0], delay_s))

    @staticmethod
    def _preferred(mode: str, size: int) -> list[tuple[int, ...]]:
        if mode == "static":
            return [(size,)]
        return [tuple(sorted({max(1, size // 2), size})), ()]

    def _check(self, config: EngineConfig, num_blocks: int) -> None:
        limit = min(num_blocks * config.block_size, config.max_model_len or num_blocks * config.block_size)
        if self._longest > limit:
            raise ConfigError(
                f"workload: a request may come to {self._longest} tokens, more than the {limit} that fit "
                f"(max_model_len, and {num_blocks} KV blocks of {config.block_size} tokens)"
            )


def _unique(candidates: Iterable[Candidate]) -> list[Candidate]:
    unique: list[Candidate] = []
    for candidate in candidates:
        if candidate not in unique:
            unique.append(candidate)
    return unique


def _next_to(value: float, values: Sequence[float], distance: int = 1) -> list[Any]:
    """The so many-th below and above, where there are so many. `values` grow."""
    below, above = [one for one in values if one < value], [one for one in values if one > value]
    return [side[distance - 1] for side in (below[::-1], above) if len(side) >= distance]
