"""A node that looks for node 0 says why it does not reach it while there is time to mend it."""

from __future__ import annotations

import socket
import time

import pytest

from dtrain.engine.network import line
from dtrain.engine.network.addresses import NetworkError, parse_endpoint


def test_a_name_that_nobody_has_is_told_once_and_again_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*words: object, **more: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(line, "TELL_S", 0.0)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    said: list[str] = []
    with pytest.raises(NetworkError, match="start node 0 there, with --node-rank 0"):
        line.wait_for_host(parse_endpoint("nod0:29500"), time.monotonic() + 0.5, said.append)
    (words,) = said
    assert words.startswith("not reached yet: the rendezvous host nod0 cannot be found: Name or service not known; ")
    assert words.endswith("(cluster.rejoin_timeout)")


def test_a_node_0_that_is_there_is_found_without_a_word() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = parse_endpoint(f"127.0.0.1:{server.getsockname()[1]}")
        line.wait_for_host(endpoint, time.monotonic() + 5, said.append)
    assert not said
