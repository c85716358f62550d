"""Two who want the same thing at the same time: one gets it, the other is told who has it."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.tiers.build import RUN_ID, Place, snapshot

from dtrain.tiers import faults
from dtrain.tiers.fence import Fenced, claim
from dtrain.tiers.format.layout import MANIFEST, Version
from dtrain.tiers.lock import FileLock, Locked
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.retention import Rule
from dtrain.tiers.stores.store import Place as StorePlace
from dtrain.tiers.tier import Tier, disk_tier, open_tier

RACES = 100


def say(to: int, words: str) -> None:
    os.write(to, words.encode() + b"\n")


class Racers:
    """Forked processes that all begin at the same moment, and what each of them says."""

    def __init__(self, work: Callable[[Callable[[str], None]], None], count: int) -> None:
        self.gate, opener = os.pipe()
        self.saying: list[int] = []
        self.pids: list[int] = []
        for _ in range(count):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    os.read(self.gate, 1)
                    work(partial(say, writing))
                    signal.pause()
                finally:
                    os._exit(0)
            os.close(writing)
            self.saying.append(reading)
            self.pids.append(pid)
        os.write(opener, b"x" * count)
        os.close(opener)

    def said(self) -> list[str]:
        return [os.read(reading, 4096).decode().strip() for reading in self.saying]

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for descriptor in (*self.saying, self.gate):
            os.close(descriptor)


@pytest.fixture
def race() -> Iterator[Callable[..., list[str]]]:
    running: list[Racers] = []

    def start(work: Callable[[Callable[[str], None]], None], count: int) -> list[str]:
        running.append(Racers(work, count))
        return running[-1].said()

    yield start
    for racers in running:
        racers.end()


@pytest.mark.parametrize("count", [2, 3])
def test_row_102_of_those_who_start_one_run_at_once_one_wins_and_the_others_learn_who(
    tmp_path: Path, count: int, race: Callable[..., list[str]]
) -> None:
    for number in range(RACES // 2):
        path = tmp_path / f"lock-{number}"

        def work(say: Callable[[str], None], path: Path = path) -> None:
            begun = time.monotonic()
            try:
                with FileLock(path):
                    say(f"won {os.getpid()}")
                    signal.pause()
            except Locked as error:
                say(f"lost after {time.monotonic() - begun:.3f}: {error}")

        said = race(work, count)
        winners = [words for words in said if words.startswith("won")]
        losers = [words for words in said if words.startswith("lost")]
        assert (len(winners), len(losers)) == (1, count - 1), said
        pid = winners[0].split()[1]
        for words in losers:
            assert float(words.split()[2].rstrip(":")) < 2
            assert f"process {pid} on {socket.gethostname()} since 20" in words
        os.kill(int(pid), signal.SIGKILL)
        with FileLock(path, timeout_s=5):
            pass  # what the dead held is free


def test_of_those_who_want_one_folder_one_wins(tmp_path: Path, race: Callable[..., list[str]]) -> None:
    for number in range(20):
        tier = disk_tier(tmp_path / f"folder-{number}", RUN_ID)

        def work(say: Callable[[str], None], tier: Tier = tier) -> None:
            try:
                with tier.lock():
                    say("won")
                    signal.pause()
            except Locked:
                say("lost")

        assert sorted(race(work, 3)) == ["lost", "lost", "won"]


@pytest.mark.parametrize("commit", ["rename", "manifest"])
def test_every_claim_has_a_number_of_its_own_and_the_last_one_stands(
    tmp_path: Path, commit: str, race: Callable[..., list[str]]
) -> None:
    for number in range(20):
        store = open_tier(StorePlace("disk", str(tmp_path / str(number)), {"commit": commit}), RUN_ID).store

        def work(say: Callable[[str], None]) -> None:
            fence = claim(store, RUN_ID)  # noqa: B023
            say(f"{fence.epoch}")

        epochs = sorted(int(words) for words in race(work, 3))
        assert len(set(epochs)) == 3
        assert claim(store, RUN_ID).epoch > epochs[-1]


@pytest.mark.parametrize("commit", ["rename", "manifest"])
@pytest.mark.parametrize("moment", ["disk.create", "disk.write", "disk.sync"])
def test_who_was_asleep_while_another_took_over_neither_commits_nor_deletes(
    place: Place, commit: str, moment: str
) -> None:
    where = StorePlace("disk", str(place.root), {"commit": commit})
    old = open_tier(where, RUN_ID).fenced()
    for step in (1, 2):
        snapshot(place.memory, step)
        old.write(*gather(place.memory, place.memory.whole()[Version(1, step)]))
    snapshot(place.memory, 3)
    asleep: list[Tier] = []

    def sleep(name: str, path: str, detail: object) -> None:
        if name == moment and "rank-" in path and not asleep:
            asleep.append(open_tier(where, RUN_ID).fenced())  # meanwhile

    before = faults.watch(sleep)
    try:
        with pytest.raises(Fenced, match="taken over"):
            old.write(*gather(place.memory, place.memory.whole()[Version(1, 3)]))
    finally:
        faults.watch(before)
    with pytest.raises(Fenced):
        old.prune(Rule(1), {Version(1, 2)})
    assert [checkpoint.version.step for checkpoint in asleep[0].scan()[0]] == [1, 2]
    asleep[0].write(*gather(place.memory, place.memory.whole()[Version(1, 3)]))
    asleep[0].prune(Rule(1))
    assert place.tree() == [Version(1, 3).dirname]


def sleeper(place: Place, where: StorePlace, moment: str, file: str) -> tuple[int, int]:
    """A process that is stopped in the middle of step 3; its pid, and the pipe through which it says how that ended."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            tier = open_tier(where, RUN_ID).fenced()
            stopped: list[str] = []

            def stop(name: str, path: str, detail: object) -> None:
                if name == moment and file in path and not stopped:
                    stopped.append(path)
                    os.kill(os.getpid(), signal.SIGSTOP)

            faults.watch(stop)
            try:
                tier.write(*gather(place.memory, place.memory.whole()[Version(1, 3)]))
                say(writing, "committed")
            except Exception as error:
                say(writing, type(error).__name__)
        finally:
            os._exit(0)
    os.close(writing)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    return pid, reading


