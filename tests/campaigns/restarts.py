"""Did each restart begin from the newest step that it could have? Judged by what a run has written down.

With a peer tier that is waited for (`every: 1`) two steps at most are repeated, and none that all peers are told to
have. That holds for every restart, also for one after an attempt that died before it made a copy of its own: it began
from a step that was in some nodes' memory. It does not hold where more nodes have lost their memory since than there
are replicas, nor where training went on without a copy that was late; both are known, and counted by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]
MOST_REPEATED = 2
"""Steps done again at most where other nodes had a copy."""


@dataclass(frozen=True)
class Restart:
    """An attempt after another one."""

    attempt: int
    reached: int
    """The last step that all ranks had finished, or the one that the attempt before began from."""
    began: int
    tier: str | None
    skipped: Sequence[Any]
    expected: int
    """The oldest step that it may begin from."""
    excuse: str | None
    """Why it may repeat more than two steps."""

    @property
    def repeated(self) -> int:
        """Steps done again."""
        return max(0, self.reached - self.began)

    @property
    def is_wrong(self) -> bool:
        """It repeats more than it may."""
        return self.began < self.expected

    def __str__(self) -> str:
        return (
            f"attempt {self.attempt} begins from step {self.began} ({self.tier}), not from {self.expected} or later, "
            f"after step {self.reached}; passed over: {list(self.skipped)}"
        )


def restarts(
    metrics: Iterable[Line], events: Sequence[Line], lost: Sequence[tuple[float, int]], replicas: int
) -> list[Restart]:
    """Every restart of a run, in order.

    `lost`: when (seconds since the epoch) which node has lost its memory. `replicas` of the peer tier; 0 without one:
    then nothing is expected.
    """
    last: dict[int, int] = {}
    for line in metrics:
        last[line["attempt"]] = max(line["step"], last.get(line["attempt"], 0))
    restored = {event["attempt"]: event for event in events if event["event"] == "restored"}
    begun = {event["attempt"]: event["time"] for event in events if event["event"] == "attempt"}
    found: list[Restart] = []
    reached = since = None
    valid = 0.0  # what was told to be copied before is no more of the past that the run goes on from
    for attempt in sorted(begun):
        if attempt not in last and attempt not in restored:
            continue  # it came to nothing, and changed nothing
        from_ = restored.get(attempt, {})
        began = from_.get("step", 0)
        if reached is not None and since is not None:
            said = [event for event in events if valid <= event["time"] <= begun[attempt]]
            expected, excuse = _expected(reached, since, begun[attempt], said, lost, replicas)
            tier, skipped = from_.get("tier"), from_.get("skipped", [])
            found.append(Restart(attempt, reached, began, tier, skipped, expected, excuse))
            valid = begun[attempt] if began < reached - MOST_REPEATED else valid
        reached, since = max(began, last.get(attempt, 0)), begun[attempt]
    return found


def _expected(
    reached: int, since: float, until: float, events: Sequence[Line], lost: Sequence[tuple[float, int]], replicas: int
) -> tuple[int, str | None]:
    """The oldest step that may be gone on from, and why that may be more than two steps back."""
    if not replicas:
        return 0, "there are no copies"
    told = [event for event in events if event.get("tier") == "peer"]
    copied = [event for event in told if event["event"] == "committed" and event["step"] <= reached]
    newest = max(copied, key=lambda event: event["time"], default=None)
    step, since = (newest["step"], newest["time"]) if newest is not None else (0, since)
    gone = {node for time, node in lost if since <= time <= until}
    if len(gone) > replicas:
        return 0, f"{len(gone)} nodes lost their memory after the last copy"
    late = max((event["time"] for event in told if event["event"] == "warning"), default=0.0)
    if late > since:
        return step, "training went on without a copy that was late"
    return max(step, reached - MOST_REPEATED), None
