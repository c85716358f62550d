"""The object store over HTTP: requests, what is said when they fail, and what is never said."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.build import RUN_ID, Place, snapshot
from tests.tiers.s3 import BUCKET, CHUNK, SECRETS, Proxy, call, keys, place_at, proxying, store_at

from dtrain.tiers.drain.writer import TierJob, Writer
from dtrain.tiers.format.digest import digest
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.stores import object as object_store
from dtrain.tiers.stores.object import ObjectStore
from dtrain.tiers.stores.store import StoreError
from dtrain.tiers.stores.wording import masked
from dtrain.tiers.together import Group

pytest_plugins = ["tests.tiers.s3fixtures"]
pytestmark = pytest.mark.usefixtures("environment")


@pytest.mark.parametrize(
    "script",
    [
        {"action": "lose", "times": 1},
        {"action": "lose"},
        {"action": "cut", "times": 1},
        {"action": "status", "times": 2},
        {"action": "status", "times": 1, "status": 409, "code": "ConditionalRequestConflict"},
    ],
    ids=str,
)
def test_a_create_whose_reply_was_lost_is_no_error_if_the_content_is_ours(
    script: dict[str, Any], proxy: Proxy, prefix: str
) -> None:
    store = store_at(proxy.endpoint, prefix)
    fault = proxy.fail(method="PUT", **script)
    store.create("folder", "name.json", b"ours")
    assert fault.struck
    assert store.read("folder", "name.json", 10) == b"ours"


def test_a_create_without_an_answer_in_time_is_settled_by_asking_the_object(
    proxy: Proxy, prefix: str, impatient: None
) -> None:
    proxy.fail("slow", "PUT", seconds=0.8, times=1)
    store_at(proxy.endpoint, prefix).create("folder", "name.json", b"ours")
    assert len(proxy.seen("PUT")) == 1


@pytest.mark.parametrize("there", [b"", b"their", b"somebody else's, and longer than ours"])
@pytest.mark.parametrize("action", ["", "lose"])
def test_a_create_is_refused_when_the_name_has_other_content(
    there: bytes, action: str, proxy: Proxy, prefix: str
) -> None:
    store = store_at(proxy.endpoint, prefix)
    store.create("folder", "name.json", there)
    if action:
        proxy.fail(action, "PUT", times=1)
    with pytest.raises(FileExistsError):
        store.create("folder", "name.json", b"ours!")
    assert store.read("folder", "name.json", 100) == there


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 17])
def test_large_objects_go_up_in_parts_and_come_down_in_ranges(
    size: int, proxy: Proxy, prefix: str, tmp_path: Path
) -> None:
    source, store = tmp_path / "source", store_at(proxy.endpoint, prefix, tmp_path / "spool")
    told: list[int] = []
    source.write_bytes(os.urandom(size))
    assert store.copy_in("folder", "name.bin", source, told.append) == digest(source.read_bytes())
    assert sum(told) == size
    parts = -(-size // CHUNK)
    assert len(proxy.seen("PUT")) == (1 if size <= CHUNK else parts)
    assert len(proxy.seen("GET")) == parts
    with store.local("folder", "name.bin") as copy:
        assert copy.read_bytes() == source.read_bytes()
    assert not (tmp_path / "spool").exists()


def test_an_upload_never_has_more_parts_than_the_store_takes(
    proxy: Proxy, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "MAX_PARTS", 3)
    source = tmp_path / "source"
    source.write_bytes(bytes(10 * CHUNK))
    store_at(proxy.endpoint, prefix).copy_in("folder", "name.bin", source)
    assert len(proxy.seen("PUT")) == 3


def test_a_download_may_take_longer_than_one_request_is_allowed(
    proxy: Proxy, prefix: str, tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "CONCURRENCY", 1)
    source, store = tmp_path / "source", store_at(proxy.endpoint, prefix)
    source.write_bytes(os.urandom(12 * CHUNK))
    proxy.fail("trickle", "GET", rate=12 * CHUNK)
    assert store.copy_in("folder", "name.bin", source) == digest(source.read_bytes())


def test_a_list_is_read_to_its_end_and_again_when_it_broke_off(server: str, proxy: Proxy, prefix: str) -> None:
    from moto.s3.models import s3_backends

    (backend,) = (b["aws"] for b in s3_backends.values() if "aws" in b)
    for number in range(1001):
        backend.put_object(BUCKET, f"{prefix}/folder/{number}", b"x")
        backend.put_object(BUCKET, f"{prefix}/{number}/x", b"")
    store = store_at(proxy.endpoint, prefix)
    proxy.fail("short", "GET", times=1)
    assert len(store.files("folder")) == 1001
    assert len(store.folders()) == 1002


def test_deleting_what_is_gone_is_no_error_and_a_lost_reply_neither(proxy: Proxy, prefix: str) -> None:
    store = store_at(proxy.endpoint, prefix)
    store.create("folder", "a.json", b"1")
    fault = proxy.fail("lose", "POST|DELETE", times=1)
    store.delete("folder", ["a.json", "b.json"])
    assert fault.struck
    assert store.files("folder") == {}
    with pytest.raises(FileNotFoundError):
        store.read("folder", "a.json", 1)
    with pytest.raises(FileNotFoundError):
        store.digest("folder", "a.json")


# What is said when it does not work.


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 500
    assert "Debug source" not in text
    return text


def test_an_endpoint_that_refuses_connections_fails_soon_with_its_address_and_the_cause(prefix: str) -> None:
    with proxying("http://127.0.0.1:9") as gone:
        endpoint = gone.endpoint
    store = store_at(endpoint, prefix)
    for ask in (store.folders, lambda: store.create("a", "b", b"c"), lambda: store.read("a", "b", 1)):
        with pytest.raises(StoreError) as error:
            ask()
        text = one_line(error.value)
        assert f"s3://{BUCKET}/{prefix}" in text
        assert endpoint in text
        assert "Connection refused" in text


def test_an_endpoint_that_never_answers_fails_in_the_time_it_has(proxy: Proxy, prefix: str, impatient: None) -> None:
    proxy.fail("hang")
    store = store_at(proxy.endpoint, prefix)
    for ask in (store.folders, lambda: store.create("a", "b", b"c"), lambda: store.digest("a", "b")):
        with pytest.raises(StoreError, match="no answer in time") as error:
            ask()
        assert proxy.endpoint in one_line(error.value)


def test_the_limits_of_one_request_are_shorter_than_the_drainer_s_patience() -> None:
    from dtrain.engine.storage.drain import FAR_PATIENCE_S

    # a create that is never answered: one try, then the object is asked, and asked again
    assert (3 * object_store.REQUEST_TIMEOUT).total_seconds() < FAR_PATIENCE_S
    assert (object_store.RETRY_TIMEOUT + object_store.REQUEST_TIMEOUT).total_seconds() < FAR_PATIENCE_S


def test_a_missing_bucket_is_named(server: str) -> None:
    store = ObjectStore("s3://no-such-bucket/run", {"endpoint": server}, None)
    for ask in (store.folders, lambda: store.create("a", "b", b"c"), lambda: store.read("a", "b", 1)):
        with pytest.raises(StoreError, match="NoSuchBucket: The specified bucket does not exist") as error:
            ask()
        assert "s3://no-such-bucket/run" in one_line(error.value)


def test_wrong_credentials_are_said_in_one_line_without_them(proxy: Proxy, prefix: str) -> None:
    code = f"SignatureDoesNotMatch</Code><StringToSign>{SECRETS[0]} {SECRETS[2]}</StringToSign><Code>"
    proxy.fail("status", status=403, code=code)
    store = store_at(proxy.endpoint, prefix)
    for ask in (store.folders, lambda: store.create("a", "b", b"c"), lambda: store.read("a", "b", 1)):
        with pytest.raises(StoreError, match="403 Forbidden: SignatureDoesNotMatch") as error:
            ask()
        assert not any(secret in one_line(error.value) for secret in SECRETS)


def test_without_the_extra_the_message_names_it(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StoreError, match=r"pip install 'dtrain\[object\]'"):
        store_at("http://127.0.0.1:9", prefix)


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("s3://b/r", {"compression": "zip"}, "no such option: compression"),
        ("gs://b/r", {"endpoint": "http://127.0.0.1:9"}, "for s3:// and az:// only"),
        ("s3://b/r", {"endpoint": "127.0.0.1:9"}, "does not begin with http:// or https://"),
        ("gs://b/r", {"region": "eu"}, "for s3:// only"),
        ("az://b/r", {"region": "eu"}, "for s3:// only"),
        ("ftp://b/r", {}, "ftp://b/r"),
        ("s3:///r", {}, "s3:///r"),
    ],
)
def test_a_url_or_option_that_is_not_understood_is_refused(url: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(StoreError) as error:
        ObjectStore(url, options, None)
    assert words in one_line(error.value)


class PanicException(BaseException):
    """What a panic in obstore's Rust part looks like in Python."""


