"""The sampling kernels in the interpreter, token by token against the definition with a sort, in Python integers.

Both sides take exp from numpy here, so that weights are equal and so must be every token.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from noria.kernels.penalties import penalise, penalise_triton, restore
from noria.kernels.sampling import SamplingRows, sample_triton
from noria.kernels.sampling_groups import GROUP_SIZE, group_maxima
from noria.kernels.token_logprobs import MAX_COUNT, token_logprobs_triton
from noria.runtime.sampling import uniform
from noria.sampling_params import MAX_LOGPROBS
from support.quick_interpreter import quick_interpreter  # noqa: F401

pytestmark = [
    # the interpreter's own, for a loop whose bounds are tensors
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    # numpy's, for differences and quotients that are meant to be -inf, and for the NaN of what is then left out
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in:RuntimeWarning"),
]


@dataclasses.dataclass
class Row:
    seed: int = 7
    position: int = 11
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def min_weight(self) -> int:
        return int(self.min_p * 2**40)


def rows_of(rows: list[Row]) -> SamplingRows:
    return SamplingRows(
        seeds=torch.from_numpy(np.array([row.seed for row in rows], np.uint64).view(np.int64)),
        positions=torch.tensor([row.position for row in rows]),
        temperatures=torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        top_ks=torch.tensor([row.top_k for row in rows], dtype=torch.int32),
        top_ps=torch.tensor([row.top_p for row in rows], dtype=torch.float64),
        min_weights=torch.tensor([row.min_weight for row in rows]),
        needs_sums=any(row.temperature > 0 and row.top_k == 0 for row in rows),
    )


def draw(logits: Tensor, rows: list[Row], **tiles: int) -> list[int]:
    return sample_triton(logits, rows_of(rows), **tiles).tolist()


def exact_weights(x: np.ndarray, row: Row) -> np.ndarray:
    """[V] int64, of the tokens that the filters keep; by a sort."""
    weights = np.floor(np.exp((x - x.max()) / np.float32(row.temperature)) * np.float32(2**40)).astype(np.int64)
    if row.top_k:
        weights[x < np.sort(x)[-row.top_k]] = 0
    total = int(weights.sum())
    least = min(max(math.ceil(total * (1 - row.top_p) / len(x)), row.min_weight), total)
    order = np.lexsort((np.arange(len(x)), -weights))
    ranked = weights[order]
    before = ranked.cumsum() - ranked
    is_inside = (before.astype(np.float64) < total * row.top_p) & (ranked >= least)
    if row.top_p == 1:
        is_inside = ranked >= least
    weights[order[max(1, is_inside.sum()) :]] = 0
    return weights


def exact_token(x: np.ndarray, row: Row) -> int:
    if not np.isfinite(x.max()):
        return -1
    if row.temperature == 0:
        return int(x.argmax())
    weights = exact_weights(x, row)
    total = int(weights.sum())
    target = min(int(float(total) * uniform(row.seed, row.position)), total - 1)
    return int(np.searchsorted(weights.cumsum(), target, side="right"))


def exact_tokens(logits: Tensor, rows: list[Row]) -> list[int]:
    with np.errstate(all="ignore"):
        return [exact_token(x, row) for x, row in zip(logits.numpy(), rows, strict=True)]


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


KINDS = [
    Row(),
    Row(temperature=0.7, seed=2**64 - 1, position=2**31),
    Row(temperature=0.0),
    Row(temperature=0.05),
    Row(top_k=2),
    Row(top_k=50, temperature=1.5),
    Row(top_p=0.9),
    Row(top_p=0.4, temperature=2.0),
    Row(top_p=0.9999),
    Row(top_p=1e-300),
    Row(min_p=0.1),
    Row(min_p=1.0),
    Row(top_p=0.95, min_p=0.2, temperature=3.0),
    Row(top_k=40, top_p=0.8, min_p=0.01, temperature=1.2),
]


@pytest.mark.slow
def test_tokens_are_those_of_a_sort() -> None:
    """16 groups, in two tiles of maxima and two of listed groups."""
    logits = random_logits(len(KINDS), 16 * GROUP_SIZE - 27)
    assert draw(logits, KINDS, block=8, groups_per_tile=8) == exact_tokens(logits, KINDS)


@pytest.mark.slow
def test_tiles_change_nothing() -> None:
    """A tile for all, which is most of it empty, and tiles of few."""
    rows = [Row(), Row(temperature=0.0), Row(top_k=30, top_p=0.9), Row(top_p=0.7, temperature=2.0)]
    logits = random_logits(len(rows), 257, seed=1)
    assert draw(logits, rows) == draw(logits, rows, block=2, groups_per_tile=2) == exact_tokens(logits, rows)


@pytest.mark.slow
def test_a_vocabulary_of_more_than_one_program() -> None:
    """5,003 tokens: 79 groups, two programs of maxima and three tiles of listed groups."""
    rows = [Row(), Row(temperature=0.0), Row(top_k=90), Row(top_p=0.999, temperature=5.0)]
    logits = random_logits(len(rows), 5003, seed=2)
    assert draw(logits, rows) == exact_tokens(logits, rows)


@pytest.mark.slow
def test_random_rows() -> None:
    """Logits from few values too, so that thresholds fall on ties; and many at -inf."""
    generator = np.random.default_rng(5)
    logits = random_logits(9, 260, seed=3)
    logits[1::2] = logits[1::2].round()
    logits[::3, torch.from_numpy(generator.permutation(260)[:150])] = -math.inf
    rows = [
        Row(
            seed=int(generator.integers(2**64, dtype=np.uint64)),
            position=int(generator.integers(2**31)),
            temperature=float(generator.choice([0.3, 1.0, 4.0])),
            top_k=int(generator.choice([0, 7, 120, 259])),
            top_p=float(generator.choice([1.0, 0.97, 0.5])),
            min_p=float(generator.choice([0.0, 0.02])),
        )
        for _ in range(len(logits))
    ]
    assert draw(logits, rows) == exact_tokens(logits, rows)


def ends(row: Row) -> list[Row]:
    """The row with a u near 0, which draws the first token that is kept, and with one near 1, which draws the last."""
    seeds = sorted(range(2000), key=lambda seed: uniform(seed, row.position))
    return [dataclasses.replace(row, seed=seed) for seed in (seeds[0], seeds[-1])]


@pytest.mark.parametrize("share", [0.101, 0.5, 0.75, 0.999])
def test_top_p_takes_the_lowest_ids_of_equals(share: float) -> None:
    """Ten equals, in several groups."""
    logits = torch.full((2, 5 * GROUP_SIZE), -50.0)
    equals = torch.arange(10) * 31 + 5
    logits[:, equals] = 2.0
    assert draw(logits, ends(Row(top_p=share))) == [5, int(equals[math.ceil(10 * share) - 1])]


def test_top_k_keeps_all_that_equal_the_kth() -> None:
    logits = torch.tensor([[-9.0, 3.0, 2.0, 2.0, -9.0]]).repeat(2, 1)
    assert draw(logits, ends(Row(top_k=2, temperature=9.0))) == [1, 3]


def test_minus_zero_equals_zero() -> None:
    """By its bits -0.0 is below 0.0: it would be outside top_k, and not be the first of equals."""
    logits = torch.full((3, 70), -1e4)
    logits[:, [3, 68]] = torch.tensor([-0.0, 0.0])
    assert draw(logits, [*ends(Row(top_k=1)), Row(temperature=0.0)]) == [3, 68, 3]


@pytest.mark.slow
def test_the_largest_sum_there_is() -> None:
    """Equal logits, where sums pass 2^53, and u alone decides."""
    logits = torch.full((6, 9001), 3.5)
    rows = [*ends(Row()), *ends(Row(top_p=0.9)), Row(top_k=3), Row(temperature=0.0)]
    tokens = draw(logits, rows)
    assert tokens == exact_tokens(logits, rows)
    assert tokens[0] < 20
    assert 8980 < tokens[1] < 9001
    assert 8080 < tokens[3] <= 8100


@pytest.mark.slow
def test_draws_follow_the_weights() -> None:
    """Pearson's chi-square, four standard deviations; seeds are fixed, so that the figure never changes."""
    num_draws = 80
    logits = torch.tensor([0.0, 1.0, 0.5]).repeat(num_draws, 1)
    rows = [Row(seed=3, position=position) for position in range(num_draws)]
    counts = np.bincount(draw(logits, rows), minlength=3)
    weights = exact_weights(logits[0].numpy(), Row())
    expected = weights / weights.sum() * num_draws
    assert ((counts - expected) ** 2 / expected).sum() < 2 + 4 * math.sqrt(4)


