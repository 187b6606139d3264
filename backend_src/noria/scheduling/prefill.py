"""Prefill: how the tokens that a step may spend on prompts are shared among them. Small strategy objects."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol


class Prefill(Protocol):
    """is_chunked: a prompt may be computed over several steps."""

    is_chunked: bool

    def has_room(self, num_tokens: int, claims: SequenceOf[int], budget: int) -> bool:
        """Whether a prompt of `num_tokens` can start beside those whose uncomputed tokens are `claims`."""

    def shares(self, claims: SequenceOf[int], budget: int) -> list[int]:
        """Tokens for each prompt at this step; together at most `budget`, none more than it claims."""


class WholePrompts:
    """No chunks: a prompt is computed in one step or not at all, first come, first served."""

    is_chunked = False

    def has_room(self, num_tokens: int, claims: SequenceOf[int], budget: int) -> bool:
        return sum(claims) + num_tokens <= budget

    def shares(self, claims: SequenceOf[int], budget: int) -> list[int]:
        shares = []
        for claim in claims:
            shares.append(claim if claim <= budget else 0)
            budget -= shares[-1]
        return shares


class FirstComeChunks:
    """The first prompt takes what it can, the next the rest (Sarathi-Serve; TensorRT-LLM's FIRST_COME_FIRST_SERVED)."""

    is_chunked = True

    def has_room(self, num_tokens: int, claims: SequenceOf[int], budget: int) -> bool:
        return sum(claims) < budget

    def shares(self, claims: SequenceOf[int], budget: int) -> list[int]:
        shares = []
        for claim in claims:
            shares.append(min(claim, budget))
            budget -= shares[-1]
        return shares


class EqualProgress:
    """All prompts advance by the same number of tokens, or one more where that does not come out even; what a short one
    leaves goes to the others (TensorRT-LLM's EQUAL_PROGRESS)."""

    is_chunked = True

    def has_room(self, num_tokens: int, claims: SequenceOf[int], budget: int) -> bool:
        return len(claims) < budget

    def shares(self, claims: SequenceOf[int], budget: int) -> list[int]:
        shares = [0] * len(claims)
        # from the smallest claim on, each takes an equal part of what is left, or less if it needs less
        order = sorted(range(len(claims)), key=lambda index: claims[index])
        for num_done, index in enumerate(order):
            part = -(-budget // (len(claims) - num_done))
            shares[index] = min(claims[index], part)
            budget -= shares[index]
        return shares
