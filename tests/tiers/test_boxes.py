"""Boxes: whether pieces make up a tensor, against counting element by element; and what headers say of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.tiers.format import boxes as room
from dtrain.tiers.format.boxes import MAX_CUT, Box, inside, tile
from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.format.layout import Version
from dtrain.tiers.format.manifest import ShardFile, build, parse_manifest, shard_file_from_json
from dtrain.tiers.format.shardfile import Entry, Shard, parse_header

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def counted(whole: Sequence[int], boxes: Sequence[Box]) -> bool:
    """The plain way: how many boxes lie over each element."""
    count = np.zeros(tuple(whole), int)
    for offset, shape in boxes:
        if any(begin + size > length for begin, size, length in zip(offset, shape, whole, strict=True)):
            return False
        count[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))] += 1
    return bool(boxes) and bool((count == 1).all())


@st.composite
def cuts(draw: st.DrawFn, whole: tuple[int, ...]) -> list[Box]:
    """A tiling: a box is cut in two somewhere, and some of the parts again; parts may be empty."""
    boxes: list[Box] = [((0,) * len(whole), whole)]
    for _ in range(draw(st.integers(0, 6)) if whole else 0):
        offset, shape = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(whole) - 1))
        at = draw(st.integers(0, shape[d]))
        boxes.append((offset, (*shape[:d], at, *shape[d + 1 :])))
        boxes.append(((*offset[:d], offset[d] + at, *offset[d + 1 :]), (*shape[:d], shape[d] - at, *shape[d + 1 :])))
    return draw(st.permutations(boxes))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_boxes_that_make_up_a_tensor_are_told_from_those_that_do_not(data: st.DataObject) -> None:
    whole = data.draw(SHAPES)
    boxes = data.draw(cuts(whole))
    assert tile(whole, boxes)
    number = data.draw(st.integers(0, len(boxes) - 1))
    offset, shape = boxes[number]
    moved = [draw_near(data, begin) for begin in offset], [draw_near(data, size) for size in shape]
    for changed in (
        [*boxes[:number], *boxes[number + 1 :]],
        [*boxes, boxes[number]],
        [*boxes[:number], moved, *boxes[number + 1 :]],
    ):
        assert tile(whole, changed) == counted(whole, changed)


def draw_near(data: st.DataObject, number: int) -> int:
    return max(0, number + data.draw(st.sampled_from([0, 0, 1, -1, 2])))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_boxes_of_the_right_volume_are_told_too(data: st.DataObject) -> None:
    """Two halves of the right size may lie on each other."""
    whole = (4, 4)
    halves = [((a, b), size) for size in ((2, 4), (4, 2), (2, 2)) for a, b in product(range(3), repeat=2)]
    boxes = data.draw(st.lists(st.sampled_from(halves), min_size=1, max_size=5))
    assert tile(whole, boxes) == counted(whole, boxes)


def test_a_tiling_that_no_straight_cut_divides_is_one() -> None:
    wheel: list[Box] = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert tile((3, 3), wheel)
    assert not tile((3, 3), [*wheel[:4], ((0, 0), (1, 1))])


@pytest.mark.parametrize(
    ("whole", "boxes", "right"),
    [
        ((), [((), ())], True),
        ((), [], False),
        ((), [((), ()), ((), ())], False),
        ((0, 4), [((0, 0), (0, 4))], True),
        ((0, 4), [], False),
        ((3,), [((0,), (3,)), ((3,), (0,))], True),
        ((3,), [((0,), (3,)), ((4,), (0,))], False),
        ((3,), [((0, 0), (3, 1))], False),
        ((3,), [((-1,), (3,)), ((2,), (1,))], False),
    ],
)
def test_edges(whole: tuple[int, ...], boxes: list[Box], right: bool) -> None:
    assert tile(whole, boxes) is right
    assert all(inside(whole, box) for box in boxes) or not right


def test_a_tensor_cut_in_too_many_dimensions_is_refused() -> None:
    corners: list[Box] = [(at, (1,) * 5) for at in product(range(2), repeat=MAX_CUT + 1)]
    with pytest.raises(ValueError, match=f"cut in {MAX_CUT + 1} dimensions"):
        tile((2,) * 5, corners)
    assert tile((2,) * 6, [((*at, 0, 0), (1, 1, 1, 1, 2, 2)) for at in product(range(2), repeat=MAX_CUT)])


@pytest.mark.parametrize(("columns", "per_piece"), [(1, 4), (100, 7)])
def test_the_work_grows_with_the_pieces_and_no_faster(
    columns: int, per_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: boxes and changes looked at."""
    looked = 0
    real = room._cancel

    def counting(signed: Mapping[Any, int]) -> bool:
        nonlocal looked
        looked += len(signed)
        return real(signed)

    monkeypatch.setattr(room, "_cancel", counting)
    for rows in (50, 200):
        looked = 0
        assert tile((rows, columns), [((r, c), (1, 1)) for r, c in product(range(rows), range(columns))])
        assert looked <= per_piece * rows * columns