def test_a_panic_in_the_library_is_an_error_of_the_store(
    server: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: Any) -> None:
        raise PanicException("request valid: InvalidUri")

    monkeypatch.setattr("obstore.list_with_delimiter", panic)
    with pytest.raises(StoreError, match="obstore failed: request valid: InvalidUri"):
        store_at(server, prefix).folders()


# Credentials.

PASSWORD, SIGNATURE = "pa55-of-thermopylae", "sig-9ljKzz%2Fqq"


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        (f"s3://user:{PASSWORD}@bucket/run", "http://127.0.0.1:9"),
        (f"az://container/run?sv=2024&sig={SIGNATURE}", "http://127.0.0.1:9"),
        (f"s3://bucket/run#{SIGNATURE}", "http://127.0.0.1:9"),
        ("s3://bucket/run", f"http://user:{PASSWORD}@127.0.0.1:9"),
        ("az://container/run", f"https://x.blob.core.windows.net/?sv=2024&sig={SIGNATURE}"),
    ],
)
def test_a_url_with_credentials_is_refused_without_repeating_them(url: str, endpoint: str) -> None:
    with pytest.raises(StoreError, match="credentials come from the environment") as error:
        ObjectStore(url, {"endpoint": endpoint}, None)
    assert PASSWORD not in str(error.value)
    assert SIGNATURE not in str(error.value)


