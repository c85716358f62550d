"""Names of everything a run writes; names are matched exactly or ignored, and used once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"step-(\d{10})\.a(\d{4,9})")
_UNFINISHED = re.compile(r"\.(?:tmp|trash)-(step-\d{10}\.a\d{4,9})")
_ATTEMPT = re.compile(r"attempt-(\d{4,9})")
_SHARD = re.compile(r"rank-(\d{5,9})\.safetensors")
_PART = re.compile(r"part-(\d{5,9})\.json")
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
MANIFEST = "manifest.json"
INTENT = "begun.json"
"""In `.tmp-…` or `.trash-…`: the folder of that name is being written or deleted, where renames are not atomic."""


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


def staging_name(folder: str) -> str:
    """Folder in which a checkpoint is made."""
    return f".tmp-{folder}"


def trash_name(folder: str) -> str:
    """Folder in which a checkpoint is deleted."""
    return f".trash-{folder}"


def unfinished(dirname: str) -> str | None:
    """Folder name of the checkpoint whose unfinished write or delete a folder is, or None for any other name."""
    match = _UNFINISHED.fullmatch(dirname)
    return match[1] if match else None


def is_ours(name: str) -> bool:
    """Tell whether a file in a checkpoint's folder has one of the names that dtrain gives."""
    return is_note(name) or _SHARD.fullmatch(name) is not None


def is_note(name: str) -> bool:
    """Tell whether a file in a checkpoint's folder has a name that dtrain gives to what is no shard."""
    return name in (MANIFEST, INTENT) or _PART.fullmatch(name) is not None


def part_name(node: int) -> str:
    """File in which one node of several tells what it has added to a checkpoint."""
    return f"part-{node:05d}.json"


def check_name(name: str) -> str:
    """Return a file's name if it is one of the fixed alphabet; raises ValueError: names from data are no paths."""
    if _FILE_NAME.fullmatch(name) is None:
        raise ValueError(f"file name {name!r}")
    return name


def shard_name(rank: int) -> str:
    """File of one rank's shard."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run; what a node other than node 0 has for itself lies in a folder of its own."""

    root: Path
    node: int = 0

    @property
    def own(self) -> Path:
        """Folder of the files that each node has for itself."""
        return self.root / f"node-{self.node:05d}" if self.node else self.root

    @property
    def run(self) -> Path:
        """Who this run is: id, name, when it began."""
        return self.own / "run.json"

    @property
    def spec(self) -> Path:
        """The spec as it is used."""
        return self.own / "spec.json"

    @property
    def former(self) -> Path:
        """Places where the run had tiers and has none now."""
        return self.own / "former-tiers.json"

    @property
    def plan(self) -> Path:
        """The plan as it is used."""
        return self.own / "plan.json"

    @property
    def lock(self) -> Path:
        """Held by the one process that drives the run."""
        return self.own / "lock"

    @property
    def metrics(self) -> Path:
        """One line per step."""
        return self.own / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One line per event."""
        return self.own / "events.jsonl"

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
        """What the workers of one attempt are told on this node."""
        return self.attempt(attempt) / f"job{self._mark}.json"

    def agent_log(self, attempt: int) -> Path:
        """What the agent of this node has to say of one attempt."""
        return self.attempt(attempt) / f"agent{self._mark}.log"

    @property
    def drainer_log(self) -> Path:
        """Last words of this node's drainer."""
        return self.logs / f"drainer{self._mark}.log"

    @property
    def _mark(self) -> str:
        return f"-{self.node:05d}" if self.node else ""

    def disk(self, path: str) -> Path:
        """Folder of a disk tier; relative paths lie in the run."""
        return self.root / path

    @property
    def spool(self) -> Path:
        """Copies of remote files while they are read; cleared at every start."""
        return self.own / "spool"

    def next_attempt(self, used: int = 0) -> int:
        """Take the number after all that have a log, and after `used`; its folder keeps anybody else from taking it."""
        self.logs.mkdir(exist_ok=True)  # not the run's folder: one that was removed stays removed
        number = max(self.last_attempt(), used) + 1
        self.attempt(number).mkdir()
        return number

    def take_part(self, attempt: int) -> None:
        """Make the folder of an attempt that node 0 has begun, where node 0's is not seen here."""
        self.logs.mkdir(exist_ok=True)
        self.attempt(attempt).mkdir(exist_ok=True)

    def last_attempt(self) -> int:
        """Highest attempt number that has a log, 0 for none; logs can be lost: see lineage.highest_attempt."""
        if not self.logs.is_dir():
            return 0
        matches = (_ATTEMPT.fullmatch(entry.name) for entry in self.logs.iterdir())
        return max((int(match[1]) for match in matches if match), default=0)
