"""A thread of the drainer that fills a slower tier from the one before it, without holding anybody up.

One checkpoint is under way and one waits; a newer one takes the waiting one's place, which counts as left out.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from ..format.jsonfile import Unreadable, append_event
from ..format.layout import Version
from ..format.manifest import Manifest
from ..stores.health import is_power_of_two
from .writer import Load, TierFailed, Writer


class Follower:
    """Carries versions from the tier of `source` into the tier of `target`."""

    def __init__(self, source: Writer, target: Writer) -> None:
        """Prepare; `start` starts the thread."""
        self.source, self.target = source, target
        self.failure: TierFailed | None = None
        self._waiting: Version | None = None
        self._under_way: Version | None = None
        self._ending = False
        self._untold = (Version(0, 0), 0)
        """The last checkpoint that a newer one overtook, and how many since that was told."""
        self._in_a_row = 0
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"dtrain-{target.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def offer(self, version: Version) -> None:
        """The source has committed a version that belongs here too."""
        with self._changed:
            overtaken, self._waiting = self._waiting, version
            self._changed.notify()
        if overtaken is None:
            self._in_time()
        elif overtaken != version:
            self._untold, self._in_a_row = (overtaken, self._untold[1] + 1), self._in_a_row + 1
            if is_power_of_two(self._in_a_row):
                self._tell_overtaken()

    def _in_time(self) -> None:
        self._in_a_row = 0
        if self._untold[1]:
            self._tell_overtaken()

    def _tell_overtaken(self) -> None:
        (version, count), self._untold = self._untold, (Version(0, 0), 0)
        append_event(
            self.target.run.events, "skipped", version.step, version.attempt, tier=self.target.name,
            reason="the tier is slower than its interval: a newer checkpoint goes first", left_out=count,
        )  # fmt: skip

    def spared(self) -> set[Version]:
        """Versions that the source must not delete yet."""
        with self._changed:
            return {version for version in (self._waiting, self._under_way) if version is not None}

    def carry_now(self, version: Version, load: Load, *, last: bool) -> bool:
        """The source has failed: carry a version here from somewhere else, in the caller's thread."""
        with self._writing:
            return self.target.carry(version, load, last=last)

    def finish(self) -> None:
        """Carry what waits, then end."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()
        self._in_time()

    def _run(self) -> None:
        while (version := self._next()) is not None:
            try:
                with self._writing:
                    self.target.carry(version, partial(self._load, version), last=self._ending)
            except TierFailed as error:
                self.failure = error
                return
            finally:
                with self._changed:
                    self._under_way = None

    def _next(self) -> Version | None:
        with self._changed:
            while self._waiting is None and not self._ending:
                self._changed.wait()
            self._under_way, self._waiting = self._waiting, None
            return self._under_way

    @contextlib.contextmanager
    def _load(self, version: Version) -> Iterator[tuple[Manifest, Mapping[str, Path]]]:
        checkpoint = self.source.get(version)
        if checkpoint is None:
            raise Unreadable(f"{version} is no longer in the {self.source.name} tier")
        with contextlib.ExitStack() as stack:
            store = checkpoint.tier.store
            files = checkpoint.manifest.files
            yield (
                checkpoint.manifest,
                {name: stack.enter_context(store.local(checkpoint.folder, name)) for name in files},
            )
