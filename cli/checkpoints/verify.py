"""`dtrain verify`: every byte of every checkpoint against its digests."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

from ...specs.codes import Code
from ...tiers.format.jsonfile import Unreadable
from ...tiers.reading.recovery import Opened, Source, contents
from ...tiers.reading.whole import facts_of
from ...tiers.stores.copyfile import digest_uncached
from ...tiers.stores.store import Progress
from ...tiers.tier import Rejected
from ..terminal.refusal import guarded
from ..view.format import human_bytes, human_seconds
from .output import document, progress, say, talk
from .stored import Held, is_unreachable, nothing, pick

GOOD, DAMAGED, GONE, UNREACHABLE, UNFINISHED = "good", "damaged", "gone", "unreachable", "unfinished"


def verify(target: str, as_json: bool, tier: str | None = None) -> int:
    """Check every byte of every checkpoint, or of one step. Returns the exit code, 65 when something is damaged."""
    return guarded(lambda: _verify(target, as_json, tier), as_json)


def _verify(target: str, as_json: bool, tier: str | None) -> Code:
    picked = pick(target, tier)
    stored = picked.stored
    for words in stored.unreachable:
        talk(f"warning: {words}")
    if not picked.chosen and not picked.rejected:
        raise nothing(picked)
    rows = []
    for number, held in enumerate(picked.chosen, 1):
        rows.append(_checked(held, f"{number}/{len(picked.chosen)}"))
        _tell(rows[-1], as_json)
    for bad, state in [*((bad, DAMAGED) for bad in picked.rejected), *((one, UNFINISHED) for one in stored.unfinished)]:
        if picked.step in (None, bad.version.step):
            rows.append(_unread(bad, state))
            _tell(rows[-1], as_json)
    if as_json:
        document({"run_dir": str(stored.root), "checkpoints": rows, "unreachable": stored.unreachable})
    states = {row["state"] for row in rows}
    if DAMAGED in states:
        return Code.DAMAGED
    return Code.MISSING_RESOURCE if UNREACHABLE in states or stored.unreachable else Code.DONE


def _checked(held: Held, position: str) -> dict[str, Any]:
    state, reason = GOOD, None
    passes = 1 if held.place is None else 2
    started = time.monotonic()
    try:
        with progress(f"{position} {held}", held.nbytes * passes) as told:
            check(held.open(), told)
    except Unreadable as error:
        state, reason = UNREACHABLE if is_unreachable(error) else DAMAGED, str(error)
        if held.is_gone():
            state, reason = GONE, "it has left the tier meanwhile, as the old ones of a live run do"
    seconds = time.monotonic() - started
    return {
        **held.candidate.to_json(),
        "state": state,
        "good": state == GOOD,
        "reason": reason,
        "bytes": held.nbytes,
        "seconds": seconds,
        "bytes_per_s": held.nbytes / seconds if state == GOOD and seconds > 0 else None,
    }


def _unread(bad: Rejected, state: str) -> dict[str, Any]:
    where = {"tier": bad.tier, "step": bad.version.step, "attempt": bad.version.attempt, "folder": bad.where}
    return {
        **where,
        "state": state,
        "good": False,
        "reason": bad.reason,
        "bytes": None,
        "seconds": None,
        "bytes_per_s": None,
    }


def check(opened: Opened, told: Progress) -> None:
    """Each file as a whole past the page cache, then its header and entries; raises Unreadable at the first fault.

    A remote file is fetched once for both. Before all that, the pieces must make up the tensors.
    """
    facts_of(opened)
    wanted = [info["digest"] for info in opened.meta.get("files", {}).values()]  # in memory a file has none
    for index, source in enumerate(opened.sources):
        with contextlib.ExitStack() as stack:
            try:
                path = stack.enter_context(source.open())
                content = digest_uncached(path, told) if wanted else None
            except OSError as error:
                raise Unreadable(f"{source.where}: {error.strerror or error}") from error
            if content is not None and content != wanted[index]:
                raise Unreadable(f"{source.where}: does not match its digest")
            _check_entries(opened, source, path, told)


def _check_entries(opened: Opened, source: Source, path: Path, told: Progress) -> None:
    here = dataclasses.replace(source, open=lambda: contextlib.nullcontext(path))
    for piece in contents(dataclasses.replace(opened, sources=(here,))):
        told(len(piece.data))


def _tell(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return
    what = f"step {row['step']} (attempt {row['attempt']}, {row['tier']})"
    if row["state"] != GOOD:
        say(f"{what}: {'DAMAGED' if row['state'] == DAMAGED else row['state']}: {row['reason']}")
        return
    speed = f"{human_bytes(row['bytes'])} in {human_seconds(row['seconds'])}, {human_bytes(row['bytes_per_s'])}/s"
    say(f"{what}: good, {speed}")
