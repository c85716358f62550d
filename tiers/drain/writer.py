"""The one that writes into a slower tier: commits, prunes, and says how it went; a tier that fails is tried again."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..fence import ClaimGone, Fenced, Taken
from ..format.jsonfile import Unreadable, append_event
from ..format.layout import RunDir, Version
from ..format.manifest import Manifest
from ..memory.gather import Part
from ..retention import Rule
from ..stores.health import Health
from ..stores.store import Place, place_from_json
from ..tier import Checkpoint, Tier, open_tier
from ..together import Group, is_begun
from ..together import write as write_together

Load = Callable[[], contextlib.AbstractContextManager[tuple[Manifest | Part, Mapping[str, Path]]]]
"""Gives the manifest of a version, or this node's part of it, and a file of this machine for each name in it.

Raises Unreadable, OSError.
"""


class TierFailed(Exception):
    """A tier failed whose `on_failure` is `stop`."""

    def __init__(self, message: str, version: Version) -> None:
        """Say what happened with which version."""
        super().__init__(message)
        self.version = version


@dataclass(frozen=True)
class TierJob:
    """What the drainer is told of a tier."""

    place: Place
    keep: int
    keep_every: int | None = None
    every: int = 1
    """Steps between checkpoints; those of the first tier are pinned by the workers, whatever this says."""
    on_failure: str = "continue"

    def to_json(self) -> dict[str, Any]:
        """Form for the job file."""
        return {**vars(self), "place": self.place.to_json()}


def tier_job_from_json(value: dict[str, Any]) -> TierJob:
    """Read the form of the job file."""
    return TierJob(**{**value, "place": place_from_json(value["place"])})


class Writer:
    """Writes the checkpoints of one run into one tier. Used by one thread."""

    def __init__(
        self, job: TierJob, run: RunDir, run_id: str, group: Group, on_taken: Callable[[str, str], None] | None = None
    ) -> None:
        """Prepare; the place is claimed with the first write, by the node that leads.

        `on_taken` gets the tier's name and the reason when somebody else has taken the place over.
        """
        self.job, self.run, self.run_id, self.group, self.on_taken = job, run, run_id, group, on_taken
        self.rule = Rule(job.keep, job.keep_every)
        self.health = Health()
        self.closed = False
        """Somebody else has the place: it is never claimed nor written again, and counts as holding nothing of ours."""
        self.verified: set[Version] = set()
        self._claimed: Tier | None = None
        self._tier: Tier | None = None
        self._needed = 0
        self._known: set[Version] | None = None
        """What was there at the first claim, and what we tried to add."""
        self._above = 0
        self._untold: tuple[Version, str, int] | None = None

    @property
    def name(self) -> str:
        """Type of the tier."""
        return self.job.place.type

    def belongs(self, version: Version) -> bool:
        """Tell whether a version belongs into the tier by its interval."""
        return version.step % self.job.every == 0

    def open(self) -> Tier:
        """Claim the place and clear up what an earlier writer left. Raises OSError, Taken, Fenced.

        A place in the run's folder is not made again when that folder was removed.
        """
        if Path(self.job.place.url).is_relative_to(self.run.root) and not self.run.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the run's folder was removed", str(self.run.root))
        if self._tier is None:
            tier = open_tier(self.job.place, self.run_id, self.run.spool, self.run.root)
            if self.group.leads and not self.closed:
                tier = self._claimed = self._claimed or self._claim(tier)
                tier.remove_leftovers()
            self._tier = tier
        return self._tier

    def _claim(self, tier: Tier) -> Tier:
        """Once more after ours was deleted, unless somebody has come and gone meanwhile. Raises Taken, Fenced."""
        claimed = tier.fenced(self._above)
        assert claimed.fence is not None
        try:
            there = claimed.versions()
            if self._known is not None and (new := there - self._known):
                raise Fenced(
                    f"{tier.store.where}: somebody else has written {max(new)} there; this process writes no more"
                )
        except (OSError, Fenced):
            with contextlib.suppress(OSError):
                claimed.fence.release()
            raise
        if self._known is None:
            self._known = there
        self._above = claimed.fence.epoch
        return claimed

    def release(self) -> None:
        """Give the place back, as far as it lets us."""
        if self._claimed is not None and self._claimed.fence is not None:
            with contextlib.suppress(OSError, Unreadable):
                self._claimed.fence.release()
        self._claimed = self._tier = None

    def holds(self, version: Version) -> bool:
        """Tell whether a version is committed here whole; False too when the tier cannot be read or was taken over."""
        with contextlib.suppress(OSError, Taken, Fenced):
            return not self.closed and self.open().holds(version)
        return False

    def get(self, version: Version) -> Checkpoint | None:
        """A version that is committed here; None too when the tier cannot be read."""
        with contextlib.suppress(OSError, Taken, Fenced):
            return self.open().get(version)
        return None

    def is_begun(self, version: Version) -> bool:
        """Tell whether node 0 waits for the parts of a version here; False too when the tier cannot be read."""
        with contextlib.suppress(OSError, Unreadable, Taken, Fenced):
            return is_begun(self.open(), version)
        return False

    def carry(
        self, version: Version, load: Load, spared: Callable[[], set[Version]] = set, *, last: bool = False
    ) -> bool:
        """Commit one version and prune; False (and an event) when that failed or the tier is not tried now.

        The `last` one is tried whatever has failed before. Raises TierFailed when the spec wants the run stopped then.
        """
        if self.closed:
            return False
        if not last and not self.health.ready(time.monotonic()):
            self.health.passed_over()
            self._left_out(version, "the tier failed before and is not tried again yet")
            return False
        try:
            try:
                self._write(load)
            except ClaimGone:
                self._forget_claim()
                if not last and self.job.on_failure != "stop":
                    raise
                self._write(load)  # the place itself is well, and no later try makes up for this one
        except Unreadable as error:
            self._skipped(version, str(error))
            return False
        except (Fenced, Taken) as error:
            self._taken(version, error)
            return False
        except OSError as error:
            self._failed(version, error)
            return False
        if self.group.leads:
            self._prune(version, spared())
        return True

    def _forget_claim(self) -> None:
        self._claimed = self._tier = None

    def _taken(self, version: Version, error: Fenced | Taken) -> None:
        """Tell it once, and never write here again. Raises TierFailed when the spec wants the run stopped then."""
        self.closed = True
        words = f"no more checkpoints go to the {self.name} tier: {error}"
        if self.on_taken is not None:
            self.on_taken(self.name, str(error))
        if self.job.on_failure == "stop":
            raise TierFailed(f"{words} (its on_failure is stop)", version) from error
        self._tell("fault", version, rank=None, kind="taken", tier=self.name, detail=words)

    def _write(self, load: Load) -> None:
        with load() as (content, sources):
            self._write_content(content, sources)

    def _write_content(self, content: Manifest | Part, sources: Mapping[str, Path]) -> None:
        started = time.monotonic()
        self._needed = content.nbytes
        tier = self.open()
        if self._known is not None:
            self._known.add(content.version)
        if isinstance(content, Part) and self.group.nodes > 1:
            if content.version in self.verified:
                return  # the nodes have agreed on it anew while it was being written
            checkpoint = write_together(tier, content, sources, self.group)
        else:
            checkpoint = tier.write(content, sources)
        if self.group.leads:
            self._committed(checkpoint, time.monotonic() - started)

    def _committed(self, checkpoint: Checkpoint, seconds: float) -> None:
        manifest = checkpoint.manifest
        self.verified.add(manifest.version)
        self._tell(
            "committed", manifest.version, tier=self.name, bytes=manifest.nbytes, seconds=seconds,
            bytes_per_s=manifest.nbytes / seconds if seconds > 0 else None, path=checkpoint.where,
        )  # fmt: skip
        left_out, self._untold = self.health.worked(), None
        if left_out:
            self._tell(
                "warning", manifest.version,
                detail=f"the {self.name} tier works again; {left_out} checkpoints were left out meanwhile",
            )  # fmt: skip

    def _failed(self, version: Version, error: OSError) -> None:
        if isinstance(error, FileExistsError):  # somebody's folder has this name: the tier itself is well
            self._skipped(version, _words(error))
            return
        self.health.failed(time.monotonic())
        self._left_out(version, f"{_words(error)}{self._room()}")
        if self.job.on_failure == "stop":
            words = f"the {self.name} tier failed and its on_failure is stop: {_words(error)}{self._room()}"
            raise TierFailed(words, version)

    def _room(self) -> str:
        with contextlib.suppress(OSError):
            info = os.statvfs(self.job.place.url)
            free = info.f_bavail * info.f_frsize
            return f"; needed {self._needed:,} bytes, free there {free:,} bytes and {info.f_favail:,} files"
        return ""

    def _prune(self, version: Version, spared: set[Version]) -> None:
        try:
            pruned = self.open().prune(self.rule, self.verified, spared)
        except (Fenced, Taken) as error:
            self._taken(version, error)
            return
        except OSError as error:
            if isinstance(error, ClaimGone):
                self._forget_claim()
            self._tell("warning", version, detail=f"an old checkpoint could not be deleted: {error}")
            return
        self.verified &= set(pruned.kept)

    def end(self) -> None:
        """Nothing more comes: tell of what was left out last, if it was not told yet, and give the place back."""
        if self._untold is not None:
            self._skipped(*self._untold)
        self.release()

    def _left_out(self, version: Version, reason: str) -> None:
        self._untold = (version, reason, self.health.left_out)
        if self.health.worth_telling:
            self._skipped(*self._untold)

    def _skipped(self, version: Version, reason: str, left_out: int = 1) -> None:
        """`left_out` counts within one outage: what follows the first needs no person's eye."""
        self._untold = None
        self._tell("skipped", version, tier=self.name, reason=reason, left_out=left_out)

    def _tell(self, event: str, version: Version, **details: object) -> None:
        append_event(self.run.events, event, version.step, version.attempt, **details)


def _words(error: OSError) -> str:
    """An OSError without its number: what, and where if it says."""
    text = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {text}" if error.filename else text
