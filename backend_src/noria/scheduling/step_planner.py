"""Decides one step: who computes how many tokens, who joins, who must leave. Policies answer, this acts.

In a mixed step decodes come first, one token each, then prompts share what is left (the stall-free batches of
Sarathi-Serve). Separate steps are for prompts or for decodes.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from noria.errors import EngineFailure
from noria.scheduling.kv_cache_manager import KVCacheManager
from noria.scheduling.policies import Policies
from noria.scheduling.running_batch import RunningBatch
from noria.scheduling.step_plan import StepPlan
from noria.scheduling.waiting_order import INPUT_WEIGHT
from noria.scheduling.waiting_queue import WaitingQueue
from noria.sequence import Sequence, SequenceStatus


class StepPlanner:
    """Moves sequences between the queue and the batch, and gives tokens and blocks to those in the batch."""

    def __init__(self, policies: Policies, cache: KVCacheManager, queue: WaitingQueue, batch: RunningBatch) -> None:
        self._policies = policies
        self._cache = cache
        self._queue = queue
        self._batch = batch
        self._now = 0.0
        self._num_steps_without_insertion = 0
        self._was_prefill = False
        # the last step left somebody waiting though there were slots
        self.is_blocked = False

    def plan(self, now: float) -> StepPlan:
        """now: seconds, for the ageing of priorities."""
        self._now = now
        policies = self._policies
        plan = StepPlan(policies.max_num_batched_tokens, policies.max_prefill_tokens)
        decodes = [sequence for sequence in self._batch.sequences if _is_decode(sequence)]
        if policies.has_separate_prefill:
            self._plan_separately(decodes, plan)
        else:
            self._decode(decodes, plan)
            # whoever joined now would take the blocks for want of which somebody has just left
            if not plan.preempted:
                self._admit(plan)
            self._compute_prompts(plan)
        self._num_steps_without_insertion = 0 if plan.admitted else self._num_steps_without_insertion + 1
        self.is_blocked = self._batch.has_free_slot and len(self._queue) > 0
        return plan

    def would_preempt(self) -> bool:
        """Whether the blocks do not suffice for one more token for each decode."""
        cache, sequences = self._cache, self._batch.sequences
        if len(sequences) <= cache.num_unpromised:
            return False
        return sum(_is_decode(one) and cache.must_claim(one) for one in sequences) > cache.num_unpromised

    def _plan_separately(self, decodes: list[Sequence], plan: StepPlan) -> None:
        """The two take turns: a stream of prompts must not stop the decodes."""
        if not (self._was_prefill and decodes):
            self._admit(plan)
            self._compute_prompts(plan)
        self._was_prefill = bool(plan.num_tokens)
        if not plan.num_tokens:
            self._decode(decodes, plan)
        if not plan.num_tokens:
            self._compute_prompts(plan)

    def _decode(self, decodes: list[Sequence], plan: StepPlan) -> None:
        block_size = self._cache.block_size
        for sequence in decodes:
            # unless an older one has driven it out
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            has_slot = sequence.num_computed_tokens < len(sequence.block_table) * block_size
            if has_slot or self._grow(sequence, plan):
                plan.give(sequence, 1)

    def _grow(self, sequence: Sequence, plan: StepPlan) -> bool:
        """A block for its next token, at the cost of less urgent and later ones. False when it was itself the last."""
        while not self._cache.allocate_slots(sequence, 1):
            victim = max(self._preemptible(), key=self._victim_order)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _admit(self, plan: StepPlan) -> None:
        """Waiting sequences join in their order; nobody overtakes a head that must wait."""
        policies, batch = self._policies, self._batch
        num_waiting = len(self._queue)
        if not num_waiting:
            return
        if not policies.insertion.may_insert(batch.num_live, num_waiting, self._num_steps_without_insertion):
            return
        prompts = self._prompts(plan)
        while (candidate := self._queue.head(self._now)) is not None:
            if not policies.mode.can_join(candidate, batch.sequences):
                return
            less_urgent = self._less_urgent(candidate, plan)
            if not batch.has_free_slot and not less_urgent:
                return
            prefix = batch.find_prefix(candidate)
            num_computed = candidate.num_computed_tokens or len(prefix) * self._cache.block_size
            num_tokens = candidate.num_tokens - num_computed
            urgency = self._queue.urgency(candidate, self._now)
            # less urgent prompts get what this one leaves
            claims = [
                prompt.num_uncomputed_tokens
                for prompt in prompts
                if prompt.status is SequenceStatus.RUNNING and self._queue.urgency(prompt, self._now) <= urgency
            ]
            if not policies.prefill.has_room(num_tokens, claims, plan.prefill_budget):
                return
            if not self._fits(candidate, prefix) and not self._make_room(candidate, prefix, less_urgent, plan):
                return
            self._queue.remove(candidate)
            batch.join(candidate, policies.admission.num_reserved_tokens(candidate), prefix, plan)
            if candidate.first_scheduled_s is None:
                candidate.first_scheduled_s = self._now
                self._queue.charge(candidate, INPUT_WEIGHT * candidate.num_prompt_tokens)
            prompts.append(candidate)

    def _fits(
        self, candidate: Sequence, prefix: list[int], without: SequenceOf[Sequence] = (), num_freed: int = 0
    ) -> bool:
        """Whether there are a slot, tokens and blocks for `candidate`, but for the sequences in `without`, which would
        free `num_freed` blocks."""
        policies, batch, cache = self._policies, self._batch, self._cache
        if len(batch.sequences) - len(without) >= batch.max_num_seqs:
            return False
        others = [sequence for sequence in batch.sequences if sequence not in without]
        reserved = policies.admission.num_reserved_tokens
        max_total = policies.max_batch_total_tokens
        if max_total is not None and sum(map(reserved, [*others, candidate])) > max_total:
            return False
        num_free = cache.num_unpromised + num_freed
        return cache.num_blocks_to_join(reserved(candidate), prefix) + self._headroom(len(others)) <= num_free

    def _headroom(self, num_others: int) -> int:
        """Blocks that must stay unpromised beside so many others, so that these can grow.

        While anyone who was preempted waits, a block more for each: else he is let in just to be driven out again.
        """
        if not num_others or self._policies.mode.is_closed:
            return 0
        share = int(self._policies.admission_headroom * self._cache.pool.num_blocks)
        can_grow = self._policies.admission.can_preempt and self._queue.num_preempted
        return share + (num_others if can_grow else 0)

    def _less_urgent(self, candidate: Sequence, plan: StepPlan) -> list[Sequence]:
        """Running sequences that may be driven out for `candidate`, the first to go first."""
        if not self._policies.admission.can_preempt:
            return []
        # whoever is of no lower level and came no later is at least as urgent, and that is all of them as a rule
        level, arrival = candidate.level, candidate.arrival
        if all(sequence.level <= level and sequence.arrival < arrival for sequence in self._batch.sequences):
            return []
        urgency = self._queue.urgency(candidate, self._now)
        victims = [
            one
            for one in self._preemptible()
            if self._queue.urgency(one, self._now) > urgency and one not in plan.admitted
        ]
        return sorted(victims, key=self._victim_order, reverse=True)

    def _make_room(self, candidate: Sequence, prefix: list[int], less_urgent: list[Sequence], plan: StepPlan) -> bool:
        """Drive out as many less urgent sequences as let `candidate` in; if all of them do not, none."""
        num_freed = self._cache.num_blocks_freed(less_urgent, prefix)
        if not less_urgent or not self._fits(candidate, prefix, less_urgent, num_freed[-1]):
            return False
        for num_victims in range(1, len(less_urgent) + 1):
            victims = less_urgent[:num_victims]
            if self._fits(candidate, prefix, victims, num_freed[num_victims - 1]):
                for victim in victims:
                    self._preempt(victim, plan)
                return True
        return False

    def _compute_prompts(self, plan: StepPlan) -> None:
        prompts = sorted(self._prompts(plan), key=lambda prompt: self._queue.urgency(prompt, self._now))
        claims = [prompt.num_uncomputed_tokens for prompt in prompts]
        shares = self._policies.prefill.shares(claims, plan.prefill_budget)
        for sequence, share in zip(prompts, shares, strict=True):
            if not share:
                continue
            if not self._cache.allocate_slots(sequence, share):
                raise EngineFailure(f"request {sequence.request_id} was promised blocks that are not there")
            plan.give(sequence, share)

    def _prompts(self, plan: StepPlan) -> list[Sequence]:
        """Sequences with no tokens in this step yet that have more to compute than a decode, or have just joined."""
        if len(plan.num_tokens) == len(self._batch.sequences):
            return []
        return [
            sequence
            for sequence in self._batch.sequences
            if not sequence.is_finished
            and not sequence.is_complete
            and sequence.request_id not in plan.num_tokens
            and (not _is_decode(sequence) or sequence in plan.admitted)
        ]

    def _preemptible(self) -> list[Sequence]:
        """Those that joined with all they may need reserved cannot run short, and have been driven out enough; and
        those that are complete are about to leave."""
        max_preemptions = self._policies.max_preemptions
        return [
            sequence
            for sequence in self._batch.sequences
            if not sequence.is_finished and not sequence.is_complete and sequence.num_preemptions < max_preemptions
        ]

    def _victim_order(self, sequence: Sequence) -> tuple[int, int]:
        """The greatest goes first: the least urgent, and of these the latest to arrive."""
        return self._queue.urgency(sequence, self._now), sequence.arrival

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Back to its place in the queue; nothing that it has given to its reader is computed into output again."""
        plan.take_back(sequence)
        if self._batch.leave_early(sequence):
            plan.swapped_out.append(sequence)
        sequence.num_preemptions += 1
        self._queue.add(sequence)
        plan.preempted.append(sequence)


def _is_decode(sequence: Sequence) -> bool:
    """One token to compute, the last that was drawn."""
    return (
        sequence.status is SequenceStatus.RUNNING
        and len(sequence.token_ids) - sequence.num_computed_tokens == 1
        and len(sequence.token_ids) > sequence.num_prompt_tokens
        and not sequence.is_complete
    )
