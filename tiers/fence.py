"""The fence: who writes into a store last shuts out who wrote before.

Every drainer claims the next number when it starts, by creating `.fence/epoch-<number>.json`, which only one can, and
gives it back when it ends in good order. Before a change that others see (commit, delete) it looks whether its claim
still stands: the file of the next number is not there, and its own is, with its own content. A node that was cut off,
or a process that was stopped and wakes up an hour later, finds itself shut out before it can commit or delete
anything. Between the look and the change lies one request; what slips through there is a whole checkpoint of an older
attempt, or the delete of one that the rule did not keep.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass

from .files import final_name
from .jsonfile import Unreadable, dumps
from .store import Store, StoreError

FOLDER = ".fence"
_CLAIM = re.compile(r"epoch-(\d{10})\.json")
_MAX_BYTES = 65536
_TRIES = 100


class Fenced(Exception):
    """Somebody has claimed the store after us; the message names them."""


class Taken(Exception):
    """Another run holds the store; the message names it."""


@dataclass(frozen=True)
class Fence:
    """Our claim on a store."""

    store: Store
    epoch: int
    content: bytes

    def check(self) -> None:
        """Raise Fenced when a later claim is there, or ours is not."""
        if not self.stands():
            raise Fenced(f"{self.store.where} was taken over by {holder(self.store)}; this process writes no more")

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


def claim(store: Store, run_id: str) -> Fence:
    """Take the store for a run, shutting out whoever wrote for it before.

    Raises Taken when another run has it, OSError when the store fails.
    """
    lost: OSError = StoreError(f"{store.where}/{FOLDER}: claimed by others again and again")
    for _ in range(_TRIES):
        newest = max(_claims(store), default=0)
        if newest:
            _refuse_other(store, newest, run_id)
        fence = Fence(store, newest + 1, _content_for(run_id))
        try:
            store.create(FOLDER, claim_name(fence.epoch), fence.content)
        except (FileExistsError, FileNotFoundError) as error:
            lost = error  # another one was quicker, or gave the place back just now
            continue
        store.sync()
        if max(_claims(store), default=0) > fence.epoch:
            continue  # we were so slow that our number had been used and cleared away before we took it
        store.delete(FOLDER, [name for name in store.files(FOLDER) if _is_outdated(name, fence.epoch)])
        return fence
    raise lost


def _is_outdated(name: str, epoch: int) -> bool:
    """A claim before `epoch`, or what somebody who died while claiming, or who comes too late now, has left."""
    match = _CLAIM.fullmatch(final_name(name))
    return match is not None and (int(match[1]) < epoch or (int(match[1]) == epoch and name != claim_name(epoch)))


def _content_for(run_id: str) -> bytes:
    info = {
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
    return f"process {info.get('pid')} on {info.get('host')} since {info.get('started')} (run {info.get('run_id')})"


def refuse_other(store: Store, run_id: str) -> None:
    """Raise Taken when another run has the store."""
    newest = max(_claims(store), default=0)
    if newest:
        _refuse_other(store, newest, run_id)


def _refuse_other(store: Store, epoch: int, run_id: str) -> None:
    owner = _read(store, epoch).get("run_id")
    if owner not in (None, run_id):
        raise Taken(
            f"{store.where} belongs to another run ({holder(store)}); give each run a place of its own, "
            f"or delete {store.where}/{FOLDER} if that run is gone for good"
        )


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
