from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dtrain.planners.sharding.shards import Held, TensorInfo, divide, own, replicated

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
tensor_lists = st.lists(st.tuples(st.sampled_from(["F32", "BF16", "I64", "U8"]), shapes), max_size=12).map(
    lambda pairs: [TensorInfo(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(pairs)]
)


@given(tensor_lists, st.integers(1, 20))
def test_every_row_belongs_to_exactly_one_rank(tensors: list[TensorInfo], world: int) -> None:
    shards = divide(tensors, world)
    assert len(shards) == world
    for tensor in tensors:
        pieces = [piece for shard in shards for piece in shard if piece.tensor == tensor]
        edges = sorted((piece.start, piece.stop) for piece in pieces)
        assert edges[0][0] == 0
        assert edges[-1][1] == replicated([tensor], 1)[0].rows
        assert all(before[1] == after[0] for before, after in pairwise(edges))
        assert sum(piece.nbytes for piece in pieces) == tensor.nbytes


@given(tensor_lists, st.integers(1, 20))
def test_shards_are_even_up_to_a_row(tensors: list[TensorInfo], world: int) -> None:
    total = sum(tensor.nbytes for tensor in tensors)
    widest = max((box.row_bytes for box in replicated(tensors, 1)), default=0)
    for shard in divide(tensors, world):
        assert abs(sum(piece.nbytes for piece in shard) - total / world) <= widest + 1


@given(tensor_lists, st.integers(1, 20))
def test_order_is_kept(tensors: list[TensorInfo], world: int) -> None:
    pieces = [piece for shard in divide(tensors, world) for piece in shard]
    places = [(tensors.index(piece.tensor), piece.start) for piece in pieces]
    assert places == sorted(places)


def test_offsets_count_bytes_from_the_start_of_the_tensor() -> None:
    shards = divide([TensorInfo("w", "F32", (10, 3))], 2)
    assert [(p.start, p.stop, p.offset_bytes, p.nbytes) for shard in shards for p in shard] == [
        (0, 5, 0, 60),
        (5, 10, 60, 60),
    ]


def test_a_scalar_is_one_row_and_more_ranks_than_rows_leave_some_empty() -> None:
    shards = divide([TensorInfo("step", "F32", ())], 3)
    assert sum(len(shard) for shard in shards) == 1
    assert [piece.shape for shard in shards for piece in shard] == [()]


def test_what_is_held_alike_is_divided_among_those_who_hold_it() -> None:
    """Ranks 0 and 1 hold the left half, 2 and 3 the right half, and everybody a scalar."""
    wide, scalar = TensorInfo("w", "F32", (4, 6)), TensorInfo("step", "F32", ())
    stored = {}
    for rank in range(4):
        holders = (0, 1) if rank < 2 else (2, 3)
        held = [Held(wide, (0, 3 * (rank // 2)), (4, 3), holders), *replicated([scalar], 4)]
        stored[rank] = [(p.tensor.name, p.offset, p.shape, p.offset_bytes) for p in own(held, rank)]
    assert stored == {
        0: [("w", (0, 0), (2, 3), 0), ("step", (), (), 0)],
        1: [("w", (2, 0), (2, 3), 24)],
        2: [("w", (0, 3), (2, 3), 0)],
        3: [("w", (2, 3), (2, 3), 24)],
    }


@given(tensor_lists, st.integers(1, 20))
def test_replicated_tensors_are_owned_as_they_are_divided(tensors: list[TensorInfo], world: int) -> None:
    assert [own(replicated(tensors, world), rank) for rank in range(world)] == divide(tensors, world)
