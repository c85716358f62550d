"""A bucket over HTTP for tests: moto's server on this machine, and a proxy before it that fails as it is told to."""

from __future__ import annotations

import contextlib
import http.client
import logging
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from moto.s3 import models
from moto.server import ThreadedMotoServer
from tests.tiers.build import TENSORS, Place, snapshot, value_of
from werkzeug.serving import WSGIRequestHandler

from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.reading.recovery import candidate_of, contents, open_candidate
from dtrain.tiers.stores.object import ObjectStore
from dtrain.tiers.stores.store import Place as StorePlace
from dtrain.tiers.tier import Checkpoint, Tier

KEY_ID = "AKIAWHALEBONE4711"
SECRET = "sesame/Tr0ubador+horseradish"
TOKEN = "token-quinquereme-of-nineveh"
SECRETS = (KEY_ID, SECRET, TOKEN)
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY_ID,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_SESSION_TOKEN": TOKEN,
    "AWS_REGION": "us-east-1",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
SMALLEST_PART = 1024
"""Bytes that the server takes as a part of an upload; S3 itself asks for 5 MiB."""
CHUNK = 4096
BUCKET = "checkpoints"
STEP = "step-{:010d}.a0001"
ACTIONS = ("status", "lose", "cut", "slow", "trickle", "short", "flip", "hang")


@contextlib.contextmanager
def serving(bucket: str = BUCKET, port: int = 0) -> Iterator[str]:
    """Run an S3 server with one bucket; gives its address. All such servers of a process share their content."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    quiet, small = logging.getLogger("werkzeug"), mock.patch.object(models, "S3_UPLOAD_PART_MIN_SIZE", SMALLEST_PART)
    quiet.setLevel(logging.ERROR)
    WSGIRequestHandler.disable_nagle_algorithm = True
    server.start()
    try:
        small.start()
        host, port = server.get_host_and_port()
        call(f"http://{host}:{port}", "PUT", bucket)
        yield f"http://{host}:{port}"
    finally:
        small.stop()
        server.stop()


def call(endpoint: str, method: str, path: str, body: bytes | None = None) -> bytes:
    """One plain request past dtrain, for a look at (or a hand in) what really lies there."""
    who = f"AWS4-HMAC-SHA256 Credential={KEY_ID}/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    headers = {"Authorization": who, "Content-Type": "application/octet-stream"}
    request = urllib.request.Request(f"{endpoint}/{path}", data=body, method=method, headers=headers)
    with urllib.request.urlopen(request) as reply:
        data: bytes = reply.read()
    return data


def keys(endpoint: str, prefix: str, bucket: str = BUCKET) -> list[str]:
    """Keys of all objects below a prefix, without it."""
    listed = call(endpoint, "GET", f"{bucket}?list-type=2&prefix={prefix}/").decode()
    return [key.removeprefix(f"{prefix}/") for key in re.findall(r"<Key>([^<]+)</Key>", listed)]


@dataclass
class Fault:
    """What goes wrong, for which requests, and how often."""

    action: str
    """`status`: that answer at once, nothing is forwarded. `lose`: forwarded, then the connection ends without an
    answer. `cut`: the connection ends in the middle of the request's body. `slow`: the answer comes late. `trickle`:
    the answer's body comes at `rate` bytes a second. `short`: the connection ends in the middle of it. `flip`: one bit
    of it is wrong. `hang`: no answer until the proxy ends."""
    method: str = ".*"
    path: str = ".*"
    times: int | None = None
    """None: for ever."""
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 0.0
    rate: int = 0
    struck: int = 0

    def strikes(self, method: str, path: str) -> bool:
        """Count a request in if this fault is meant for it."""
        if self.times is not None and self.struck >= self.times:
            return False
        if not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        self.struck += 1
        return True


@dataclass
class Proxy:
    """Stands between a store and its server."""

    target: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of every request that came."""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.ending = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.server.daemon_threads = True
        self.server.proxy = self  # type: ignore[attr-defined]

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def fail(self, action: str, method: str = ".*", path: str = ".*", times: int | None = None, **how: Any) -> Fault:
        """Script one more fault; the first that matches a request strikes."""
        assert action in ACTIONS
        fault = Fault(action, method, path, times, **how)
        with self.lock:
            self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """Forget all faults."""
        with self.lock:
            self.faults.clear()

    def seen(self, method: str, path: str = "") -> list[str]:
        """Paths of the requests of one method."""
        with self.lock:
            return [where for how, where in self.requests if how == method and re.search(path, where)]

    def choose(self, method: str, path: str) -> Fault | None:
        """The fault that a request meets."""
        with self.lock:
            self.requests.append((method, path))
            return next((fault for fault in self.faults if fault.strikes(method, path)), None)


