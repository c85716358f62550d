"""Each single operation of the storage fails or is the last one of its process; what was reported committed stays.

The scenario: save, save, save with `keep=2`, delete. The k-th operation is made to fail for k = 1, 2, 3 … until a run
has no failure left, once or from there on, or the process ends there.
"""

import ast
import contextlib
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.build import RUN_ID
from tests.tiers.fake import FakeStore
from tests.tiers.oplog import Snapshots, disk

import dtrain.tiers
from dtrain.tiers import faults
from dtrain.tiers.fence import Fenced
from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.format.layout import Version
from dtrain.tiers.retention import Rule
from dtrain.tiers.stores.store import Place, Store
from dtrain.tiers.tier import Checkpoint, Tier

STEPS = (1, 2, 3)
KINDS = ("folder, rename", "folder, manifest", "memory, rename", "memory, manifest")
DISK = [name for name in faults.OPERATIONS if name.startswith("disk.")]


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="every-operation-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def snapshots(memory: Path) -> Snapshots:
    return Snapshots(memory / "snapshots", [*STEPS, 4])


def open_kind(kind: str, root: Path) -> Tier:
    where, commit = kind.split(", ")
    if where == "folder":
        return disk(root, commit)
    return Tier(Place("disk", "memory"), FakeStore(renames=commit == "rename"), RUN_ID)


class Run:
    """A writer with the scenario before it; it goes on after errors, as the drainer does."""

    def __init__(self, tier: Tier, snapshots: Snapshots, tell: Callable[[int], None]) -> None:
        self.plain, self.snapshots, self.tell = tier, snapshots, tell
        self.tier: Tier | None = None
        self.verified: set[Version] = set()
        self.errors = 0

    def open(self) -> Tier:
        if self.tier is None:
            tier = self.plain.fenced()
            tier.remove_leftovers()
            self.tier = tier
        return self.tier

    def scenario(self) -> None:
        for step in STEPS:
            with self.going_on():
                self.verified.add(self.open().write(*self.snapshots.of[step]).version)
                self.tell(step)
                self.prune(2)
        with self.going_on():
            self.prune(1)

    def prune(self, number: int) -> None:
        self.verified &= set(self.open().prune(Rule(number), self.verified).kept)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        try:
            yield
        except (OSError, Unreadable, Fenced):
            self.errors += 1


class Watch:
    """Looks at the store before every operation: what it finds must be right, and the newest reported must be there."""

    def __init__(self, tier: Tier, snapshots: Snapshots) -> None:
        self.tier, self.snapshots = tier, snapshots
        self.told: list[int] = []
        self._verified: set[object] = set()

    def look(self) -> None:
        before = faults.watch(None)
        try:
            good = [checkpoint for checkpoint in self.tier.scan()[0] if self._check(checkpoint)]
        finally:
            faults.watch(before)
        newest = max((checkpoint.version.step for checkpoint in good), default=0)
        assert newest >= max(self.told, default=0), f"found up to {newest}, reported {self.told}"

    def _check(self, checkpoint: Checkpoint) -> bool:
        mark = self._mark_of(checkpoint)
        if mark not in self._verified:
            checkpoint.check_bytes()
            assert self.snapshots.is_right(checkpoint.manifest)
            self._verified.add(mark)
        return True

    def _mark_of(self, checkpoint: Checkpoint) -> object:
        """Changes with every change of a file."""
        store = self.tier.store
        if isinstance(store, FakeStore):
            return checkpoint.folder, *(
                (name, id(data)) for name, data in sorted(store.content[checkpoint.folder].items())
            )
        folder = Path(store.where) / checkpoint.folder
        infos = ((entry.name, entry.stat()) for entry in sorted(os.scandir(folder), key=lambda entry: entry.name))
        return checkpoint.folder, *((name, i.st_ino, i.st_size, i.st_mtime_ns, i.st_ctime_ns) for name, i in infos)


