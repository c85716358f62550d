"""Writers of checkpoints killed at random moments, again and again, in the same place.

    python -m tests.campaigns.kill_storage --kills 1000 --seed 1

A child stores one step after the other (snapshot, gather, commit, retention) and says through a pipe what was
committed. The parent ends it with SIGKILL at a random moment, then looks: is every step that was said to be committed,
and that retention keeps, there? Is every byte of everything that is there right? Then the next child goes on in the
same place. Places take turns: a folder that is renamed, one whose manifest comes last, and the drainer as a process of
its own. Torch is not imported. Exit code 1 when anything was lost or wrong; the seed gives the same moments again,
as far as a machine's timing does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tiers.build import RUN_ID, TENSORS, Place, snapshot, value_of

from dtrain.tiers.drain.drainer import DrainJob
from dtrain.tiers.drain.writer import TierJob
from dtrain.tiers.format.jsonfile import Unreadable, read_lines
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.memory.slots import TMPFS, MemoryDir
from dtrain.tiers.reading.recovery import candidate_of, contents, open_candidate
from dtrain.tiers.retention import Rule
from dtrain.tiers.stores.store import Place as StorePlace
from dtrain.tiers.tier import Tier, open_tier

KEEP = 2
LONGEST_S = (0.04, 0.25)
"""Half of the kills fall into a writer's first commit, half somewhere later, into a commit or a delete."""
DRAINER_EVERY = 12
"""One kill in so many is of a drainer, which takes a quarter of a second to start."""


@dataclass
class Tally:
    """What happened in one kind of place."""

    kills: int = 0
    committed: int = 0
    checked: int = 0
    in_the_middle: int = 0
    """Kills that left unfinished work behind."""
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Ground:
    """One place, and the memory whose snapshots go there."""

    def __init__(self, kind: str, folder: Path, shm: Path) -> None:
        self.kind, self.tally = kind, Tally()
        folder.mkdir()
        shm.mkdir()
        self.place = Place(folder)
        shutil.rmtree(self.place.memory.path)
        self.place.memory = MemoryDir(shm)
        commit = "manifest" if kind == "manifest" else "rename"
        self.store = StorePlace("disk", str(self.place.root), {"commit": commit})
        self.attempt = 0
        self.known: set[Version] = set()

    def tier(self) -> Tier:
        return open_tier(self.store, RUN_ID)

    def check(self, committed: set[Version]) -> None:
        """Compare what is there with what was said; remember it for the next time."""
        self.known |= committed
        self.tally.committed += len(committed)
        self.tally.in_the_middle += any(name.startswith(".t") for name in self.place.tree())
        good, rejected = self.tier().scan()
        for bad in rejected:
            if not self._unfinished(bad.version):
                self.tally.wrong.append(f"{bad.where}: {bad.reason}")
        found = {checkpoint.version for checkpoint in good}
        for checkpoint in good:
            self.tally.checked += 1
            try:
                checkpoint.check_bytes()
                self._check_values(open_candidate(candidate_of(checkpoint)), checkpoint.version)
            except (Unreadable, AssertionError) as error:
                self.tally.wrong.append(f"{checkpoint.where}: {error!r}")
        for version in Rule(KEEP).kept(self.known | found) - found:
            self.tally.lost.append(f"{self.kind}: {version} was committed and is not there")
        self.known = found

    def _unfinished(self, version: Version) -> bool:
        """A manifest that comes last: the folder is there before it is a checkpoint, with a note beside it."""
        return any(name.endswith(version.dirname) for name in self.place.tree() if name.startswith(".t"))

    def _check_values(self, opened: Any, version: Version) -> None:
        got = {info.name: bytearray() for info in TENSORS}
        for content in contents(opened):
            if content.is_state:
                got[content.name] += content.data
        for info in TENSORS:
            assert bytes(got[info.name]) == value_of(info, version.step), f"{info.name} is not of step {version.step}"


def writer(ground: Ground, pipe: int) -> None:
    """The child: store step after step until the end comes."""
    tier = ground.tier().fenced()
    tier.remove_leftovers()
    newest = tier.newest()
    step = newest.step if newest is not None else 0
    os.write(pipe, b"\n")
    while True:
        step += 1
        version = Version(ground.attempt, step)
        snapshot(ground.place.memory, step, world=1 + step % 3, slot=step % 3, attempt=ground.attempt)
        tier.write(*gather(ground.place.memory, ground.place.memory.whole()[version]))
        os.write(pipe, f"{step}\n".encode())
        tier.prune(Rule(KEEP), {version})


