"""Network namespaces for nodes, each with a compute and a storage link to all others; links that can be cut."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

INTERFACES = ("comp0", "stor0")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Links:
    """The namespaces, by node; all links meet in a namespace of their own that has a bridge for each channel."""

    names: list[str]
    hub: str
    cut_off: set[tuple[int, str]] = field(default_factory=set)
    ways: set[tuple[int, int]] = field(default_factory=set)

    def address(self, node: int, channel: int = 0) -> str:
        return f"10.232.{channel}.{1 + node}"

    def exec(self, node: int, *words: str) -> list[str]:
        """A command that runs in a node's namespace."""
        return ["ip", "netns", "exec", self.names[node], *words]

    def sent(self, node: int, interface: str) -> int:
        """Bytes that a node has sent over an interface."""
        counter = f"/sys/class/net/{interface}/statistics/tx_bytes"
        return int(subprocess.run(self.exec(node, "cat", counter), check=True, capture_output=True).stdout)

    def cut(self, node: int, interface: str) -> None:
        """Frames of both directions are lost from now on; the node's own side stays up, as behind a dead switch."""
        ip("-n", self.hub, "link", "set", f"{interface}n{node}", "down")
        self.cut_off.add((node, interface))

    def mend(self, node: int, interface: str) -> None:
        ip("-n", self.hub, "link", "set", f"{interface}n{node}", "up")
        self.cut_off.discard((node, interface))

    def cut_way(self, here: int, there: int) -> None:
        """What one node sends to another is lost, on both channels; what comes from there arrives."""
        for channel in range(len(INTERFACES)):
            ip("-n", self.names[here], "route", "add", "blackhole", f"{self.address(there, channel)}/32")
        self.ways.add((here, there))

    def mend_way(self, here: int, there: int) -> None:
        for channel in range(len(INTERFACES)):
            ip("-n", self.names[here], "route", "del", "blackhole", f"{self.address(there, channel)}/32")
        self.ways.discard((here, there))

    def mend_all(self) -> None:
        for node, interface in list(self.cut_off):
            self.mend(node, interface)
        for here, there in list(self.ways):
            self.mend_way(here, there)


@contextmanager
def made_links(nodes: int) -> Iterator[Links]:
    """Raises CalledProcessError where there are no namespaces to be had."""
    names = [f"dtrain-test-{os.getpid()}-{node}" for node in range(nodes)]
    hub = f"dtrain-test-{os.getpid()}-hub"
    links = Links(names, hub)
    try:
        for name in (hub, *names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for channel, interface in enumerate(INTERFACES):
            ip("-n", hub, "link", "add", f"b{channel}", "type", "bridge")
            ip("-n", hub, "link", "set", f"b{channel}", "up")
            for node, name in enumerate(names):
                far = f"{interface}n{node}"
                ip("link", "add", far, "netns", hub, "type", "veth", "peer", "name", interface, "netns", name)
                ip("-n", hub, "link", "set", far, "master", f"b{channel}")
                ip("-n", hub, "link", "set", far, "up")
                ip("-n", name, "addr", "add", f"{links.address(node, channel)}/24", "dev", interface)
                ip("-n", name, "link", "set", interface, "up")
        yield links
    finally:
        for name in (*names, hub):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)
