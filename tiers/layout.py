"""Names of everything a run writes; names are matched exactly or ignored, and used once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"step-(\d{10})\.a(\d{4,9})")
_STAGING = re.compile(r"\.(?:tmp|trash)-step-\d{10}\.a\d{4,9}")
_ATTEMPT = re.compile(r"attempt-(\d{4,9})")
FILE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
MANIFEST = "manifest.json"


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """One version of the state. Ordered by attempt first: a later attempt continues what it restored."""

    attempt: int
    step: int

    @property
    def dirname(self) -> str:
        """Folder of this version in a tier."""
        return f"step-{self.step:010d}.a{self.attempt:04d}"

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.attempt})"


def parse_version(dirname: str) -> Version | None:
    """Return the version a folder name stands for, or None for any other name."""
    match = _STEP.fullmatch(dirname)
    return Version(attempt=int(match[2]), step=int(match[1])) if match else None


def is_leftover(dirname: str) -> bool:
    """Tell whether a folder is an unfinished write or delete of ours."""
    return _STAGING.fullmatch(dirname) is not None


def shard_name(rank: int) -> str:
    """File of one rank's shard."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run."""

    root: Path

    @property
    def run(self) -> Path:
        """Who this run is: id, name, when it began."""
        return self.root / "run.json"

    @property
    def spec(self) -> Path:
        """The spec as it is used."""
        return self.root / "spec.json"

    @property
    def plan(self) -> Path:
        """The plan as it is used."""
        return self.root / "plan.json"

    @property
    def lock(self) -> Path:
        """Held by the one process that drives the run."""
        return self.root / "lock"

    @property
    def metrics(self) -> Path:
        """One line per step."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One line per event."""
        return self.root / "events.jsonl"

    @property
    def logs(self) -> Path:
        """Logs of all attempts."""
        return self.root / "logs"

    def attempt(self, attempt: int) -> Path:
        """Logs of one attempt."""
        return self.logs / f"attempt-{attempt:04d}"

    def log(self, attempt: int, rank: int) -> Path:
        """Log of one rank in one attempt."""
        return self.attempt(attempt) / f"rank-{rank:05d}.log"

    def error(self, attempt: int, rank: int) -> Path:
        """What ended one rank in one attempt, written by the rank itself."""
        return self.attempt(attempt) / f"rank-{rank:05d}.error.json"

    def job(self, attempt: int) -> Path:
        """What the workers of one attempt are told."""
        return self.attempt(attempt) / "job.json"

    def disk(self, path: str) -> Path:
        """Folder of a disk tier; relative paths lie in the run."""
        return self.root / path

    def next_attempt(self) -> int:
        """Take the next attempt number: the folder made for it keeps anybody else from taking it too."""
        self.logs.mkdir(parents=True, exist_ok=True)
        number = self.last_attempt() + 1
        self.attempt(number).mkdir()
        return number

    def last_attempt(self) -> int:
        """Highest attempt number used so far, 0 for none."""
        if not self.logs.is_dir():
            return 0
        matches = (_ATTEMPT.fullmatch(entry.name) for entry in self.logs.iterdir())
        return max((int(match[1]) for match in matches if match), default=0)