def test_a_vanishing_temperature_takes_the_largest() -> None:
    rows = [Row(temperature=1.1754944e-38), Row(temperature=1.1754944e-38, top_k=9, top_p=0.9)]
    logits = random_logits(len(rows), 200)
    assert draw(logits, rows) == logits.argmax(-1).tolist()


def test_rows_that_are_not_finite_fail_alone() -> None:
    kinds = [Row(), Row(temperature=0.0), Row(top_k=5, top_p=0.9)]
    logits = random_logits(15, 130)
    good = exact_tokens(logits[:3], kinds)
    for index, (bad, token_id) in enumerate([(math.nan, 77), (-math.nan, 0), (math.inf, 129)]):
        logits[3 + 3 * index : 6 + 3 * index, token_id] = bad
    logits[12:] = -math.inf
    assert draw(logits, kinds * 5) == good + [-1] * 12


def test_all_but_one_token_at_minus_infinity() -> None:
    rows = [Row(), Row(temperature=0.0), Row(top_k=60), Row(top_p=0.5), Row(min_p=0.5)]
    logits = torch.full((len(rows), 139), -math.inf)
    logits[:, 138] = -3e38
    assert draw(logits, rows) == [138] * len(rows)


def test_a_row_does_not_depend_on_the_others() -> None:
    """vllm#5898, #51226: greedy and seeded tokens changed with what else was in the batch."""
    rows = [Row(), Row(top_k=50, top_p=0.9), Row(temperature=0.0), Row(min_p=0.1), Row(top_p=0.8)]
    logits = random_logits(len(rows), 300, seed=4)
    together = draw(logits, rows)
    order = [3, 1, 4, 0, 2]
    assert draw(logits[order], [rows[row] for row in order]) == [together[row] for row in order]
    assert [draw(logits[row : row + 1], rows[row : row + 1])[0] for row in range(len(rows))] == together


