"""The stage of exactness: its units, each of which gives one or a few rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from gpu.attention_checks import attention_checks, distant_blocks_check, variants
from gpu.checks import DTYPE_NAMES, Check, Outcome, evaluate
from gpu.device import Gpu
from gpu.engines import engine_config, run_engine, seed_mix
from gpu.model_checks import Comparison, build_sequences, compare
from gpu.op_checks import op_checks
from gpu.random_models import random_decoder, random_runner
from gpu.rows import Row
from gpu.sampling_checks import sampling_checks
from gpu.sizes import TINY, Sizes
from gpu.stages import Unit
from gpu.transformers_models import transformers_model

STAGE = "exactness"
# wide enough that the likeliest next tokens of the tiny model are well apart
TINY_STD = 0.2
# less than four of the longer requests take, so that some are driven out and computed again
_NUM_KV_BLOCKS = 10


def dtypes(gpu: Gpu, is_quick: bool) -> list[torch.dtype]:
    if gpu.is_interpreted:
        # it computes products in bfloat16 wrongly
        return [torch.float16]
    return [torch.bfloat16, torch.float32] if is_quick else [torch.bfloat16, torch.float16, torch.float32]


def units(sizes: Sizes, gpu: Gpu, is_quick: bool) -> Iterator[Unit]:
    if not gpu.is_interpreted:
        yield Unit("attention over distant blocks", lambda: _rows("attention", [distant_blocks_check(gpu)], gpu), 3)
    for dtype in dtypes(gpu, is_quick):
        for variant in variants(dtype, gpu.is_interpreted):
            name = f"attention {variant.name}"
            yield Unit(name, partial(_rows, name, attention_checks(variant, gpu), gpu), 2)
        name = f"norms, rope, copies and products in {DTYPE_NAMES[dtype]}"
        yield Unit(name, partial(_rows, name, op_checks(dtype, gpu), gpu), 10)
    yield Unit("sampling", lambda: _rows("sampling", sampling_checks(gpu), gpu), 6)
    yield Unit("tokens of Transformers", lambda: [_transformers_row(gpu)], 15)
    cases = [("tiny", torch.float32)] if gpu.is_interpreted else [("tiny", torch.float32), ("tiny", torch.bfloat16)]
    if not gpu.is_interpreted:
        cases.append(("1B", torch.bfloat16))
    for model, dtype in cases:
        for is_deterministic in (True,) if gpu.is_interpreted else (True, False):
            mode = "deterministic" if is_deterministic else "ordinary"
            name = f"logits of the {model} model in {DTYPE_NAMES[dtype]}, {mode}"
            yield Unit(name, _logits(name, model, dtype, is_deterministic, sizes, gpu), 8)


def _rows(name: str, checks: Iterable[Check], gpu: Gpu) -> list[Row]:
    """One row for all checks that were met, and one for each that was not."""
    outcomes, rows = [], []
    for check in checks:
        try:
            outcomes.append(evaluate(check, gpu))
        except Exception as error:
            gpu.synchronize()
            message = f"{type(error).__name__}: {error}"
            rows.append(Row(STAGE, f"{name}: {check.name}", is_exact=False, error=message))
    for outcome in outcomes:
        if not outcome.is_met:
            rows.append(Row(STAGE, f"{name}: {outcome.name}", outcome.error, is_exact=False, note=_bound(outcome)))
    worst = max((o for o in outcomes if o.tolerance), key=lambda o: o.error / (o.tolerance or 1), default=None)
    note = f"{len(outcomes)} checks" + ("" if worst is None else f", largest error {worst.error:.2g}{_bound(worst)}")
    details = {"checks": {o.name: {"error": o.error, "tolerance": o.tolerance} for o in outcomes}}
    return [*rows, Row(STAGE, name, is_exact=not rows, note=note, details=details)]


def _bound(outcome: Outcome) -> str:
    if outcome.tolerance is None:
        return " of the numbers differ, whose bits should be the same"
    return f" of {outcome.tolerance:.2g} allowed ({outcome.name})"


def _logits(
    name: str, model: str, dtype: torch.dtype, is_deterministic: bool, sizes: Sizes, gpu: Gpu
) -> Callable[[], Sequence[Row]]:
    def run() -> Sequence[Row]:
        config = TINY if model == "tiny" else sizes.models[model]
        if gpu.is_interpreted:
            config = replace(config, num_layers=1)
        found = compare(build_sequences(config, dtype, sizes.invariance_tokens, is_deterministic, gpu))
        details = {comparison.way: comparison.document() for comparison in found}
        # of these alone the same bits are promised without `deterministic`
        promised = found if is_deterministic else [x for x in found if x.way in ("decoded by a graph of 1", "again")]
        # the interpreter's products are numpy's, whose rows do not all round alike
        limit = 1e-4 if gpu.is_interpreted else 0.0
        broken = [x for x in promised if (x.difference if gpu.is_interpreted else x.differing) > limit]
        note = "; ".join(f"{x.way}: {x.differing:.2g} of the logits differ" for x in broken) or _note(found)
        diverging = max(x.diverging for x in found)
        return [Row(STAGE, name, 100 * diverging, "% diverge", is_exact=not broken, note=note, details=details)]

    return run


def _note(found: Sequence[Comparison]) -> str:
    worst = max(found, key=lambda x: (x.diverging, x.difference))
    if worst.differing == 0.0:
        return f"the same bits in {len(found)} ways"
    return (
        f"share of tokens with another likeliest successor, at worst {worst.way}; "
        f"logits there differ by {worst.difference:.2g} of their root mean square"
    )


def _transformers_row(gpu: Gpu) -> Row:
    """Greedy tokens of the engine, with chunks, preemptions and graphs, against `generate` of one prompt at a time."""
    num_requests, scale = (3, 0.03) if gpu.is_interpreted else (12, 0.2)
    items = seed_mix(num_requests, TINY.vocab_size, scale=scale, seed=3)
    decoder = random_decoder(TINY, torch.float32, gpu.device, std=TINY_STD)
    config = engine_config("inflight", 4, 24, num_kv_blocks=_NUM_KV_BLOCKS)
    found = []
    for has_cuda_graphs in (False,) if gpu.is_interpreted else (False, True):
        runner = random_runner(decoder, _NUM_KV_BLOCKS, gpu, has_cuda_graphs)
        if has_cuda_graphs:
            runner.warm_up(4, 24)
        found.append(run_engine(runner, config, items).token_ids)
    model = transformers_model(TINY, torch.float32, gpu.device, TINY_STD)
    expected = []
    for item in items:
        ids = torch.tensor([item.prompt_token_ids], device=gpu.device)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=item.max_tokens
            )
        expected.append(out[0, ids.shape[1] :].tolist())
    num_tokens = sum(map(len, expected))
    num_wrong = sum(
        a != b for run in found for x, y in zip(run, expected, strict=True) for a, b in zip(x, y, strict=True)
    )
    distinct = len({token for answer in expected for token in answer})
    note = f"{num_tokens} tokens of {len(items)} requests, {distinct} distinct; {num_wrong} differ"
    return Row(STAGE, "tokens of Transformers on a tiny model in fp32", is_exact=num_wrong == 0, note=note)