def woken(pid: int, reading: int) -> str:
    os.kill(pid, signal.SIGCONT)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode().strip()
    os.waitpid(pid, 0)
    return said


@pytest.mark.parametrize(
    ("commit", "file"),
    [(commit, rank) for commit in ("rename", "manifest") for rank in ("rank-00000", "rank-00001")]
    + [("rename", MANIFEST)],  # by manifest it has looked by then: that is the window of the next test
)
def test_a_process_stopped_while_the_next_one_saves_the_same_step_spoils_nothing(
    place: Place, commit: str, file: str
) -> None:
    where = StorePlace("disk", str(place.root), {"commit": commit})
    snapshot(place.memory, 3)
    pid, reading = sleeper(place, where, "disk.create", file)
    tier = open_tier(where, RUN_ID).fenced()
    tier.remove_leftovers()
    checkpoint = tier.write(*gather(place.memory, place.memory.whole()[Version(1, 3)]))
    assert woken(pid, reading) in ("Fenced", "FileExistsError", "FileNotFoundError", "Unreadable")
    checkpoint.check_sizes()
    checkpoint.check_bytes()
    tier.fenced().remove_leftovers()
    assert place.tree() == [Version(1, 3).dirname]


@pytest.mark.parametrize(
    ("commit", "moment", "file"), [("rename", "disk.rename", ".tmp-"), ("manifest", "disk.link", MANIFEST)]
)
def test_what_slips_through_between_the_look_and_the_change_is_whole_and_older(
    place: Place, commit: str, moment: str, file: str
) -> None:
    """The window: stopped right there, the older writer still commits, one whole checkpoint of its own attempt."""
    where = StorePlace("disk", str(place.root), {"commit": commit})
    snapshot(place.memory, 3)
    pid, reading = sleeper(place, where, moment, file)
    tier = open_tier(where, RUN_ID).fenced()
    snapshot(place.memory, 2, slot=1, attempt=2)
    tier.write(*gather(place.memory, place.memory.whole()[Version(2, 2)]))
    assert woken(pid, reading) == "committed"
    found = tier.scan()[0]
    assert [checkpoint.version for checkpoint in found] == [Version(1, 3), Version(2, 2)]
    for checkpoint in found:
        checkpoint.check_bytes()
    tier.prune(Rule(1))
    tier.fenced().remove_leftovers()
    assert place.tree() == [Version(2, 2).dirname]


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_row_29_the_umask_alone_decides_who_may_read(place: Place, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = place.store(1)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~umask}
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask


def test_row_31_temporary_files_lie_beside_their_target(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere/at/all")
    place.store(1)


def test_row_34_a_run_that_was_moved_or_is_behind_a_link_is_the_same(place: Place, tmp_path: Path) -> None:
    place.store(1)
    moved = tmp_path / "ünusual name [1]"
    place.run.root.rename(moved)
    (tmp_path / "link").symlink_to(moved)
    for root in (moved, tmp_path / "link"):
        (checkpoint,) = disk_tier(root / "checkpoints", RUN_ID).scan()[0]
        checkpoint.check_bytes()
    assert not [path for path in moved.rglob("*") if path.is_symlink()], "no links in the format"


@pytest.mark.parametrize("name", ["with a blank", "мой прогон", "n" * 200, "a\nb", "-rf", "~", "$HOME", "%s"])
@pytest.mark.parametrize("commit", ["rename", "manifest"])
def test_a_folder_of_any_name_holds_checkpoints(place: Place, commit: str, name: str) -> None:
    tier = open_tier(
        StorePlace("disk", str(place.run.root / name / "checkpoints"), {"commit": commit}), RUN_ID
    ).fenced()
    for step in (1, 2):
        snapshot(place.memory, step)
        tier.write(*gather(place.memory, place.memory.whole()[Version(1, step)])).check_bytes()
    assert tier.prune(Rule(1)).removed == [Version(1, 1)]
