"""Fixtures of the tests of the object tier; a plugin, for no other test pays for the server."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from tests.tiers.s3 import CHUNK, ENVIRONMENT, Proxy, proxying, serving

from dtrain.tiers.stores import object as object_store


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Address of an S3 server with one bucket."""
    with serving() as endpoint:
        yield endpoint


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials, small parts, few retries."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "CHUNK", CHUNK)
    monkeypatch.setattr(object_store, "MAX_RETRIES", 2)
    monkeypatch.setattr(object_store, "PAUSE_S", 0.01)
    monkeypatch.setattr(object_store, "FIRST_BACKOFF", timedelta(milliseconds=5))
    monkeypatch.setattr(object_store, "LONGEST_BACKOFF", timedelta(milliseconds=20))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits that a test can sit out."""
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT", timedelta(seconds=0.4))
    monkeypatch.setattr(object_store, "RETRY_TIMEOUT", timedelta(seconds=0.5))


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    """A proxy before the server that does no harm yet."""
    with proxying(server) as made:
        yield made


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A folder of the bucket for this test alone."""
    return f"runs/{abs(hash(request.node.nodeid)):x}"