def kill_writer(ground: Ground, chance: random.Random) -> None:
    """Fork a child, let it work for a moment, kill it, look."""
    for file in ground.place.memory.path.iterdir():
        file.unlink()
    ground.attempt += 1
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            writer(ground, writing)
        finally:
            os._exit(1)  # only an error comes here
    os.close(writing)
    select.select([reading], [], [], 10)
    time.sleep(chance.uniform(0, chance.choice(LONGEST_S)))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as said:
        lines = [line for line in said.read().decode().split("\n")[:-1] if line]
    if not os.WIFSIGNALED(status):
        ground.tally.wrong.append(f"{ground.kind}: the writer of attempt {ground.attempt} ended by itself")
    ground.tally.kills += 1
    ground.check({Version(ground.attempt, int(line)) for line in lines})


def kill_drainer(ground: Ground, chance: random.Random) -> None:
    """Start a drainer over pinned snapshots, kill it, look. What it has not carried stays pinned for the next one."""
    ground.attempt += 1
    job = ground.place.memory.path / "drainer.json"
    job.write_bytes(
        DrainJob(
            str(ground.place.run.root), str(ground.place.memory.path), RUN_ID, (TierJob(ground.store, KEEP),)
        ).to_bytes()
    )
    before = len(read_lines(ground.place.run.events))
    newest = ground.tier().newest()
    base = newest.step if newest is not None else 0
    process = subprocess.Popen([sys.executable, "-m", "dtrain.tiers.drain.drainer", str(job)], stdin=subprocess.PIPE)
    lock = ground.place.memory.drainer_lock
    deadline = time.monotonic() + 10
    while _holder(lock) != process.pid and time.monotonic() < deadline:
        time.sleep(0.002)
    for slot in range(3):
        if not ground.place.memory.slots(0, 2)[slot].pinned:
            snapshot(ground.place.memory, base + 1 + slot, slot=slot, attempt=ground.attempt, drain=True)
    time.sleep(chance.uniform(0, max(LONGEST_S)))
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
    ground.tally.kills += 1
    told = [line for line in read_lines(ground.place.run.events)[before:] if line["event"] == "committed"]
    ground.check({Version(line["attempt"], line["step"]) for line in told})


def _holder(lock: Path) -> int | None:
    try:
        pid = json.loads(lock.read_bytes()).get("pid")
    except (OSError, ValueError):
        return None
    return pid if isinstance(pid, int) else None


def campaign(kills: int, seed: int, folder: Path) -> dict[str, Tally]:
    """Kill so many times; returns what happened, by kind of place."""
    chance = random.Random(seed)
    shm = Path(tempfile.mkdtemp(prefix="dtrain-campaign-", dir=TMPFS))
    try:
        grounds = {kind: Ground(kind, folder / kind, shm / kind) for kind in ("rename", "manifest", "drainer")}
        for number in range(kills):
            if number % DRAINER_EVERY == DRAINER_EVERY - 1:
                kill_drainer(grounds["drainer"], chance)
            else:
                kill_writer(grounds["rename" if number % 2 else "manifest"], chance)
        return {kind: ground.tally for kind, ground in grounds.items()}
    finally:
        shutil.rmtree(shm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default=".", help="where the disk to use is mounted")
    options = parser.parse_args()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="dtrain-campaign-", dir=options.folder))
    try:
        tallies = campaign(options.kills, options.seed, folder)
    finally:
        shutil.rmtree(folder)
    say(f"{'place':10} {'kills':>6} {'amid work':>9} {'committed':>9} {'checked':>8} {'lost':>5} {'wrong':>6}")
    for kind, tally in tallies.items():
        say(
            f"{kind:10} {tally.kills:6} {tally.in_the_middle:9} {tally.committed:9} {tally.checked:8} "
            f"{len(tally.lost):5} {len(tally.wrong):6}"
        )
    bad = [words for tally in tallies.values() for words in tally.lost + tally.wrong]
    for words in bad[:20]:
        say(f"  {words}")
    kills = sum(tally.kills for tally in tallies.values())
    say(f"seed {options.seed}: {kills} kills in {time.monotonic() - started:.0f} s, {len(bad)} lost or wrong")
    sys.exit(1 if bad else 0)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
