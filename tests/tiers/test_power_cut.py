"""A power cut: whatever of the unsynced is lost, cut, zeroed or reordered, what was reported committed is found."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from tests.tiers.oplog import MANY, Killed, Op, Recorder, Snapshots, Tree, disk, keep, materialise, save, states_of

from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.format.layout import Version
from dtrain.tiers.reading.recovery import find, open_candidate, verify
from dtrain.tiers.retention import Rule
from dtrain.tiers.tier import Tier

COMMITS = ("rename", "manifest")
LAST = 9
State = tuple[int, tuple[int, ...], Tree]


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder on tmpfs: some ten thousand trees are made."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="power-cut-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def snapshots(memory: Path) -> Snapshots:
    return Snapshots(memory / "snapshots", [1, 2, LAST], world=1)


@pytest.fixture
def top(memory: Path) -> Iterator[Path]:
    run = memory / "run"
    run.mkdir()
    yield run
    shutil.rmtree(run)


def work(top: Path, commit: str, snapshots: Snapshots, log: Recorder) -> None:
    """A writer's life: claim, clear up, save, save, delete; what is reported already is not saved again."""
    tier = disk(top / "checkpoints", commit).fenced()
    tier.remove_leftovers()
    go_on(tier, snapshots, log)


def go_on(tier: Tier, snapshots: Snapshots, log: Recorder) -> None:
    for step in (1, 2):
        if step not in log.told:
            save(tier, snapshots, step, log)
    keep(tier, 1, log)


def judge(tree: Tree, told: tuple[int, ...], commit: str, snapshots: Snapshots, top: Path) -> str | None:
    """Resume and go on after a power cut that left `tree`; what is wrong with it, in words."""
    with tempfile.TemporaryDirectory(dir=top) as folder:
        materialise(tree, Path(folder))
        tier = disk(Path(folder) / "checkpoints", commit)
        found = [candidate.version.step for candidate in find(None, [tier]).candidates]
        if told and max(found, default=0) < told[-1]:
            return f"step {told[-1]} was reported committed, found are {found}"
        for candidate in find(None, [tier]).candidates:
            try:
                verify(open_candidate(candidate))
            except Unreadable as error:
                return f"{candidate.version} is taken for a checkpoint: {error}"
            if not snapshots.is_right(tier.read(candidate.version).manifest):
                return f"{candidate.version} is not what was saved"
        tier = tier.fenced().fenced()  # half a claim of a number that is not reached yet goes with the second one
        tier.remove_leftovers()
        try:
            for step in (1, 2) if not told else ():
                tier.write(*snapshots.of[step])
            tier.write(*snapshots.of[LAST])
        except (OSError, Unreadable) as error:
            return f"the next save fails: {error}"
        tier.prune(Rule(1), {Version(1, LAST)})
        left = sorted(str(p.relative_to(tier.store.where)) for p in Path(tier.store.where).rglob("*") if p.is_file())
        wanted = sorted(f"{Version(1, LAST).dirname}/{name}" for name in [*tier.read(Version(1, LAST)).manifest.files])
        wanted += [f"{Version(1, LAST).dirname}/manifest.json"]
        if [name for name in left if not name.startswith(".fence/epoch-")] != sorted(wanted):
            return f"left over: {set(left) - set(wanted)}"
    return None


def wrong(states: Iterable[State], commit: str, snapshots: Snapshots, top: Path) -> Iterator[str]:
    for done, told, tree in states:
        problem = judge(tree, told, commit, snapshots, top.parent)
        if problem is not None:
            yield f"cut after operation {done}: {problem}"


@pytest.mark.parametrize("commit", COMMITS)
def test_the_newest_step_reported_committed_survives_every_power_cut(top: Path, commit: str) -> None:
    snapshots = Snapshots(top.parent / f"two-ranks-{commit}", [1, 2, LAST], world=2)
    with Recorder() as log:
        work(top, commit, snapshots, log)
    states = list(states_of(log.ops, top))
    assert len(states) >= {"rename": 50, "manifest": 90}[commit]
    assert list(wrong(states, commit, snapshots, top)) == []


