"""Whatever the boxes in which the same tensors are stored: one digest, one export; and nothing else passes for it."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from tests.tiers.build import RUN_ID, Place, digest_of, fill, value_of
from tests.tiers.test_boxes import cuts
from tests.tiers.test_damage import with_digest

from dtrain.cli.checkpoints.verify import check
from dtrain.planners.sharding.shards import Held, TensorInfo, own
from dtrain.specs.dtypes import DTYPE_BYTES
from dtrain.tiers.format.boxes import Box, inside
from dtrain.tiers.format.digest import digest, state_digest
from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.format.layout import MANIFEST, Version
from dtrain.tiers.format.shardfile import Entry, Shard
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.reading import recovery
from dtrain.tiers.reading import stretches as room
from dtrain.tiers.reading.export import SINGLE, export
from dtrain.tiers.reading.recovery import Opened, contents, find, in_memory, open_candidate
from dtrain.tiers.reading.whole import facts_of, read_whole
from dtrain.tiers.stores.directory import DirectoryStore

STEP = 3
FOLDER = Version(1, STEP).dirname
RANDOM = Entry("rng.python", "U8", (9,), (0,), (9,), 9)

Layout = list[list[Entry]]
"""Per rank, what it stores."""


def piece(info: TensorInfo, box: Box) -> Entry:
    offset, shape = map(tuple, box)
    return Entry(info.name, info.dtype, shape, offset, info.shape, math.prod(shape) * DTYPE_BYTES[info.dtype])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[TensorInfo], Layout]:
    """Some tensors, each cut into boxes anyhow, which go to ranks anyhow; some ranks get nothing."""
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=4))
    tensors = [TensorInfo(f"model.t{n}", draw(st.sampled_from(["F32", "BF16", "U8"])), s) for n, s in enumerate(shapes)]
    boxes = [draw(cuts(shape)) for shape in shapes]
    world = max(map(len, boxes)) + draw(st.integers(0, 2))
    layout: Layout = [[] for _ in range(world)]
    for info, parts in zip(tensors, boxes, strict=True):
        for rank, box in zip(draw(st.permutations(range(world))), parts, strict=False):
            layout[rank].append(piece(info, box))
    return tensors, layout


def store(place: Place, tensors: Sequence[TensorInfo], layout: Layout) -> Path:
    """Commit the tensors in memory and on disk; returns the folder there."""
    for rank, entries in enumerate(layout):
        shard = Shard(rank, len(layout), RUN_ID, (*entries, RANDOM))
        fill(place.memory, shard, {info.name: info for info in tensors}, 0, STEP)
    (records,) = place.memory.whole().values()
    return place.root / place.disk.write(*gather(place.memory, records)).folder


@contextmanager
def a_place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as folder:
        yield Place(Path(folder))


def on_disk(place: Place) -> Opened:
    return open_candidate(find(None, [place.disk]).candidates[0])


def plain_digest(tensors: Sequence[TensorInfo]) -> str:
    return state_digest((info.name, info.dtype, info.shape, digest(value_of(info, STEP))) for info in tensors)


@settings(max_examples=60, deadline=None)
@given(drawn=layouts())
def test_digest_export_and_verify_are_the_same_in_any_layout(drawn: tuple[list[TensorInfo], Layout]) -> None:
    tensors, layout = drawn
    with a_place() as place:
        store(place, tensors, layout)
        for opened in (on_disk(place), open_candidate(in_memory(place.memory)[0])):
            told: list[int] = []
            assert read_whole(opened, facts_of(opened), told.append) == plain_digest(tensors) == digest_of(opened)
            assert sum(told) == sum(info.nbytes for info in tensors) + 9 * len(layout)
            check(opened, lambda _: None)
        done = export(on_disk(place), place.run.root / "out", 2**40, {})
        assert done.state_digest == plain_digest(tensors)
        read: Any = deserialize  # it has no types
        exported = {name: bytes(info["data"]) for name, info in read((place.run.root / "out" / SINGLE).read_bytes())}
        assert exported == {info.name.removeprefix("model."): value_of(info, STEP) for info in tensors}


DAMAGES = ("missing", "invented", "doubled", "moved", "resized", "swapped places", "swapped boxes", "swapped digests")


def damaged(tensors: dict[str, Any], name: str, kind: str, data: st.DataObject) -> None:
    """Change what a manifest says of the pieces of a tensor."""
    pieces = tensors[name]["pieces"]
    one = pieces[data.draw(st.integers(0, len(pieces) - 1))]
    if kind == "missing":
        pieces.remove(one)
    elif kind == "invented":
        tensors["model.t9"] = {"dtype": "U8", "shape": [2], "pieces": [{**one, "offset": [0], "shape": [2]}]}
    elif kind == "doubled":
        pieces.append(dict(one))
    elif kind in ("moved", "resized"):
        assume(one["offset"])
        key, d = "offset" if kind == "moved" else "shape", data.draw(st.integers(0, len(one["offset"]) - 1))
        one[key][d] = max(0, one[key][d] + data.draw(st.sampled_from([-1, 1])))
    else:
        everyone = [piece for info in tensors.values() for piece in info["pieces"]]
        other = everyone[data.draw(st.integers(0, len(everyone) - 1))]
        keys = {"swapped places": ["file"], "swapped boxes": ["offset", "shape"], "swapped digests": ["digest"]}[kind]
        for key in keys:
            one[key], other[key] = other[key], one[key]


def facts(tensors: dict[str, Any]) -> list[str]:
    """All that is said, whatever the order."""
    return sorted(json.dumps([name, piece]) for name, info in tensors.items() for piece in info["pieces"])


@pytest.mark.parametrize("kind", DAMAGES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_manifest_that_says_otherwise_than_the_files_is_refused_by_name(kind: str, data: st.DataObject) -> None:
    tensors, layout = data.draw(layouts())
    with a_place() as place:
        manifest = store(place, tensors, layout) / MANIFEST
        body = json.loads(manifest.read_bytes())
        del body["digest"]
        before = copy.deepcopy(body["tensors"])
        damaged(body["tensors"], data.draw(st.sampled_from(sorted(before))), kind, data)
        assume(facts(body["tensors"]) != facts(before))
        manifest.write_bytes(with_digest(body))
        for work in (lambda opened: check(opened, lambda _: None), lambda opened: read_whole(opened, facts_of(opened))):
            with pytest.raises(Unreadable, match=r"model\.t\d"):
                work(open_candidate(recovery.Candidate(Version(1, STEP), place.disk.place)))


def faults_of(tensors: Sequence[TensorInfo], layout: Layout) -> list[tuple[int, Entry, list[Entry]]]:
    """Rank, one of its pieces, and what comes in its place: nothing, one that lies elsewhere, one with a row less."""
    infos = {info.name: info for info in tensors}
    names = [entry.name for entries in layout for entry in entries]
    found: list[tuple[int, Entry, list[Entry]]] = []
    for rank, entries in enumerate(layout):
        for entry in entries:
            if not entry.nbytes:
                continue
            if names.count(entry.name) > 1:  # else it would be another state
                found.append((rank, entry, []))
            if entry.shape:
                (row, *columns), (rows, *others) = entry.offset, entry.shape
                boxes = [((at, *columns), entry.shape) for at in (row - 1, row + 1)]
                boxes.append((entry.offset, (rows - 1, *others)))
                fits = [box for box in boxes if inside(entry.global_shape, box)]
                found += [(rank, entry, [piece(infos[entry.name], box)]) for box in fits]
    return found


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_layout_with_a_hole_or_an_overlap_is_neither_committed_nor_read_from_memory(data: st.DataObject) -> None:
    tensors, layout = data.draw(layouts())
    faults = faults_of(tensors, layout)
    assume(faults)
    rank, entry, instead = data.draw(st.sampled_from(faults))
    layout[rank] = [other for other in layout[rank] if other is not entry] + instead
    with a_place() as place:
        with pytest.raises(Unreadable, match=entry.name):
            store(place, tensors, layout)
        with pytest.raises(Unreadable, match=entry.name):
            check(open_candidate(in_memory(place.memory)[0]), lambda _: None)


MATRIX = TensorInfo("model.matrix", "F32", (8, 6))
BIAS = TensorInfo("model.bias", "F32", (8,))


def meshed(replicate: int, shard: int, tp: int) -> Layout:
    """Columns cut by tensor parallel, rows by FSDP2 on top of that, alike on replicas; the bias is whole everywhere."""
    ranks = list(product(range(replicate), range(shard), range(tp)))
    layout: Layout = []
    for number, (_, s, t) in enumerate(ranks):
        rows, columns = 8 // shard, 6 // tp
        alike = tuple(n for n, (_, s_, t_) in enumerate(ranks) if (s_, t_) == (s, t))
        held = [
            Held(MATRIX, (s * rows, t * columns), (rows, columns), alike),
            Held(BIAS, (0,), (8,), tuple(range(len(ranks)))),
        ]
        layout.append([piece(p.tensor, (p.offset, p.shape)) for p in own(held, number)])
    return layout


@pytest.mark.parametrize("mesh", [(1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 3), (2, 2, 1), (1, 2, 2), (2, 4, 2)])
def test_every_strategy_gives_the_same_digest(place: Place, mesh: tuple[int, int, int]) -> None:
    store(place, [MATRIX, BIAS], meshed(*mesh))
    opened = on_disk(place)
    assert read_whole(opened, facts_of(opened)) == plain_digest([MATRIX, BIAS])


def test_the_memory_holds_a_band_of_rows_and_never_a_tensor_that_has_several(place: Place) -> None:
    store(place, [MATRIX, BIAS], meshed(1, 4, 2))
    lengths: dict[str, list[int]] = {}
    opened = on_disk(place)
    with closing(cast("Generator[room.Stretch, None, None]", room.stretches(opened, lambda _: None))) as found:
        for stretch in found:
            lengths.setdefault(stretch.name, []).append(len(stretch.data))
    assert lengths[MATRIX.name] == [2 * 6 * 4] * 4


def test_files_are_let_go_when_their_last_piece_is_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pipeline stages, cut by columns: never more than the two files of one stage are at hand."""
    stages = [[TensorInfo(f"model.{name}{n}", "U8", (4, 4)) for name in "ab"] for n in range(3)]
    tensors = [info for stage in stages for info in stage]
    store(place, tensors, [[piece(info, ((0, c), (4, 2))) for info in stage] for stage in stages for c in (0, 2)])
    at_hand, most = 0, 0
    real = recovery.local

    @contextmanager
    def counting(source: recovery.Source) -> Iterator[Path]:
        nonlocal at_hand, most
        with real(source) as path:
            at_hand += 1
            most = max(most, at_hand)
            yield path
            at_hand -= 1

    monkeypatch.setattr(room, "local", counting)
    opened = on_disk(place)
    assert read_whole(opened, facts_of(opened)) == plain_digest(tensors)
    assert (at_hand, most) == (0, 2)


