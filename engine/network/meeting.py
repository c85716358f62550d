"""Where the workers of one node meet: a store on the loopback address alone.

Torch's own rendezvous opens two stores on every address of the machine, whatever endpoint it is given, and keeps
threads for nodes that may come. An agent of ours has no other nodes (see `agent`), so all that is left of a rendezvous
is the store.
"""

from __future__ import annotations

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from .addresses import LOOPBACK_ADDRESS, Endpoint
from .line import open_store

BACKEND = "dtrain"


class OneNode(RendezvousHandler):
    """A rendezvous of one node, which is always complete."""

    def __init__(self, run_id: str) -> None:
        """The store is opened when the node joins."""
        self._run_id, self._closed = run_id, False
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """As the base class has it."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The workers take the agent's store for theirs."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """This node alone. Raises NetworkError."""
        self._store = self._store or open_store(Endpoint(LOOPBACK_ADDRESS, 0))
        where = RendezvousStoreInfo(LOOPBACK_ADDRESS, self._store.port)
        return RendezvousInfo(PrefixStore(f"agent/{self._run_id}", self._store), 0, 1, where)

    def is_closed(self) -> bool:
        """As the base class has it."""
        return self._closed

    def set_closed(self) -> None:
        """As the base class has it."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """None ever does."""
        return 0

    def get_run_id(self) -> str:
        """As the base class has it."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store with the last of its users."""
        self._closed, self._store = True, None
        return True


def _made(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneNode(parameters.run_id)


def backend() -> str:
    """The name by which the elastic agent asks for it."""
    rendezvous_handler_registry.register(BACKEND, _made)
    return BACKEND