def numbered(at: int, strike: Callable[[], None], look: Callable[[], None], *, lasting: bool = False) -> Any:
    """A watcher that strikes at the `at`-th operation of this thread; `counted` tells how many there were."""
    main, counted = threading.get_ident(), [0]

    def watcher(name: str, where: str, detail: Any) -> None:
        if threading.get_ident() != main:
            return
        counted[0] += 1
        look()
        if counted[0] == at or (lasting and counted[0] > at):
            strike()

    return watcher, counted


def fail(number: int) -> Callable[[], None]:
    def strike() -> None:
        raise OSError(number, os.strerror(number))

    return strike


def check_the_end(tier: Tier, watch: Watch, run: Run) -> None:
    """What is reported is there, the next writer clears all up, and saves what was not saved."""
    watch.look()
    good = {checkpoint.version.step for checkpoint in tier.scan()[0]}
    least = Rule(1).kept(Version(1, step) for step in watch.told)
    assert {version.step for version in least} <= good
    after = Run(tier, run.snapshots, watch.told.append)
    after.open()
    watch.look()
    assert not [folder for folder in tier.store.folders() if folder.startswith((".tmp", ".trash"))]
    assert {checkpoint.version.step for checkpoint in tier.scan()[0]} >= good, "older ones are as they were"
    for step in set(STEPS) - good:
        if step > max(good, default=0):
            assert after.open().write(*run.snapshots.of[step]).version.step == step
    after.open().write(*run.snapshots.of[4])
    after.prune(1)
    assert files_of(tier.store) == {
        f"step-0000000004.a0001/{name}" for name in (*run.snapshots.of[4][1], "manifest.json")
    }


def files_of(store: Store) -> set[str]:
    """Every file of every folder but those of the one claim; no folder is empty."""
    if isinstance(store, FakeStore):
        assert all(store.content.values())
        names = {f"{folder}/{name}" for folder, files in store.content.items() for name in files}
    else:
        root = Path(store.where)
        assert all(any(path.iterdir()) for path in root.rglob("*") if path.is_dir())
        names = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    claims = {name for name in names if name.startswith(".fence/")}
    assert len(claims) == 1
    return names - claims


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_an_operation_that_fails_loses_nothing_and_leaves_nothing(
    kind: str, lasting: bool, number: int, memory: Path, snapshots: Snapshots
) -> None:
    at, failed = 0, True
    while failed:
        at += 1
        tier = open_kind(kind, memory / "root")
        watch = Watch(tier, snapshots)
        run = Run(tier, snapshots, watch.told.append)
        watcher, counted = numbered(at, fail(number), watch.look, lasting=lasting)
        before = faults.watch(watcher)
        try:
            run.scenario()
        finally:
            faults.watch(before)
        failed = counted[0] >= at
        check_the_end(tier, watch, run)
        shutil.rmtree(memory / "root", ignore_errors=True)
    assert at > 60
    assert watch.told == list(STEPS), "the last run had no failure"
    assert run.errors == 0


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_row_16_a_process_that_ends_at_any_operation_loses_nothing_and_leaves_nothing(
    kind: str, end: str, memory: Path, snapshots: Snapshots
) -> None:
    at, ended = 0, True
    while ended:
        at += 1
        root = memory / "root"
        told = in_child(kind, root, snapshots, at, end)
        ended = told[-1:] != ["done"]
        tier = open_kind(kind, root)
        watch = Watch(tier, snapshots)
        watch.told = [int(word) for word in told if word != "done"]
        check_the_end(tier, watch, Run(tier, snapshots, watch.told.append))
        shutil.rmtree(root)
    assert at > 60