def test_maxima() -> None:
    logits = random_logits(3, 65 * GROUP_SIZE + 1)
    maxima = group_maxima(logits, torch.tensor([2, 0], dtype=torch.int32))
    padded = torch.nn.functional.pad(logits[[2, 0]], (0, GROUP_SIZE - 1), value=-math.inf)
    bits = padded.unflatten(-1, (-1, GROUP_SIZE)).amax(-1).view(torch.int32)
    assert torch.equal(maxima, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def entries(num_entries: int, num_logits: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    indices = torch.randperm(num_logits, generator=generator)[:num_entries]
    subtrahends = torch.randn(num_entries, generator=generator)
    subtrahends[::7] = math.inf
    return indices, torch.rand(num_entries, generator=generator) * 2 + 0.1, subtrahends


@pytest.mark.parametrize("num_entries", [1, 1025])
def test_penalties_and_bans_are_applied_and_undone(num_entries: int) -> None:
    logits = random_logits(3, 700)
    raw = logits.clone()
    expected = raw.clone()
    arguments = entries(num_entries, logits.numel())
    penalise(expected, *arguments)
    saved = penalise_triton(logits, *arguments)
    assert torch.equal(logits, expected)
    assert not torch.equal(logits, raw)
    restore(logits, arguments[0], saved)
    assert torch.equal(logits, raw)


def test_a_ban_does_not_hide_what_is_not_finite() -> None:
    logits = torch.tensor([[math.nan, math.inf, -math.inf, 1.0]])
    infinite = torch.full((4,), math.inf)
    penalise_triton(logits, torch.arange(4), torch.ones(4), infinite)
    assert logits[0, 0].isnan()
    assert logits[0, 1:].tolist() == [math.inf, -math.inf, -math.inf]


@pytest.mark.parametrize("vocab_size", [23, 4500])
def test_log_probabilities(vocab_size: int) -> None:
    logits = random_logits(4, vocab_size, seed=6)
    logits[1] = logits[1].round()
    token_ids = torch.tensor([5, 17, -1, 22])
    rows = torch.tensor([3, 0, 1, 2], dtype=torch.int32)
    counts = torch.tensor([20, 0, 9, 3], dtype=torch.int32)
    found = token_logprobs_triton(logits, token_ids, rows, counts)
    for index, (row, count) in enumerate(zip(rows.tolist()[:3], counts.tolist()[:3], strict=True)):
        exact = logits[row].double().log_softmax(-1)
        order = exact.sort(descending=True, stable=True).indices[:count]
        assert found.top_ids[index, :count].tolist() == order.tolist()
        # one rounding of the sum of so many float32
        torch.testing.assert_close(found.top_logprobs[index, :count].double(), exact[order], rtol=1e-6, atol=1e-6)
        token_id = int(token_ids[row])
        assert abs(found.logprobs[index].item() - exact[token_id].item()) < 1e-5
        assert found.ranks[index] == 1 + (logits[row] > logits[row, token_id]).sum()


def test_the_likeliest_reach_into_minus_infinity_by_id() -> None:
    """Ids past the vocabulary, and places past the end of the list, look like -inf too; they were taken for tokens."""
    logits = torch.full((1, 75), -math.inf)
    logits[0, 70:73] = torch.tensor([1.0, 2.0, 2.0])
    one = torch.ones(1, dtype=torch.int32)
    found = token_logprobs_triton(logits, torch.tensor([70]), one * 0, one * 6)
    assert found.top_ids[0, :6].tolist() == [71, 72, 70, 0, 1, 2]
    assert found.top_logprobs[0, 3:6].tolist() == [-math.inf] * 3


def test_a_client_cannot_ask_for_more_than_there_is_room_for() -> None:
    assert MAX_LOGPROBS <= MAX_COUNT


def test_what_the_kernels_do_not_take_is_refused_by_name() -> None:
    rows = rows_of([Row()] * 2)
    with pytest.raises(ValueError, match=r"logits must be contiguous .* float32, not .*float16"):
        sample_triton(torch.zeros(2, 8, dtype=torch.float16), rows)
    with pytest.raises(ValueError, match="logits must be contiguous"):
        sample_triton(torch.zeros(2, 1).expand(2, 8), rows)
    with pytest.raises(ValueError, match="1 to 4194304 tokens, not 4194305"):
        sample_triton(torch.zeros(1, 2**22 + 1), rows)
    with pytest.raises(ValueError, match=r"top_ks must be contiguous \[2\] torch.int32, not \[2\] torch.int64"):
        sample_triton(torch.zeros(2, 8), dataclasses.replace(rows, top_ks=rows.top_ks.long()))
    with pytest.raises(ValueError, match=r"seeds must be contiguous \[3\]"):
        sample_triton(torch.zeros(3, 8), rows)