def test_only_files_with_something_wanted_are_opened(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store(place, [MATRIX, BIAS], meshed(1, 2, 2))
    fetched: list[str] = []
    real = DirectoryStore.local

    def noting(self: DirectoryStore, folder: str, name: str) -> AbstractContextManager[Path]:
        fetched.append(name)
        return real(self, folder, name)

    monkeypatch.setattr(DirectoryStore, "local", noting)
    opened = on_disk(place)
    assert fetched == []

    def wanted(entry: Entry, rank: int) -> bool:
        return entry.name == MATRIX.name and entry.offset[1] == 3 if entry.is_state else rank == 2

    found = [(c.rank, c.name, c.offset, len(c.data)) for c in contents(opened, wanted)]
    assert found == [
        (1, MATRIX.name, (0, 3), 48), (2, "rng.python", (0,), 9), (3, MATRIX.name, (4, 3), 48),
    ]  # fmt: skip
    assert fetched == [f"rank-0000{rank}.safetensors" for rank in (1, 2, 3)]
    assert [c.rank for c in contents(open_candidate(in_memory(place.memory)[0]), wanted)] == [1, 2, 3]
    (folder / "rank-00000.safetensors").write_bytes(b"damaged")
    assert len(list(contents(opened, wanted))) == 3, "what is not needed is not read"
    name = folder / "rank-00003.safetensors"
    data = bytearray(name.read_bytes())
    data[9] ^= 1
    name.write_bytes(data)
    with pytest.raises(Unreadable, match="header"):
        list(contents(opened, wanted))