Accident = Callable[[Path, str, Snapshots, int], list[Op] | None]
"""Does something to a writer at its n-th operation, and goes on; all operations, or None when there is no n-th."""


def killed(top: Path, commit: str, snapshots: Snapshots, at: int) -> list[Op] | None:
    """A writer is killed, and the next one starts."""
    with Recorder(stop_at=at, error=Killed(), lasting=True) as first, contextlib.suppress(Killed):
        work(top, commit, snapshots, first)
    with Recorder(ops=first.ops, told=first.told) as second:
        work(top, commit, snapshots, second)
    return None if first.count < at else second.ops


def failed(top: Path, commit: str, snapshots: Snapshots, at: int) -> list[Op] | None:
    """One operation fails, and the writer starts anew."""
    first = Recorder(stop_at=at, error=OSError(5, "Input/output error"))
    with first, contextlib.suppress(OSError, Unreadable):
        work(top, commit, snapshots, first)
    with Recorder(ops=first.ops, told=first.told) as second:
        work(top, commit, snapshots, second)
    return None if first.count < at else second.ops


def stuck(top: Path, commit: str, snapshots: Snapshots, at: int) -> list[Op] | None:
    """From one operation on nothing works; then all does again, for the same writer."""
    with Recorder() as claiming:
        tier = disk(top / "checkpoints", commit).fenced()
    with Recorder(stop_at=at, error=OSError(5, "Input/output error"), lasting=True, ops=claiming.ops) as first:
        first.count = len(first.ops)
        with contextlib.suppress(OSError, Unreadable):
            go_on(tier, snapshots, first)
    with Recorder(ops=first.ops, told=first.told) as second:
        go_on(tier, snapshots, second)
    return None if first.count < at else second.ops


def places_of(top: Path, commit: str, snapshots: Snapshots) -> list[int]:
    """Numbers of the operations that change names or make something durable."""
    with Recorder() as log:
        work(top, commit, snapshots, log)
    clear(top)
    return [at for at, op in enumerate(log.ops, 1) if op.name not in ("disk.read", "disk.write")]


def clear(top: Path) -> None:
    for entry in top.iterdir():
        shutil.rmtree(entry)


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("accident", [killed, failed, stuck])
def test_a_power_cut_after_a_kill_or_an_error_loses_nothing_either(
    top: Path, commit: str, snapshots: Snapshots, accident: Accident
) -> None:
    seen: set[int] = set()
    places = places_of(top, commit, snapshots)
    for at in places:
        ops = accident(top, commit, snapshots, at)
        if ops is not None:
            assert list(wrong(states_of(ops, top, at - 1, seen), commit, snapshots, top)) == [], f"at operation {at}"
        clear(top)
    assert len(seen) > 60


# Which fsync keeps what: each one that is taken away must make some state wrong.

FENCE = "whoever holds the claim ends with the power; it is for a server of files that goes down alone"
NOT_NEEDED = {
    ("rename", "claim > DirectoryStore.create > sync_dir"): FENCE,
    ("rename", "claim > DirectoryStore.create > write_staged > write_new > creating > sync"): FENCE,
    ("rename", "claim > DirectoryStore.sync > sync_dir"): "after a kill only, see below",
    ("manifest", "claim > DirectoryStore.create > sync_dir"): FENCE,
    ("manifest", "claim > DirectoryStore.create > write_staged > write_new > creating > sync"): FENCE,
    ("manifest", "claim > DirectoryStore.sync > sync_dir"): FENCE,
    ("rename", "ByRename.seal > DirectoryStore.create > sync_dir"): "the same folder is fsynced right after it",
    ("manifest", "ByManifest.begin > DirectoryStore.create > write_staged > write_new > creating > sync"): (
        "that a note is there says all; what is in it is for processes that live"
    ),
    ("manifest", "ByManifest.remove > DirectoryStore.create > sync_dir"): "the same folder is fsynced right after it",
    ("manifest", "ByManifest.remove > DirectoryStore.create > write_staged > write_new > creating > sync"): (
        "that a note is there says all"
    ),
}


