"""The fence: who writes into a store last shuts out who wrote before.

Every drainer claims the next number when it starts, by creating `.fence/epoch-<number>.json`, which only one can, and
gives it back when it ends in good order. Before a change that others see (commit, delete) it looks whether its claim
still stands: the file of the next number is not there, and its own is, with its own content. A node that was cut off,
or a process that was stopped and wakes up an hour later, finds itself shut out before it can commit or delete
anything. Between the look and the change lies one request; what slips through there is a whole checkpoint of an older
attempt, or the delete of one that the rule did not keep.

A claim that is gone while nobody else has one (a person has deleted `.fence`) was not taken over: the writer claims
again, with a number above its old one.

Two copies of one run's folder (`cp -r`) have one run id, so a claim also says the run's folder and host, and so does
the manifest of every checkpoint made under it (`made_by`): the claim goes in good order, the checkpoint stays. A run
is refused where the claim, or its own newest checkpoint, names another folder in which a `run.json` with the same id
can be read. A folder that is gone (the run was moved), holds another run, or cannot be seen from here (another host,
which may be lost) does not hold a run up: there the fence alone decides, and who is shut out is told. A place inside
the run's own folder was copied with it, and is not asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .format.files import final_name
from .format.jsonfile import Unreadable, dumps, read
from .format.layout import RunDir
from .stores.directory import DirectoryStore
from .stores.store import Store, StoreError

FOLDER = ".fence"
_CLAIM = re.compile(r"epoch-(\d{10})\.json")
_MAX_BYTES = 65536
_TRIES = 100


class Fenced(Exception):
    """Somebody has claimed the store after us; the message names them."""


class Taken(Exception):
    """Another run, or another copy of this one, holds the store; the message names it."""


class ClaimGone(StoreError):
    """Our claim was deleted, and nobody else has one: it may be made again."""


@dataclass(frozen=True)
class Fence:
    """Our claim on a store."""

    store: Store
    epoch: int
    content: bytes
    made_by: dict[str, str] = field(default_factory=dict)
    """Host and folder of the run, for what is made under this claim; empty when not known."""
    device: int | None = None
    """File system of the place when it was claimed."""

    def check(self) -> None:
        """Raise Fenced when somebody else has a claim, ClaimGone when nobody has one any more, OSError."""
        if self.stands():
            return
        if not self._is_anybody_there():
            if _device(self.store) != self.device:
                raise StoreError(f"{self.store.where} is on another file system than before: unmounted?")
            raise ClaimGone(f"{self.store.where}/{FOLDER}: our claim was deleted by somebody")
        raise Fenced(f"{self.store.where} was taken over by {holder(self.store)}; this process writes no more")

    def _is_anybody_there(self) -> bool:
        """Read whatever claims are listed, for listings may be late; ours with another content is somebody's."""
        numbers = {*_claims(self.store), self.epoch, self.epoch + 1}
        return any(_content(self.store, number) is not None for number in numbers)

    def stands(self) -> bool:
        """Tell whether nobody has claimed the store after us. Raises OSError."""
        later = _content(self.store, self.epoch + 1)
        return later is None and _content(self.store, self.epoch) == self.content

    def release(self) -> None:
        """Give the store back, so that nothing of us is left in it. Raises OSError."""
        if self.stands():
            self.store.delete(FOLDER, [claim_name(self.epoch)])
            with contextlib.suppress(FileNotFoundError):
                self.store.sync(FOLDER)
            self.store.sync()  # else a power cut brings it back, and another run finds the place taken


def claim_name(epoch: int) -> str:
    """File of a claim."""
    return f"epoch-{epoch:010d}.json"


def claim(store: Store, run_id: str, home: Path | None = None, above: int = 0) -> Fence:
    """Take the store for the run in the folder `home`, shutting out whoever wrote for it before.

    `above`: number of a claim that we had and that was deleted. Raises Taken when another run, or another copy of this
    one, has the store, OSError when the store fails.
    """
    made_by = {} if home is None else {"host": socket.gethostname(), "output_dir": str(home.resolve())}
    lost: OSError = StoreError(f"{store.where}/{FOLDER}: claimed by others again and again")
    for _ in range(_TRIES):
        newest = max(_claims(store), default=0)
        if newest:
            _refuse_other(store, newest, run_id, home)
        fence = Fence(store, max(newest, above) + 1, _content_for(run_id, made_by), made_by)
        try:
            store.create(FOLDER, claim_name(fence.epoch), fence.content)
        except (FileExistsError, FileNotFoundError) as error:
            lost = error  # another one was quicker, or gave the place back just now
            continue
        store.sync()
        if max(_claims(store), default=0) > fence.epoch:
            continue  # we were so slow that our number had been used and cleared away before we took it
        store.delete(FOLDER, [name for name in store.files(FOLDER) if _is_outdated(name, fence.epoch)])
        return replace(fence, device=_device(store))
    raise lost