def in_child(kind: str, root: Path, snapshots: Snapshots, at: int, end: str) -> list[str]:
    """Run the scenario in a process that ends at its `at`-th operation; what it reported."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            watcher, _ = numbered(at, lambda: os.kill(os.getpid(), 9) if end == "kill" else os._exit(1), lambda: None)
            faults.watch(watcher)
            Run(open_kind(kind, root), snapshots, lambda step: void(os.write(writing, b"%d " % step))).scenario()
            os.write(writing, b"done ")
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().decode().split()
    os.waitpid(child, 0)
    return told


def void(_: object) -> None:
    """For lambdas that must return None."""


@pytest.mark.parametrize("name", ["disk.read", "disk.sync", "disk.unlink", "disk.rmdir", "disk.link"])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_kind_of_operation_that_fails_for_a_while_loses_nothing(
    kind: str, name: str, memory: Path, snapshots: Snapshots
) -> None:
    """Those of other threads, too: the one that reads back is one."""
    tier = open_kind(kind, memory / "root")
    watch = Watch(tier, snapshots)
    run = Run(tier, snapshots, watch.told.append)

    def watcher(seen: str, where: str, detail: Any) -> None:
        if seen == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), where)

    before = faults.watch(watcher)
    try:
        run.scenario()
    finally:
        faults.watch(before)
    assert run.errors > 0
    check_the_end(tier, watch, run)
    shutil.rmtree(memory / "root")


def every_change(root: Path, snapshots: Snapshots, commit: str) -> None:
    """What brings every operation of a folder about: the scenario in either way, once without hard links."""
    run = Run(disk(root, commit), snapshots, lambda step: None)
    run.scenario()
    assert run.errors == 0


def test_these_tests_pass_every_operation_of_a_disk(
    tmp_path: Path, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    before = faults.watch(lambda name, where, detail: seen.add(name))
    try:
        for commit in ("rename", "manifest"):
            every_change(tmp_path / commit, snapshots, commit)
    finally:
        faults.watch(before)
    assert seen == set(DISK), "an operation that no scenario passes is not tested"


CHANGES = (
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "remove",
    "rmdir",
    "link",
    "symlink",
    "fsync",
    "truncate",
    "ftruncate",
)
NAMES = {
    "mkdir": "disk.mkdir", "rename": "disk.rename", "unlink": "disk.unlink", "rmdir": "disk.rmdir",
    "link": "disk.link",
}  # fmt: skip


@pytest.mark.parametrize("commit", ["rename", "manifest"])
def test_no_change_of_the_file_system_goes_unnamed(
    commit: str, tmp_path: Path, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that changes something comes right after the operation of its name and path."""
    named: list[tuple[str, str]] = []
    unnamed: list[str] = []
    calls = 0

    def tracing(function: Callable[..., Any], wanted: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if str(arguments[0]).startswith(str(tmp_path)):
                calls += 1
                if (wanted, str(arguments[0])) not in named[-2:]:  # the thread that reads back may come between
                    unnamed.append(f"{function.__name__}{arguments}")
            return function(*arguments, **options)

        return call

    for name, wanted in NAMES.items():
        monkeypatch.setattr(os, name, tracing(getattr(os, name), wanted))
    real_open = os.open

    def opening(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT and ("disk.create", str(path)) not in named[-2:]:
            unnamed.append(f"open({path})")
        return real_open(path, flags, *rest, **options)

    real_fsync = os.fsync

    def syncing(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if not {("disk.sync", path), ("disk.sync_dir", path)} & set(named[-2:]):
            unnamed.append(f"fsync({path})")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "fsync", syncing)
    before = faults.watch(lambda name, where, detail: named.append((name, where)))
    try:
        every_change(tmp_path / "checkpoints", snapshots, commit)
    finally:
        faults.watch(before)
    assert unnamed == []
    assert calls > 20


STORAGE = ("store", "directory", "commit", "tier", "fence", "writer", "follower", "retention", "manifest", "shardfile",
           "gather", "together", "recovery")  # fmt: skip


THROUGH = ("files.", "self.store.", "store.", "faults.")


@pytest.mark.parametrize("module", STORAGE)
def test_a_module_of_the_storage_changes_a_file_system_only_through_the_named_functions(module: str) -> None:
    (path,) = Path(dtrain.tiers.__path__[0]).rglob(f"{module}.py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            through = called.startswith(
                ("files.", "self.store.", "store.", "faults.", "self.commit.", "ByManifest(self.store).")
            )
            assert through or node.func.attr not in CHANGES, f"{module}.py:{node.lineno}: {called}"