def entry_of(name: str, shape: Sequence[int], offset: Sequence[int], whole: Sequence[int]) -> Entry:
    return Entry(name, "U8", tuple(shape), tuple(offset), tuple(whole), math.prod(shape))


BLOCK = Shard(1, 4, "feed", (entry_of("model.a", (2, 3), (4, 3), (6, 6)), entry_of("model.s", (), (), ())))


def test_a_header_gives_boxes_back_as_they_were() -> None:
    assert parse_header(BLOCK.header()[8:], "x") == BLOCK


def test_a_header_of_before_boxes_is_still_read() -> None:
    table = json.loads(BLOCK.header()[8:])
    del table["__metadata__"]["boxes"]
    table["__metadata__"]["rows"] = json.dumps({"model.a": [4, [6, 3]], "model.s": [0, []]})
    old = parse_header(json.dumps(table).encode(), "x")
    assert old.entries == (entry_of("model.a", (2, 3), (4, 0), (6, 3)), BLOCK.entries[1])


@pytest.mark.parametrize("offset", [[5, 3], [4, 4], [4], [4, 3, 0], [-1, 3], [True, 3], "43", None])
def test_a_piece_outside_its_tensor_is_refused(offset: object) -> None:
    table = json.loads(BLOCK.header()[8:])
    table["__metadata__"]["boxes"] = json.dumps({"model.a": [offset, [6, 6]], "model.s": [[], []]})
    with pytest.raises(Unreadable):
        parse_header(json.dumps(table).encode(), "x")


DIGEST = "0" * 32


def file_of(rank: int, *entries: Entry) -> ShardFile:
    return ShardFile(f"rank-{rank:05d}.safetensors", rank, 1, DIGEST, DIGEST, entries, (DIGEST,) * len(entries))


def test_the_description_of_a_shard_goes_to_another_node_and_back() -> None:
    shard = file_of(1, *BLOCK.entries)
    assert shard_file_from_json(json.loads(json.dumps(shard.to_json()))) == shard


def test_a_manifest_takes_a_tensor_cut_in_two_dimensions_and_refuses_one_with_a_hole() -> None:
    shards = [
        file_of(2 * r + c, entry_of("model.a", (3, 3), (3 * r, 3 * c), (6, 6))) for r, c in product(range(2), repeat=2)
    ]
    for rank, shard in enumerate(shards):
        shards[rank] = file_of(rank, *shard.entries, entry_of("rng.python", (1,), (0,), (1,)))
    meta: dict[str, Any] = {"data": {"samples": 0}}
    manifest = build(Version(1, 2), 4, "feed", meta, shards)
    folder = Version(1, 2).dirname
    assert parse_manifest(manifest.to_bytes(), folder, "x") == manifest
    rng = entry_of("rng.python", (1,), (0,), (1,))
    for wrong in (
        entry_of("model.a", (3, 3), (0, 3), (6, 6)),
        entry_of("model.a", (3, 3), (3, 3), (6, 7)),
        entry_of("model.a", (3, 2), (3, 3), (6, 6)),
    ):
        with pytest.raises(Unreadable, match=r"model\.a"):
            build(Version(1, 2), 4, "feed", meta, [*shards[:3], file_of(3, wrong, rng)])


def test_two_pieces_of_a_tensor_in_one_file_are_refused() -> None:
    """A file names each tensor once."""
    halves = [entry_of("model.a", (3,), (at,), (6,)) for at in (0, 3)]
    with pytest.raises(Unreadable, match="in one file"):
        build(Version(1, 2), 1, "feed", {"data": {"samples": 0}}, [file_of(0, *halves)])
