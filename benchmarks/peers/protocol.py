"""What every peer's process does alike: read its task, load, warm up, be timed, and say what came of it as JSON.

A peer's module makes an object with `generate` and hands it to `main`, which runs as `python -m peers.MODULE TASK` with
TASK a JSON object of `Task`'s fields. Needs the standard library alone, as each peer has an environment of its own.
Standard output has two lines, READY and the result; whatever a library prints there goes to standard error.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

READY = "READY"
WARM_UP_TOKENS = 8
NUM_SINGLE_RUNS = 3


@dataclass(frozen=True)
class PeerRequest:
    """Greedy, and never ended by a token: the answer is max_tokens long."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """token_ids: all max_tokens of them. times_s: when each was there, on `time.perf_counter`'s clock."""

    token_ids: list[int]
    times_s: list[float]


@dataclass(frozen=True)
class PeerWorkload:
    """requests: all at once, in order. single: for its decode steps. prefills: one at a time, of one output token."""

    requests: tuple[PeerRequest, ...]
    single: PeerRequest
    prefills: tuple[PeerRequest, ...]

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        every = (*self.requests, self.single, *self.prefills)
        return max(len(request.prompt_token_ids) + request.max_tokens for request in every)


@dataclass(frozen=True)
class Task:
    """One run. workload: path of the file. slots: sequences in a step, at most. num_threads: compute threads.

    model: a Hugging Face directory. gguf: path of the file that it was made from. options: the peer's own.
    has_singles: whether `single` and `prefills` are measured too.
    """

    workload: str
    slots: int
    num_threads: int
    model: str
    gguf: str
    options: Mapping[str, str] = field(default_factory=dict)
    has_singles: bool = True


class Peer(Protocol):
    """settings: what the run depends on beside the task, for a reader."""

    settings: dict[str, Any]

    def generate(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        """The answers in the requests' order; all requests are there at once, at most `slots` run together."""

    def close(self) -> None:
        """End what would keep the process alive."""


def read_workload(path: Path) -> PeerWorkload:
    content = json.loads(path.read_text(encoding="utf-8"))
    requests, prefills = (tuple(map(_request, content[key])) for key in ("requests", "prefills"))
    return PeerWorkload(requests, _request(content["single"]), prefills)


def main(load: Callable[[Task, PeerWorkload], Peer], packages: Sequence[str]) -> None:
    """Run the task of the command line. packages: whose versions the result names."""
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # what libraries print, and their child processes, must not come between the lines
    os.dup2(2, 1)
    task = Task(**json.loads(sys.argv[1]))
    workload = read_workload(Path(task.workload))
    start_s = time.perf_counter()
    peer = load(task, workload)
    warm_up(peer, task, workload)
    print(READY, file=report, flush=True)
    result = {
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "settings": peer.settings,
        "slots": task.slots,
        "load_s": round(time.perf_counter() - start_s, 3),
        **measure(peer, workload.requests),
    }
    if task.has_singles:
        result |= measure_singles(peer, workload)
    peer.close()
    print(json.dumps(result), file=report, flush=True)


def warm_up(peer: Peer, task: Task, workload: PeerWorkload) -> None:
    """Full slots for a few steps, and each shape that is measured alone."""
    first = [
        PeerRequest(request.prompt_token_ids, min(request.max_tokens, WARM_UP_TOKENS))
        for request in workload.requests[: task.slots]
    ]
    peer.generate(first)
    if task.has_singles:
        peer.generate([PeerRequest(workload.single.prompt_token_ids, WARM_UP_TOKENS)])
        peer.generate(workload.prefills[:1])


def measure(peer: Peer, requests: Sequence[PeerRequest]) -> dict[str, Any]:
    """Raises RuntimeError if an answer has not the length that was asked for."""
    start_s = time.perf_counter()
    answers = peer.generate(requests)
    seconds = time.perf_counter() - start_s
    for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if not len(answer.token_ids) == len(answer.times_s) == request.max_tokens:
            raise RuntimeError(f"answer {index} has {len(answer.token_ids)} tokens, not {request.max_tokens}")
    num_output_tokens = sum(request.max_tokens for request in requests)
    gaps = sorted(later - t for answer in answers for t, later in zip(answer.times_s, answer.times_s[1:], strict=False))
    return {
        "num_prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "num_output_tokens": num_output_tokens,
        "seconds": seconds,
        "output_tokens_per_s": num_output_tokens / seconds,
        "ttft_median_s": median(answer.times_s[0] for answer in answers) - start_s,
        # pooled over all requests, so long answers weigh more
        "icl_median_s": median(gaps) if gaps else None,
        "icl_p99_s": gaps[math.ceil(0.99 * len(gaps)) - 1] if gaps else None,
        "first_answer_digest": digest(answers[0].token_ids),
    }


def measure_singles(peer: Peer, workload: PeerWorkload) -> dict[str, Any]:
    """Decode tokens/s of one sequence, its prompt's step left out; prompt tokens/s of one prompt. Medians."""
    decodes, prefills = [], []
    for _ in range(NUM_SINGLE_RUNS):
        (answer,) = peer.generate([workload.single])
        decodes.append((len(answer.times_s) - 1) / (answer.times_s[-1] - answer.times_s[0]))
    for request in workload.prefills:
        start_s = time.perf_counter()
        (answer,) = peer.generate([request])
        prefills.append(len(request.prompt_token_ids) / (answer.times_s[0] - start_s))
    return {"batch1_tokens_per_s": median(decodes), "prefill_tokens_per_s": median(prefills)}


def digest(token_ids: Sequence[int]) -> str:
    """Of SHA-256, the first 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()[:16]


def workload_document(workload: PeerWorkload) -> dict[str, Any]:
    return asdict(workload)


def _request(values: Mapping[str, Any]) -> PeerRequest:
    return PeerRequest(tuple(values["prompt_token_ids"]), values["max_tokens"])
