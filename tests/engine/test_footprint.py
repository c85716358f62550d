"""What a rank takes of its memory: its own, at the most, since the first step."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from dtrain.engine.footprint import Footprint

MIB = 2**20
LARGE = 64 * MIB
"""More than 32 MiB, below which the C library may hand out what this process has freed before and still holds."""
SLACK = 8 * MIB
"""For whatever else the process does meanwhile."""


def test_the_peak_counts_what_was_there_for_a_moment_and_not_what_was_there_before() -> None:
    before = torch.ones(LARGE // 4)
    footprint = Footprint(torch.device("cpu"))
    torch.ones(4 * LARGE // 4)
    footprint.begin()
    kept = torch.ones(LARGE // 4)
    torch.ones(2 * LARGE // 4)
    taken = 3 * LARGE
    assert taken - SLACK < footprint.peak_bytes() < taken + SLACK
    assert len(before) == len(kept)


def test_pages_of_files_and_slots_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(LARGE))
    footprint = Footprint(torch.device("cpu"))
    footprint.begin()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped, mmap.mmap(-1, LARGE) as shared:
        for begin in range(0, LARGE, MIB):
            shared[begin : begin + MIB] = mapped[begin : begin + MIB]
        assert footprint.peak_bytes() < SLACK
