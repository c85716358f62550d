"""What a launcher says of itself when it joins the others, and why it may be refused."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ... import __version__
from ...specs.difference import changes
from ...specs.load import spec_to_json
from ...specs.models import Spec

MAX_TOLD = 5


@dataclass(frozen=True)
class Hello:
    """One launcher: its place, its machine, and what must be the same on all nodes."""

    node: int
    host: str
    pid: int
    address: str
    """Of this node, on the way to the rendezvous."""
    versions: dict[str, str]
    spec: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Form for the store."""
        return asdict(self)


def hello(spec: Spec, node: int, address: str) -> Hello:
    """What this launcher has to say."""
    versions = {"dtrain": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return Hello(node, socket.gethostname(), os.getpid(), address, versions, spec_to_json(spec))


def refusal(mine: Hello, theirs: Mapping[str, Any], nodes: int) -> str | None:
    """Why node 0 does not take another launcher in; None when it does. Everything that differs is named."""
    node, versions, spec = (theirs.get(key) for key in ("node", "versions", "spec"))
    if not isinstance(node, int) or not isinstance(versions, dict) or not isinstance(spec, dict):
        return "it does not say who it is"
    if not 0 < node < nodes:
        return f"its node rank is {node}; of {nodes} nodes the ranks are 0 to {nodes - 1}"
    different = [
        f"{name} is {versions.get(name)} there and {mine.versions[name]} on node 0"
        for name in ("dtrain", "torch")
        if versions.get(name) != mine.versions[name]
    ]
    found = changes(mine.spec, spec)
    different += [f"{c.key} is {c.now} there and {c.then} on node 0" for c in found[:MAX_TOLD]]
    if len(found) > MAX_TOLD:
        different.append(f"{len(found) - MAX_TOLD} more keys differ")
    return f"all nodes need the same spec and the same versions: {'; '.join(different)}" if different else None
