"""Who has come to node 0: other launchers join, are refused, are started again, leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from ..network.hello import Hello, refusal
from ..network.lane import Message
from ..network.line import Host, Mate

LATE_S = 1.0
"""A node that was silent for this long may be replaced by a new launcher of the same rank."""


class Company:
    """The launchers of the other nodes by their node, as far as they were let in."""

    def __init__(
        self, host: Host, most: int, mine: Hello, welcome: dict[str, Any], tell: Callable[..., None],
        give_up: Callable[[Mate, str], None],
    ) -> None:  # fmt: skip
        """Let in nodes below `most` whose hello fits `mine`; `give_up` is called for one that another replaces."""
        self.host, self.most, self.mine, self.welcome = host, most, mine, welcome
        self.tell, self.give_up = tell, give_up
        self.mates: dict[int, Mate] = {}
        self.refused: dict[int, str] = {}
        """Why, by node."""
        self._twins: dict[int, tuple[Mate, float]] = {}
        """Who has come, and when, by node."""

    def __getitem__(self, node: int) -> Mate:
        return self.mates[node]

    def __iter__(self) -> Iterator[Mate]:
        """All that are not given up."""
        return iter([mate for mate in self.mates.values() if mate.dead is None])

    def is_of(self, mate: Mate) -> bool:
        """Tell whether a launcher speaks for its node: it was let in, not replaced and not given up."""
        return self.mates.get(mate.node) is mate and mate.dead is None

    @property
    def ready(self) -> set[int]:
        """Nodes that are there and may take part."""
        return {mate.node for mate in self if mate.ready}

    @property
    def words(self) -> set[str]:
        """The words by which the launchers that are there are known."""
        return {mate.word for mate in self}

    def tell_all(self, message: Message) -> None:
        """Send a message to all that are there."""
        for mate in self:
            self.host.post(mate, message)

    def hear(self, mate: Mate) -> None:
        """A launcher has said hello: refuse it, or see whether its node is still free."""
        reason = refusal(self.mine, mate.hello, self.most)
        if reason is None:
            self._twins[mate.node] = (mate, time.monotonic())
            return
        mate.dead = self.refused[mate.node] = reason
        self.host.post(mate, {"kind": "refused", "detail": reason})
        self.tell("warning", detail=f"{mate} was refused: {reason}")

    def decide_between_twins(self, *, begun: bool) -> None:
        """Whoever comes as a node that is there takes its place if that one is silent, else it is refused.

        `begun`: an attempt has been made, so who comes now resumes.
        """
        for node, (mate, since) in list(self._twins.items()):
            before = self.mates.get(node)
            if before is None or before.dead is not None or before.life.silent_s > LATE_S:
                if before is not None and before.dead is None:
                    self.give_up(before, "was started again")
                self.refused.pop(node, None)
                self.mates[node] = mate
                self.host.post(mate, {"kind": "welcome", "resumes": begun, **self.welcome})
            elif time.monotonic() - since > 2 * LATE_S:
                mate.dead = f"{before} is there already: give each node its own --node-rank"
                self.host.post(mate, {"kind": "refused", "detail": mate.dead})
            else:
                continue
            del self._twins[node]