@contextlib.contextmanager
def proxying(target: str) -> Iterator[Proxy]:
    """Run a proxy before a server."""
    proxy = Proxy(target)
    thread = threading.Thread(target=proxy.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.ending.set()
        proxy.server.shutdown()
        proxy.server.server_close()
        thread.join()


def place_at(endpoint: str, prefix: str) -> StorePlace:
    """The place of a tier."""
    return StorePlace("object", f"s3://{BUCKET}/{prefix}", {"endpoint": endpoint})


def store_at(endpoint: str, prefix: str, spool: Path | None = None) -> ObjectStore:
    """The store there."""
    return ObjectStore(f"s3://{BUCKET}/{prefix}", {"endpoint": endpoint}, spool)


def write(tier: Tier, place: Place, step: int) -> Checkpoint:
    """Commit a snapshot of `step`."""
    snapshot(place.memory, step)
    return tier.write(*gather(place.memory, place.memory.whole()[Version(1, step)]))


def good_steps(tier: Tier, spool: Path) -> list[int]:
    """Steps of the checkpoints there; each one must be right in every byte."""
    found = tier.scan()[0]
    for checkpoint in found:
        got = {info.name: bytearray() for info in TENSORS}
        for content in contents(open_candidate(candidate_of(checkpoint), spool)):
            if content.is_state:
                got[content.name] += content.data
        step = checkpoint.version.step
        assert {name: bytes(data) for name, data in got.items()} == {t.name: value_of(t, step) for t in TENSORS}
    return [checkpoint.version.step for checkpoint in found]


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def proxy(self) -> Proxy:
        proxy: Proxy = self.server.proxy  # type: ignore[attr-defined]
        return proxy

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the other side left
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def answer(self) -> None:
        fault = self.proxy.choose(self.command, self.path)
        action = fault.action if fault is not None else ""
        length = int(self.headers.get("Content-Length", 0))
        if action == "cut":
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        body = self.rfile.read(length)
        if action == "hang":
            self.proxy.ending.wait()
            self.close_connection = True
            return
        if fault is not None and action == "status":
            text = f"<Error><Code>{fault.code}</Code><Message>scripted</Message></Error>".encode()
            self.reply(fault.status, {"Content-Type": "application/xml"}, text)
            return
        status, headers, data = self.forward(body)
        if action == "lose":
            self.close_connection = True
            return
        if fault is not None and action == "slow":
            time.sleep(fault.seconds)
        if action == "flip" and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        rate = fault.rate if fault is not None and action == "trickle" else 0
        self.reply(status, headers, data, cut=action == "short", rate=rate)

    def forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.proxy.target.removeprefix("http://"))
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            connection.request(self.command, self.path, body, headers)
            reply = connection.getresponse()
            return reply.status, dict(reply.getheaders()), reply.read()
        finally:
            connection.close()

    def reply(self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False, rate: int = 0) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        size = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", size)
        self.end_headers()
        data = b"" if self.command == "HEAD" else data[: len(data) // 2] if cut else data
        piece = max(1, rate // 20) if rate else len(data) or 1
        for start in range(0, len(data), piece):
            self.wfile.write(data[start : start + piece])
            if rate:
                time.sleep(piece / rate)
        if cut:
            self.close_connection = True


for _method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
    setattr(_Handler, f"do_{_method}", _Handler.answer)
