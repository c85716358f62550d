"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..specs.codes import Code


@dataclass(frozen=True)
class Outcome:
    """How a run ended, for the person and for the exit code."""

    status: str
    code: Code
    message: str
    step: int
    attempt: int
    state_digest: str | None = None
    loss: float | None = None
    seconds: float = 0.0
    trace: str | None = None
    log: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What other nodes are told."""
        told = {"status": self.status, "code": int(self.code), "message": self.message, "step": self.step}
        return {**told, "log": self.log} if self.log is not None else told


def lower(code: Code, lost: str) -> Code:
    """A run that lost a tier to somebody else never ends as if all was well, nor asks to be run again.

    It does not matter that another tier has the last step: two writers call themselves this run, and only a person
    can say which one goes on.
    """
    return Code.MISSING_RESOURCE if lost else code
