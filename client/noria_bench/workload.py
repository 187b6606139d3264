"""What is sent in a measurement: prompts, and how long each answer must be.

Knows no tokenizer. Prompts are sentences of common words that are one token each in the usual byte-pair vocabularies,
so that their length comes out close to what was asked; the server counts the true one.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

SEED_OUTPUT_TOKENS = (20, 50, 100, 500)
SEED_PROMPT_MEDIAN = 100
SEED_PROMPT_SIGMA = 0.7
SEED_PROMPT_RANGE = (16, 512)

_NOUNS = (
    "river water wheel garden market teacher village mountain letter house road bridge book song story child doctor "
    "farmer window table forest island ship train city street school king queen bird horse fish tree stone light "
    "night morning winter summer field wall door room boat cloud storm flower machine engine paper box clock glass"
)
_ADJECTIVES = (
    "old new small large quiet bright cold warm long short dark green blue red white black happy simple strange "
    "heavy young early late deep high rich poor clean strong"
)
_VERBS = (
    "finds holds carries follows leaves reaches shows opens closes turns moves keeps brings takes sees needs meets "
    "loves builds makes watches covers fills passes crosses"
)
_PREPOSITIONS = "near under over behind beyond beside across through before after without with from"
COMMON_WORDS = tuple(f"{_NOUNS} {_ADJECTIVES} {_VERBS} {_PREPOSITIONS}".split())


@dataclass(frozen=True)
class WorkItem:
    """One request.

    num_prompt_tokens: as intended, without what the server adds (such as a beginning-of-text token).
    due_s: when it is to be sent, in seconds after the start; None as soon as the load allows (a closed loop).
    cancel_after_tokens: the client leaves after so many; None lets it finish.
    request_class: name of a `RequestClass` of the workload. sampling: over the workload's, for this request alone, such
        as priority, user or seed. is_warm_up: sent like the others, but not summed up.
    """

    prompt: str
    num_prompt_tokens: int
    max_tokens: int
    due_s: float | None = None
    cancel_after_tokens: int | None = None
    request_class: str = "default"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    is_warm_up: bool = False


@dataclass(frozen=True)
class RequestClass:
    """Requests that are reported, and held to objectives, together. slo: as `slo.parse_slo` reads it; None has none."""

    name: str
    slo: str | None = None


@dataclass(frozen=True)
class Workload:
    """sampling: what all items ask of the sampler, besides their own max_tokens. Triton forms batches only of requests
    with the same inputs; which sampling parameters are set makes no difference, as they are one input."""

    items: tuple[WorkItem, ...]
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0, "ignore_eos": True})
    classes: tuple[RequestClass, ...] = (RequestClass("default"),)

    @property
    def num_output_tokens(self) -> int:
        """That the whole workload yields where nothing ends an answer early."""
        return sum(item.max_tokens for item in self.items)

    def digest(self) -> str:
        """SHA-256 of all that is sent and when, as hexadecimal digits."""
        values = [dict(self.sampling), [asdict(item) for item in self.items], [asdict(one) for one in self.classes]]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def seed_workload(num_requests: int = 32, scale: float = 1.0, seed: int = 0) -> Workload:
    """Outputs of 20, 50, 100 and 500 tokens in equal parts, in shuffled order; prompts log-normal with a median of 100
    tokens, kept within 16 to 512. The same arguments give the same workload.

    scale: multiplies all lengths, which keeps their proportions; none becomes shorter than 1.
    """
    if num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, not {num_requests}")
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number above 0, not {scale}")
    rng = random.Random(seed)
    outputs = [SEED_OUTPUT_TOKENS[i % len(SEED_OUTPUT_TOKENS)] for i in range(num_requests)]
    rng.shuffle(outputs)
    # all lengths are drawn before any text, of which a smaller scale needs less: they do not depend on the scale
    prompts = [_prompt_length(rng) for _ in range(num_requests)]
    lengths = [
        (_scaled(prompt, scale), _scaled(output, scale)) for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return Workload(tuple(WorkItem(prompt_text(rng, prompt), prompt, output) for prompt, output in lengths))


def _prompt_length(rng: random.Random) -> float:
    low, high = SEED_PROMPT_RANGE
    return min(max(rng.lognormvariate(math.log(SEED_PROMPT_MEDIAN), SEED_PROMPT_SIGMA), low), high)


def _scaled(length: float, scale: float) -> int:
    return max(1, round(length * scale))


def prompt_text(rng: random.Random, num_tokens: int) -> str:
    """English sentences of about num_tokens tokens; the last one may break off."""
    return "".join(islice(word_tokens(rng), num_tokens)).removeprefix(" ")


def word_tokens(rng: random.Random) -> Iterator[str]:
    """Without end: words with the space before them, as byte-pair vocabularies hold them, and full stops."""
    nouns, adjectives, verbs = _NOUNS.split(), _ADJECTIVES.split(), _VERBS.split()
    prepositions = _PREPOSITIONS.split()
    while True:
        subject, verb, thing, place = rng.choice(nouns), rng.choice(verbs), rng.choice(nouns), rng.choice(nouns)
        adjective, preposition = rng.choice(adjectives), rng.choice(prepositions)
        for word in ("The", adjective, subject, verb, "a", thing, preposition, "the", place):
            yield f" {word}"
        yield "."
