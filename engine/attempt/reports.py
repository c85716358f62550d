"""What a node reports of an attempt that is over there, and the reports of all nodes as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..job import WorkerError
from .agent import Ended
from .supervise import Hang


@dataclass(frozen=True)
class Report:
    """How the workers of a node ended: what each left, which stood still, and the step each was at."""

    ended: Ended
    errors: tuple[WorkerError, ...] = ()
    hangs: tuple[Hang, ...] = ()
    at_work: dict[int, int] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    """Bytes of memory that each rank has had at once at most."""

    def to_json(self) -> dict[str, Any]:
        """Form for messages."""
        return {
            "exit_codes": list(map(list, self.ended.exit_codes.items())),
            "signal": self.ended.signal_number,
            "errors": [asdict(error) for error in self.errors],
            "at_work": list(map(list, self.at_work.items())),
            "peaks": list(map(list, self.peaks.items())),
        }


def report_from_json(value: dict[str, Any]) -> Report:
    """Read the form of `to_json`; raises ValueError for what is none."""
    try:
        codes = {int(rank): int(code) for rank, code in value["exit_codes"]}
        number = value["signal"]
        return Report(
            Ended(codes, int(number) if number is not None else None),
            tuple(WorkerError(**error) for error in value["errors"]),
            at_work={int(rank): int(step) for rank, step in value["at_work"]},
            peaks={int(rank): int(peak) for rank, peak in value["peaks"]},
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the report of a node: {error}") from error


def together(reports: Mapping[int, Report], number: int | None) -> Report:
    """Put the reports of all nodes into one, in the order in which they came; hangs are known to node 0 alone.

    `number` is a signal that a launcher has told of before.
    """
    codes: dict[int, int] = {}
    errors: list[WorkerError] = []
    at_work: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for report in reports.values():
        codes |= report.ended.exit_codes
        number = number if number is not None else report.ended.signal_number
        errors += report.errors
        at_work |= report.at_work
        peaks |= report.peaks
    return Report(Ended(codes, number), tuple(errors), reports[0].hangs, at_work, peaks)
