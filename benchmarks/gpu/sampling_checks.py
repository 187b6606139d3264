"""The sampling kernels against the definition in torch, on the CPU, at the vocabulary of Llama 3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpu.checks import Check
from gpu.device import Gpu
from noria.runtime.sampling import sample
from noria.runtime.triton_sampling import TritonSampler
from noria.sampling_params import SamplingParams
from noria.scheduler_output import SampledToken, SamplingInput

_PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.25},
)
# exp differs by some bits between the two, which tells where a random number lies within 1e-6 of a boundary
_MAX_SHARE = 0.04


def sampling_checks(gpu: Gpu, device: torch.device | None = None) -> Iterator[Check]:
    """device: meta, to compile; else the GPU's."""
    device = device or gpu.device
    vocab_size, num_rows = (304, 4) if gpu.is_interpreted else (128256, 64)
    params = (_PARAMS[0], _PARAMS[6], _PARAMS[1], _PARAMS[4]) if gpu.is_interpreted else _PARAMS
    generator = torch.Generator().manual_seed(7)
    on_cpu = torch.randn(num_rows, vocab_size, generator=generator) * 3
    logits = on_cpu.to(device)
    prompt = torch.randint(0, vocab_size, (50,), generator=generator).tolist()
    inputs = [
        SamplingInput(SamplingParams(**params[row % len(params)]), 1000 + row, 50 + row, prompt, prompt[:9], [3, 5])
        for row in range(num_rows)
    ]

    def drawn() -> Tensor:
        return TritonSampler().enqueue(logits, inputs).token_ids.clone()

    def defined() -> Tensor:
        tokens = [result.token_id for result in sample(on_cpu, inputs) if isinstance(result, SampledToken)]
        return torch.tensor(tokens, dtype=torch.int64).to(device)

    yield Check(f"tokens of {num_rows} rows", drawn, defined, max_share=_MAX_SHARE)
    greedy = [row for row in range(num_rows) if inputs[row].params.is_greedy]
    yield Check("tokens of greedy rows", lambda: drawn()[greedy], lambda: defined()[greedy])
    row = 3

    def alone() -> Tensor:
        return TritonSampler().enqueue(logits[row : row + 1].clone(), inputs[row : row + 1]).token_ids.clone()

    yield Check("a row alone and among others", alone, lambda: drawn()[row : row + 1])

    def untouched() -> Tensor:
        TritonSampler().enqueue(logits, inputs)
        return logits

    yield Check("logits are put back", untouched, lambda: on_cpu.to(device))
    yield _logprobs_check(on_cpu, device)


def _logprobs_check(on_cpu: Tensor, device: torch.device) -> Check:
    params = SamplingParams(temperature=0.0, logprobs=5)
    inputs = [SamplingInput(params, 0, 10) for _ in range(2)]

    def flat(results: list[SampledToken]) -> Tensor:
        rows = [[float(r.rank or 0), r.logprob or 0.0, *(x for pair in r.top_logprobs for x in pair)] for r in results]
        return torch.tensor(rows, dtype=torch.float64)

    def found() -> Tensor:
        pending = TritonSampler().enqueue(on_cpu[:2].clone().to(device), inputs)
        if device.type == "meta":
            return pending.token_ids
        return flat(pending.result())  # type: ignore[arg-type]

    # ids, which are large, are a part of each row, whose root mean square they set: 1e-9 of it is some 1e-5
    return Check("log-probabilities", found, lambda: flat(sample(on_cpu[:2].clone(), inputs)), 1e-8)  # type: ignore[arg-type]