def _is_outdated(name: str, epoch: int) -> bool:
    """A claim before `epoch`, or what somebody who died while claiming, or who comes too late now, has left."""
    match = _CLAIM.fullmatch(final_name(name))
    return match is not None and (int(match[1]) < epoch or (int(match[1]) == epoch and name != claim_name(epoch)))


def _device(store: Store) -> int | None:
    """The file system that a folder lies on, or would lie on if it were made; None for a bucket."""
    if not isinstance(store, DirectoryStore):
        return None
    path = store.root
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.stat().st_dev


def _content_for(run_id: str, made_by: Mapping[str, str]) -> bytes:
    info = {
        **made_by,
        "run_id": run_id,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "token": secrets.token_hex(8),
    }
    return dumps(info)


def holder(store: Store) -> str:
    """Who has the store, in words."""
    info = _read(store, max(_claims(store), default=0))
    folder = f" in {info['output_dir']}" if info.get("output_dir") else ""
    return (
        f"process {info.get('pid')} on {info.get('host')} since {info.get('started')} "
        f"(run {info.get('run_id')}{folder})"
    )


def refuse_other(store: Store, run_id: str, home: Path | None = None) -> None:
    """Raise Taken when another run, or another copy of the run in `home`, has the store."""
    newest = max(_claims(store), default=0)
    if newest:
        _refuse_other(store, newest, run_id, home)


def refuse_copy(store: Store, run_id: str, home: Path | None, made_by: Any) -> None:
    """Raise Taken when what is in the store was `made_by` another copy of the run in `home` that is still there."""
    said = made_by.get("output_dir") if isinstance(made_by, Mapping) else None
    if home is None or not isinstance(said, str) or _lies_in(store, home) or not _is_copy(Path(said), home, run_id):
        return
    raise Taken(
        f"{store.where} holds checkpoints of the run in {said}, and {home} is a copy of it (both are run {run_id}): "
        "each would delete the other's. Give the copy a place of its own (another path or url in tiers; "
        "dtrain resume --from PATH begins from a checkpoint elsewhere), or begin a new run with another output_dir; "
        f"if {home} is the one that goes on here, move {said} away or delete its run.json"
    )


def _is_copy(other: Path, home: Path, run_id: str) -> bool:
    try:
        if other.samefile(home):
            return False
        return read(RunDir(other).run).get("run_id") == run_id
    except (OSError, ValueError, Unreadable):
        return False  # gone, not to be seen from here, or not a run


def _lies_in(store: Store, home: Path) -> bool:
    return isinstance(store, DirectoryStore) and store.root.resolve().is_relative_to(home.resolve())


def _refuse_other(store: Store, epoch: int, run_id: str, home: Path | None) -> None:
    info = _read(store, epoch)
    if info.get("run_id") not in (None, run_id):
        raise Taken(
            f"{store.where} belongs to another run ({holder(store)}); give each run a place of its own, "
            f"or delete {store.where}/{FOLDER} if that run is gone for good"
        )
    refuse_copy(store, run_id, home, info)


def _claims(store: Store) -> list[int]:
    return [int(match[1]) for name in store.files(FOLDER) if (match := _CLAIM.fullmatch(name))]


def _content(store: Store, epoch: int) -> bytes | None:
    """By reading, not by listing: listings may be late."""
    try:
        return store.read(FOLDER, claim_name(epoch), _MAX_BYTES)
    except FileNotFoundError:
        return None


def _read(store: Store, epoch: int) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError, Unreadable):
        value = json.loads(store.read(FOLDER, claim_name(epoch), _MAX_BYTES))
        if isinstance(value, dict):
            return value
    return {}
