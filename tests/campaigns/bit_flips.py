"""Single bits of a committed checkpoint flipped, one at a time: each is noticed, and the older checkpoint is used.

    python -m tests.campaigns.bit_flips --flips 10000 --seed 1

A place holds two checkpoints. In the newer one a bit is flipped in the data, in a header or in the manifest (in turn);
then everything is done as a resume does it: look, take the newest, read every byte, go back to the older one when a
digest is not right. A flip counts as detected when the older one is used and the newer one is named with a reason; as
harmless only when the newer one is used and gives exactly the same content; else as wrong. Exit code 1 for any that is.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.tiers.build import Place

from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.format.layout import MANIFEST
from dtrain.tiers.memory.slots import TMPFS
from dtrain.tiers.reading.recovery import Opened, contents, find, open_candidate

AREAS = ("data", "header", "manifest")


@dataclass
class Result:
    """How many flips of each area were detected or harmless, and which were neither."""

    detected: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def content_of(opened: Opened) -> list[tuple[object, ...]]:
    """Everything a resume takes from a checkpoint, verified. Raises Unreadable."""
    taken: list[tuple[object, ...]] = [
        (one.rank, one.name, one.dtype, one.shape, one.offset, one.global_shape, bytes(one.data))
        for one in contents(opened)
    ]
    return [*taken, (opened.world, opened.meta["data"], opened.meta["ties"])]


def resume(place: Place) -> tuple[int | None, list[tuple[object, ...]], list[str]]:
    """The step that a resume takes, its content, and what it says of those it passed over."""
    found = find(None, [place.disk])
    said = [f"step {bad.version.step}: {bad.reason}" for bad in found.rejected]
    for candidate in found.candidates:
        try:
            return candidate.version.step, content_of(open_candidate(candidate)), said
        except Unreadable as error:
            said.append(f"step {candidate.version.step}: {error}")
    return None, [], said


def flip(path: Path, bit: int) -> None:
    """Turn one bit over; done twice it is as it was."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, bit // 8)
        os.pwrite(descriptor, bytes([byte ^ 1 << bit % 8]), bit // 8)
    finally:
        os.close(descriptor)


def target(folder: Path, area: str, chance: random.Random) -> tuple[Path, int]:
    """A file and a bit in it."""
    if area == "manifest":
        path = folder / MANIFEST
        return path, chance.randrange(8 * path.stat().st_size)
    path = chance.choice(sorted(folder.glob("rank-*")))
    begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    if area == "header":
        return path, chance.randrange(8 * begin)
    return path, chance.randrange(8 * begin, 8 * path.stat().st_size)


def campaign(flips: int, seed: int, folder: Path) -> Result:
    """Flip so many bits, one at a time."""
    chance, result = random.Random(seed), Result()
    place = Place(folder)
    place.store(1)
    newer = place.store(2)
    _, whole, _ = resume(place)
    for number in range(flips):
        area = AREAS[number % len(AREAS)]
        path, bit = target(newer, area, chance)
        flip(path, bit)
        step, content, said = resume(place)
        if step == 1 and any(words.startswith("step 2: ") for words in said):
            result.detected[area] += 1
        elif step == 2 and content == whole:
            result.harmless[area] += 1
        else:
            result.wrong.append(f"bit {bit} of {path.name}: resumed step {step}; said {said}")
        flip(path, bit)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="dtrain-campaign-", dir=TMPFS))
    try:
        result = campaign(options.flips, options.seed, folder / "place")
    finally:
        shutil.rmtree(folder)
    for area in AREAS:
        sys.stdout.write(f"{area:9} {result.detected[area]:6} detected {result.harmless[area]:4} harmless\n")
    for words in result.wrong[:20]:
        sys.stdout.write(f"  WRONG {words}\n")
    seconds = time.monotonic() - started
    sys.stdout.write(f"seed {options.seed}: {options.flips} flips in {seconds:.0f} s, {len(result.wrong)} wrong\n")
    sys.exit(1 if result.wrong else 0)


if __name__ == "__main__":
    main()
