"""A disk that takes no more lines: nobody dies of it, the loss is told once, and counted once lines can be written."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.build import Place

from dtrain.tiers.drain.writer import TierJob, Writer
from dtrain.tiers.format import journal as module
from dtrain.tiers.format.journal import leave_note, newest_first, take_notes, tell_losses
from dtrain.tiers.format.jsonfile import append_event, append_line, newest_lines, read_lines
from dtrain.tiers.format.layout import Version
from dtrain.tiers.stores.store import Place as StorePlace
from dtrain.tiers.together import Group


@pytest.fixture
def told() -> Iterator[list[str]]:
    words: list[str] = []
    before = module._told
    tell_losses(words.append)
    yield words
    tell_losses(before)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Room for so many bytes; a write takes what fits, as the kernel does."""
    room = {"bytes": 10**9}
    write = os.write

    def limited(descriptor: int, data: memoryview) -> int:
        if room["bytes"] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(descriptor, bytes(data[: room["bytes"]]))
        room["bytes"] -= done
        return done

    monkeypatch.setattr("dtrain.tiers.format.journal.os.write", limited)
    return room


def test_lines_that_are_lost_are_told_once_and_counted_later(
    tmp_path: Path, disk: dict[str, int], told: list[str]
) -> None:
    path = tmp_path / "events.jsonl"
    assert append_event(path, "committed", 1, 1)
    disk["bytes"] = 7  # the next line is torn
    for step in range(2, 12):
        assert not append_event(path, "committed", step, 1)
    assert told == [f"{path}: No space left on device: lines are lost, training goes on"]
    disk["bytes"] = 10**9
    assert append_event(path, "committed", 12, 1)
    lines = read_lines(path)
    assert [(line["event"], line["step"]) for line in lines] == [("committed", 1), ("committed", 12), ("warning", 12)]
    assert lines[-1]["detail"] == "10 lines were lost that belong in events.jsonl: No space left on device"
    assert append_event(path, "committed", 13, 1)
    assert len(read_lines(path)) == 4, "told once"


def test_any_failure_at_all_is_survived(tmp_path: Path, told: list[str]) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "x.jsonl", tmp_path / "file" / "x.jsonl", tmp_path, tmp_path / ("x" * 300)):
        assert append_line(path, {"a": 1}) is None
    assert len(told) == 4
    assert sorted(os.listdir(tmp_path)) == ["file"], "a folder that was removed stays removed"


def test_lines_of_many_threads_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"

    def write(number: int) -> None:
        for count in range(100):
            append_line(path, {"thread": number, "count": count, "padding": "x" * 300})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_lines(path)) == 400


def test_a_note_reaches_the_launcher_once(tmp_path: Path) -> None:
    leave_note(tmp_path, "one")
    leave_note(tmp_path, "two")
    assert take_notes(tmp_path) == ["one", "two"]
    assert take_notes(tmp_path) == []
    leave_note(tmp_path / "none", "three")
    assert take_notes(tmp_path / "none") == []


def test_an_outage_of_a_tier_is_told_at_doubling_distances_and_to_its_end(place: Place) -> None:
    writer = Writer(TierJob(StorePlace("disk", str(place.run.root / "d")), 2), place.run, "run", Group(0, 1))

    def skipped() -> list[Any]:
        return [line["left_out"] for line in read_lines(place.run.events) if line["event"] == "skipped"]

    for step in range(1, 101):
        writer.health.passed_over()
        writer._left_out(Version(1, step), "the tier failed before and is not tried again yet")
    assert skipped() == [1, 2, 4, 8, 16, 32, 64]
    writer.end()
    assert skipped()[-1] == 100
    writer.end()
    assert len(skipped()) == 8


@pytest.mark.parametrize("block", [1, 7, 64, 2**16])
@pytest.mark.parametrize("ending", [b"", b"\n", b'\n{"torn": '])
def test_lines_are_read_from_the_last_one_on_whatever_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, ending: bytes
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", block)
    path = tmp_path / "lines"
    assert list(newest_lines(path)) == []
    path.write_bytes(b"")
    assert list(newest_lines(path)) == []
    whole = [{"step": step, "words": "x" * (step % 13 * 9)} for step in range(60)]
    path.write_bytes(b"\n".join(json.dumps(line).encode() for line in whole) + ending)
    assert list(newest_lines(path)) == whole[::-1]
    assert read_lines(path) == whole
    near_the_end = [json.loads(line) for line in newest_first(path, 1000) if line.endswith(b"}")]
    assert near_the_end == whole[::-1][: len(near_the_end)]
    assert 5 < len(near_the_end) < 40


def test_the_newest_line_of_a_long_file_costs_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher parsed all that a run had told at every restart, and kept the memory: 0.2 MiB more each time."""
    path = tmp_path / "lines"
    with path.open("w") as file:
        file.writelines(f'{{"step": {step}}}\n' for step in range(200_000))
    asked: list[int] = []
    real = os.pread

    def counted(descriptor: int, length: int, position: int) -> bytes:
        asked.append(length)
        return real(descriptor, length, position)

    monkeypatch.setattr(os, "pread", counted)
    assert next(newest_lines(path)) == {"step": 199_999}
    assert asked == [module.BLOCK_BYTES]