def test_credentials_are_masked_wherever_they_may_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", f"sv=2024&sig={SIGNATURE}")
    said = masked(
        f"GET https://user:{PASSWORD}@host/x?sv=2024&sig={SIGNATURE} failed: token {SECRETS[2]} of {SECRETS[0]} "
        f"({SECRETS[1]}), sv=2024&sig={SIGNATURE}"
    )
    assert not any(secret in said for secret in (*SECRETS, PASSWORD, SIGNATURE))
    assert said.startswith("GET https://…@host/x?… failed: token")


def test_no_credential_is_in_events_manifests_jobs_or_objects(
    server: str, proxy: Proxy, prefix: str, place: Place
) -> None:
    job = TierJob(place_at(proxy.endpoint, prefix), keep=2)
    writer = Writer(job, place.run, RUN_ID, Group(0, 1))

    @contextlib.contextmanager
    def load() -> Iterator[Any]:
        yield gather(place.memory, place.memory.whole()[Version(1, 10)])

    snapshot(place.memory, 10)
    proxy.fail("status", "PUT", status=403, code=f"AccessDenied {' '.join(SECRETS)}", times=1)
    assert not writer.carry(Version(1, 10), load)
    writer.health.worked()
    assert writer.carry(Version(1, 10), load)
    told = place.run.events.read_text()
    assert "AccessDenied" in told and "committed" in told
    stored = b"".join(call(server, "GET", f"{BUCKET}/{prefix}/{key}") for key in keys(server, prefix))
    for secret in SECRETS:
        assert secret not in told
        assert secret.encode() not in stored
        assert secret not in str(job.to_json())
