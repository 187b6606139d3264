import pytest

from noria.scheduling.block_pool import BlockPool


def test_allocates_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(1) == [3]
    assert pool.allocate(0) == []


def test_freed_blocks_come_back_in_order_of_freeing() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    pool.free([2])
    pool.free([0, 3])
    assert pool.allocate(3) == [2, 0, 3]


@pytest.mark.parametrize("blocks", [[0, 0], [1, 3]], ids=["twice in one call", "never held"])
def test_a_bad_free_changes_nothing(blocks: list[int]) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(blocks)
    assert pool.num_held == 2
    pool.check_integrity()
