"""A log of every change that a tier makes to a file system, and every state a power cut may leave of it.

The model is that of POSIX at its worst. Data of a file that was not fsynced may be missing, cut, zeroed or there; a
file that was is as it was. Every change of a name (create, link, rename, unlink, mkdir, rmdir) that no later fsync of
its folder covers may have happened or not, each for itself; one rename is one change. The cut may come after any
operation.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tests.tiers.build import RUN_ID, manifest_of, snapshot

from dtrain.tiers import faults
from dtrain.tiers.format.layout import Version
from dtrain.tiers.format.manifest import Manifest
from dtrain.tiers.memory.slots import MemoryDir
from dtrain.tiers.retention import Rule
from dtrain.tiers.stores.store import Place
from dtrain.tiers.tier import Tier, open_tier

Tree = dict[str, bytes | None]
"""Path → content of a file, None for a folder."""
_ROOMS = ("tier", "commit", "fence", "directory", "copyfile", "files")
ALL = 2**14
"""Of the changes of names that are under way at one moment, all subsets are tried: there are never as many as this."""
MANY = 2**9
"""Where fsyncs are left out there are more: all subsets up to this many, then the likeliest."""


class Snapshots:
    """What is to be saved, by step: made once, used by every run."""

    def __init__(self, folder: Path, steps: Sequence[int], world: int = 2) -> None:
        self.of: dict[int, tuple[Manifest, dict[str, Path]]] = {}
        for step in steps:
            memory = MemoryDir(folder / f"memory-{step}")
            memory.path.mkdir(parents=True)
            snapshot(memory, step, world=world)
            self.of[step] = manifest_of(memory, memory.whole()[Version(1, step)])

    def is_right(self, manifest: Manifest) -> bool:
        """Tell whether a manifest is the one of what was saved."""
        return manifest.to_bytes() == self.of[manifest.version.step][0].to_bytes()


def disk(root: Path, commit: str) -> Tier:
    """A tier in a folder, with the given way to commit."""
    return open_tier(Place("disk", str(root), {"commit": commit}), RUN_ID)


class Killed(BaseException):
    """Stands for a SIGKILL: raised at an operation and at every one after it, so that nothing is changed any more."""


@dataclass
class Op:
    """One operation; `data` is what a file holds when it is fsynced, `told` the steps reported committed before.

    `site` are the functions of `tiers` that it came through, outermost first.
    """

    name: str
    where: str
    detail: Any
    told: tuple[int, ...]
    data: bytes = b""
    site: str = ""


@dataclass
class Recorder:
    """Logs the operations of this thread's file system changes; dies or fails at the `stop_at`-th."""

    stop_at: int | None = None
    error: BaseException | None = None
    lasting: bool = False
    ops: list[Op] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    count: int = 0

    def __enter__(self) -> Recorder:
        self._thread = threading.get_ident()
        self._before = faults.watch(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        faults.watch(self._before)

    def _see(self, name: str, where: str, detail: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if name == "disk.sync_dir" and not Path(where).is_dir():
            return  # it fails, and that is known and allowed for
        self.count += 1
        if self.error is not None and self._struck():
            raise self.error
        data = Path(where).read_bytes() if name == "disk.sync" else b""
        self.ops.append(Op(name, where, detail, tuple(self.told), data, _site()))

    def _struck(self) -> bool:
        return self.count == self.stop_at or (self.lasting and self.stop_at is not None and self.count > self.stop_at)


def _site() -> str:
    names: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        path = Path(code.co_filename)
        if "tiers" in path.parts[-3:-1] and path.stem in _ROOMS:
            names.append(code.co_qualname)
        frame = frame.f_back
    return " > ".join(reversed(names))


def save(tier: Tier, snapshots: Snapshots, step: int, log: Recorder) -> None:
    """Commit a step, report it."""
    tier.write(*snapshots.of[step])
    log.told.append(step)


def keep(tier: Tier, number: int, log: Recorder) -> None:
    """Delete what the rule does not keep, as a writer does that has read back what it committed."""
    tier.prune(Rule(number), {Version(1, step) for step in log.told})


@dataclass
class _Inode:
    is_dir: bool
    names: dict[str, int] = field(default_factory=dict)
    """Of a folder: as a process sees it now."""
    durable: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[str, ...]] = field(default_factory=list)
    target: dict[str, int] = field(default_factory=dict)
    content: bytes = b""
    synced: bool = False


class Disk:
    """What is durable and what is under way after some operations below a folder that was durable before."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.inodes = [_Inode(True)]

    def run(self, ops: Sequence[Op], contents: Sequence[bytes]) -> None:
        """Carry operations out; `contents` gives, for each, what a file created there holds in the end."""
        for op, content in zip(ops, contents, strict=True):
            self._do(op, content)

    def _find(self, path: Path) -> int | None:
        number = 0
        for part in path.relative_to(self.top).parts:
            following = self.inodes[number].names.get(part)
            if following is None:
                return None
            number = following
        return number

    def _do(self, op: Op, content: bytes) -> None:
        path = Path(op.where)
        if not path.is_relative_to(self.top):
            return
        kind = op.name.removeprefix("disk.")
        number = self._find(path)
        if kind == "sync_dir":
            assert number is not None
            folder = self.inodes[number]
            folder.durable, folder.pending = dict(folder.names), []
        elif kind == "sync":
            assert number is not None
            self.inodes[number].synced = True
            self.inodes[number].content = op.data
        elif kind in ("mkdir", "create"):
            self.inodes.append(_Inode(kind == "mkdir", content=content))
            self._change(path, "add", path.name, str(len(self.inodes) - 1))
        elif kind == "link":
            self._change(path, "add", Path(op.detail).name, str(number))
        elif kind == "rename":
            self._change(path, "move", path.name, Path(op.detail).name, str(number))
        elif kind in ("unlink", "rmdir") and number is not None and not self.inodes[number].names:
            self._change(path, "remove", path.name)

    def _change(self, path: Path, *change: str) -> None:
        number = self._find(path.parent)
        assert number is not None, path
        folder = self.inodes[number]
        folder.pending.append(change)
        _apply(folder.names, change)

    def states(self, most: int) -> Iterator[Tree]:
        """Every tree that may be found after a power cut now."""
        pending = [(number, index) for number, inode in enumerate(self.inodes) for index in range(len(inode.pending))]
        for chosen in _subsets(pending, most):
            names = {number: dict(inode.durable) for number, inode in enumerate(self.inodes)}
            for number, index in chosen:
                _apply(names[number], self.inodes[number].pending[index])
            found: list[tuple[str, int]] = []
            self._walk(0, "", names, found)
            open_files = [(path, n) for path, n in found if not self.inodes[n].is_dir and not self.inodes[n].synced]
            whole: Tree = {p: None if self.inodes[n].is_dir else self.inodes[n].content for p, n in found}
            for fate in itertools.product(*(_fates(self.inodes[number].content) for _, number in open_files)):
                yield whole | {path: data for (path, _), data in zip(open_files, fate, strict=True)}

    def _walk(self, number: int, path: str, names: dict[int, dict[str, int]], found: list[tuple[str, int]]) -> None:
        for name, inode in sorted(names[number].items()):
            below = f"{path}/{name}" if path else name
            found.append((below, inode))
            if self.inodes[inode].is_dir:
                self._walk(inode, below, names, found)


def _apply(names: dict[str, int], change: tuple[str, ...]) -> None:
    if change[0] == "add":
        names[change[1]] = int(change[2])
    elif change[0] == "remove":
        names.pop(change[1], None)
    else:
        names.pop(change[1], None)
        names[change[2]] = int(change[3])


def _fates(content: bytes) -> set[bytes]:
    return {b"", content[: len(content) // 2], bytes(len(content)), content}


def _subsets(pending: Sequence[tuple[int, int]], most: int) -> Iterator[Sequence[tuple[int, int]]]:
    """All, in order; of very many: none, all, each alone, all but each, and each beginning."""
    assert most < ALL or 2 ** len(pending) <= ALL
    if 2 ** len(pending) <= most:
        for size in range(len(pending) + 1):
            yield from itertools.combinations(pending, size)
        return
    for index in range(len(pending) + 1):
        yield pending[:index]
        yield pending[index : index + 1]
        yield [*pending[:index], *pending[index + 1 :]]


def states_of(
    ops: Sequence[Op], top: Path, first: int = 0, seen: set[int] | None = None, most: int = ALL
) -> Iterator[tuple[int, tuple[int, ...], Tree]]:
    """For a cut after each operation from `first` on: (operations done, steps reported by then, tree).

    None twice, and none in `seen`; trees that differ only in what a claim says are the same.
    """
    seen = set() if seen is None else seen
    disk, contents = Disk(top), _contents(ops)
    for done in range(len(ops) + 1):
        if done:
            disk.run(ops[done - 1 : done], contents[done - 1 : done])
        if done < first:
            continue
        told = ops[done].told if done < len(ops) else ops[-1].told
        for tree in disk.states(most):
            items = ((path, b"" if data and ".fence" in path else data) for path, data in tree.items())
            key = hash((told[-1:], frozenset(items)))
            if key not in seen:
                seen.add(key)
                yield done, told, tree


def _contents(ops: Sequence[Op]) -> list[bytes]:
    """What each file that is created is going to hold, known from when it is fsynced; garbage if it never is."""
    final: dict[str, bytes] = {}
    contents: list[bytes] = []
    for op in reversed(ops):
        if op.name == "disk.sync":
            final[op.where] = op.data
        contents.append(final.pop(op.where, b"\x5a" * 5000) if op.name == "disk.create" else b"")
    return contents[::-1]


def materialise(tree: Tree, top: Path) -> None:
    """Make a tree below the folder `top`, which is there."""
    for path, data in sorted(tree.items()):
        if data is None:
            (top / path).mkdir()
        else:
            descriptor = os.open(top / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(descriptor, data)
            os.close(descriptor)