def without(ops: list[Op], site: str) -> tuple[list[Op], int]:
    """The log had the fsyncs of one place in the code not been there, and where the first was."""
    first = next(index for index, op in enumerate(ops) if op.site.endswith(site))
    return [op for op in ops if not op.site.endswith(site)], first


@pytest.mark.parametrize("commit", COMMITS)
def test_each_fsync_of_a_commit_and_a_delete_is_needed(top: Path, commit: str, snapshots: Snapshots) -> None:
    with Recorder() as log:
        work(top, commit, snapshots, log)
    sites = {" > ".join(op.site.split(" > ")[1:]) for op in log.ops if "sync" in op.name}
    for caller in ("Tier.begun > ", "Tier.seal > ", "Tier.add > "):
        sites = {site.removeprefix(caller) for site in sites}
    assert len(sites) >= 9
    needless = set()
    for site in sites:
        ops, first = without(log.ops, site)
        if next(wrong(states_of(ops, top, first, most=MANY), commit, snapshots, top), None) is None:
            needless.add(site)
    assert needless == {site for way, site in NOT_NEEDED if way == commit}


SEAL, CREATE = "ByRename.seal > DirectoryStore.sync > sync_dir", "DirectoryStore.create > sync_dir"


@pytest.mark.parametrize(
    ("commit", "accident", "at", "nth", "site"),
    [
        ("rename", killed, "make_dirs > sync_dir", 0, "DirectoryStore._settle_root > sync_dir"),
        ("rename", killed, "_move_away > DirectoryStore.sync > sync_dir", 0, "claim > DirectoryStore.sync > sync_dir"),
        ("rename", failed, SEAL, 1, "ByRename.seal > ByRename._move_away > DirectoryStore.sync > sync_dir"),
        ("rename", stuck, SEAL, 1, "Tier._settle > Tier._make_durable > DirectoryStore.sync > sync_dir"),
        ("manifest", stuck, f"seal > {CREATE}", 0, "_settle > Tier._make_durable > DirectoryStore.sync > sync_dir"),
        ("manifest", stuck, f"remove > {CREATE}", 0, "ByManifest.remove > DirectoryStore.sync > sync_dir"),
        ("manifest", killed, f"seal > {CREATE}", 0, "clean > DirectoryStore.sync > sync_dir"),
        ("manifest", killed, "copy_durable > creating > sync", 0, "clean > _empty > DirectoryStore.sync > sync_dir"),
        ("manifest", killed, "remove > _empty > _sync > DirectoryStore.sync > sync_dir", 0,
         "clean > _empty > _sync > DirectoryStore.sync > sync_dir"),
        ("manifest", failed, "copy_durable > creating > sync", 0, "abandon > _empty > DirectoryStore.sync > sync_dir"),
        ("manifest", failed, f"seal > {CREATE}", 0, "abandon > _empty > _sync > DirectoryStore.sync > sync_dir"),
    ],
)  # fmt: skip
def test_each_fsync_of_clearing_up_is_needed(
    top: Path, commit: str, accident: Accident, at: str, nth: int, site: str, snapshots: Snapshots
) -> None:
    with Recorder() as log:
        work(top, commit, snapshots, log)
    clear(top)
    number = [index for index, op in enumerate(log.ops, 1) if op.site.endswith(at)][nth]
    ops = accident(top, commit, snapshots, number)
    assert ops is not None
    assert next(wrong(states_of(ops, top, number - 1), commit, snapshots, top), None) is None
    ops, first = without(ops, site)
    assert next(wrong(states_of(ops, top, first, most=MANY), commit, snapshots, top), None) is not None
