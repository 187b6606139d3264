"""Makes a workload of its spec: draws each class, puts them in order of time and writes their prompts.

What is drawn comes from streams of chance of their own, so that what one key says changes nothing that another does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from noria_bench.drafts import Draft, draw_class, read_rows, recorded_times, scaled
from noria_bench.errors import BenchError
from noria_bench.prompts import (
    PromptWriter,
    Span,
    TextTokenizer,
    TokenPrompts,
    WordPrompts,
    count_tokens,
    cut_text,
    read_text,
)
from noria_bench.schedule import Slot, arrange, at_rate
from noria_bench.traces import MOONCAKE_BLOCK_TOKENS
from noria_bench.workload import RequestClass, WorkItem, Workload, seed_workload
from noria_bench.workload_spec import TRACE, ClassSpec, WorkloadSpec


def build_workload(
    spec: WorkloadSpec,
    *,
    seed: int = 0,
    scale: float = 1.0,
    rate: float | None = None,
    num_requests: int | None = None,
    tokenizer: TextTokenizer | None = None,
) -> Workload:
    """The same arguments give the same workload, and another rate the same requests at other times.

    scale: multiplies all lengths; none becomes shorter than 1. Prompts that a trace brings along are cut, not extended.
    rate: instead of the file's, requests a second over all classes: a closed loop becomes Poisson, classes with rates
        keep their proportions, a trace its pattern. num_requests: instead of the file's.
    tokenizer: the served model's, for prompts of exact lengths; without one they are about as long as asked.
    To make an open loop closed: dataclasses.replace(spec, arrivals=Arrivals()).
    Raises BenchError.
    """
    if not 0 < scale < math.inf:
        raise BenchError(f"scale must be a finite number above 0, not {scale}")
    if num_requests is not None:
        spec = replace(spec, num_requests=num_requests)
    rows = {
        index: read_rows(one, lambda text: count_tokens(text, tokenizer), spec.num_requests)
        for index, one in enumerate(spec.classes)
        if one.trace is not None
    }
    if spec.num_requests is None and len(rows) == len(spec.classes) == 1:
        spec = replace(spec, num_requests=len(rows[0]))
    is_replay = spec.arrivals.law == TRACE
    recorded = {index: recorded_times(spec.classes[index], own) for index, own in rows.items()} if is_replay else {}
    if rate is not None:
        spec = at_rate(spec, rate, recorded)
    slots = arrange(spec, seed, recorded)
    if len(slots) <= spec.num_warm_up:
        raise BenchError(f"num_warm_up must be less than the number of requests, {len(slots)}, not {spec.num_warm_up}")
    if spec.is_seed:
        items = list(seed_workload(len(slots), scale, seed).items)
    else:
        nums = [sum(slot.class_index == index for slot in slots) for index in range(len(spec.classes))]
        drafts = [draw_class(one, nums[index], rows.get(index), seed, scale) for index, one in enumerate(spec.classes)]
        items = _Author(spec, seed, scale, tokenizer).items(slots, drafts)
    return Workload(
        items=tuple(
            replace(item, due_s=slot.due_s, is_warm_up=place < spec.num_warm_up)
            for place, (item, slot) in enumerate(zip(items, slots, strict=True))
        ),
        sampling=spec.sampling,
        classes=tuple(RequestClass(one.name, one.slo) for one in spec.classes),
    )


class _Author:
    """Gives each draft its text. Own texts are numbered from 0 up and shared ones from -1 down: all are to differ, and
    none is to change with how many there are."""

    def __init__(self, spec: WorkloadSpec, seed: int, scale: float, tokenizer: TextTokenizer | None) -> None:
        self._spec = spec
        self._seed = seed
        self._scale = scale
        self._tokenizer = tokenizer
        self._shared: dict[tuple[int, str, int], int] = {}
        self._writer: PromptWriter | None = None
        for index, one in enumerate(spec.classes):
            for group in range(one.shared_prefix.num_groups if one.shared_prefix else 0):
                self._shared_identity(index, "group", group)

    def items(self, slots: Sequence[Slot], drafts: Sequence[Sequence[Draft]]) -> list[WorkItem]:
        """drafts: by class, in the order in which the class's slots come."""
        remaining = [iter(own) for own in drafts]
        return [
            self._item(place, slot.class_index, next(remaining[slot.class_index])) for place, slot in enumerate(slots)
        ]

    def _item(self, place: int, class_index: int, draft: Draft) -> WorkItem:
        one = self._spec.classes[class_index]
        num_prompt_tokens = draft.num_prompt_tokens
        if draft.row is not None and draft.row.prompt is not None:
            prompt = cut_text(draft.row.prompt, num_prompt_tokens, self._tokenizer)
            num_prompt_tokens = count_tokens(prompt, self._tokenizer)
        else:
            prompt = self._write(self._spans(place, class_index, one, draft))
        return WorkItem(
            prompt=prompt,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=draft.max_tokens,
            cancel_after_tokens=draft.cancel_after_tokens,
            request_class=one.name,
            sampling=one.sampling,
        )

    def _spans(self, place: int, class_index: int, one: ClassSpec, draft: Draft) -> list[Span]:
        spans: list[Span] = []
        remaining = draft.num_prompt_tokens
        if draft.prefix_group is not None and one.shared_prefix is not None:
            # a prompt that is no longer than the prefix still has a last token of its own
            num_shared = min(scaled(one.shared_prefix.num_tokens, self._scale), remaining - 1)
            spans.append(Span(self._shared_identity(class_index, "group", draft.prefix_group), num_shared))
            remaining -= num_shared
        # rounded down, so that the blocks do not outgrow a prompt whose length is scaled as a whole
        block = max(1, int(MOONCAKE_BLOCK_TOKENS * self._scale))
        for hash_id in draft.row.hash_ids if draft.row is not None else ():
            num_tokens = min(block, remaining)
            spans.append(Span(self._shared_identity(class_index, "hash", hash_id), num_tokens))
            remaining -= num_tokens
        spans.append(Span(place, remaining))
        return [span for span in spans if span.num_tokens > 0]

    def _shared_identity(self, class_index: int, kind: str, number: int) -> int:
        return self._shared.setdefault((class_index, kind, number), -1 - len(self._shared))

    def _write(self, spans: Sequence[Span]) -> str:
        if self._writer is None:
            self._writer = self._new_writer()
        return self._writer.write(spans)

    def _new_writer(self) -> PromptWriter:
        if self._tokenizer is not None:
            return TokenPrompts(self._tokenizer, read_text(self._spec.text), self._seed)
        if self._spec.text is not None:
            raise BenchError("text: cutting prompts from a file needs the served model's tokenizer")
        return WordPrompts(self._seed)
