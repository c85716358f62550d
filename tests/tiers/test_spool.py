"""Copies of remote files: shared while they are read, gone afterwards, never trusted blindly."""

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from tests.tiers.build import RUN_ID, Place
from tests.tiers.s3 import STEP, Proxy, place_at, proxying, store_at, write

from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.format.layout import Version
from dtrain.tiers.reading.recovery import candidate_of, open_candidate, verify
from dtrain.tiers.stores.spool import Fetch, shared_copy
from dtrain.tiers.tier import open_tier

pytest_plugins = ["tests.tiers.s3fixtures"]
pytestmark = pytest.mark.usefixtures("environment")


NAME = "rank-00000.safetensors"


def writing(data: bytes) -> Fetch:
    def fetch(file: BinaryIO) -> None:
        file.write(data)

    return fetch


def read_often(folder: Path, counted: Path, barrier: Any) -> None:
    def fetch(file: Any) -> None:
        with counted.open("a") as lines:
            lines.write("x")
        file.write(bytes(1000))

    barrier.wait()
    for _ in range(40):
        with shared_copy(folder, NAME, fetch) as copy:
            assert copy.stat().st_size == 1000
            copy.read_bytes()


def test_processes_that_read_at_the_same_time_never_see_half_a_copy_and_leave_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    readers = [
        context.Process(target=read_often, args=(tmp_path / "spool", tmp_path / "counted", barrier)) for _ in range(4)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert [reader.exitcode for reader in readers] == [0] * 4
    assert not (tmp_path / "spool").exists()


def test_readers_share_one_download_and_the_last_one_removes_it(server: str, prefix: str, place: Place) -> None:
    with proxying(server) as proxy:
        write(open_tier(place_at(server, prefix), RUN_ID), place, 10)
        spool = place.run.spool
        first, second = (store_at(proxy.endpoint, prefix, spool) for _ in range(2))
        with first.local(STEP.format(10), NAME) as copy:
            requests = len(proxy.seen("GET"))
            with second.local(STEP.format(10), NAME) as again:
                assert again == copy
            assert len(proxy.seen("GET")) == requests, "the second one asks for nothing"
            assert copy.exists()
        assert not spool.exists()


def killed_while(folder: Path, moment: str) -> None:
    def fetch(file: Any) -> None:
        file.write(b"half of")
        file.flush()
        if moment == "fetching":
            os.kill(os.getpid(), signal.SIGKILL)

    with shared_copy(folder, NAME, fetch):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["fetching", "reading"])
def test_what_a_killed_reader_leaves_is_not_trusted_and_goes(moment: str, tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=killed_while, args=(tmp_path / "spool", moment))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert list((tmp_path / "spool").iterdir())
    with shared_copy(tmp_path / "spool", NAME, writing(b"all of it")) as copy:
        assert copy.read_bytes() == b"all of it"
    assert not (tmp_path / "spool").exists()


def test_names_that_differ_after_their_last_dot_do_not_get_in_each_other_s_way(tmp_path: Path) -> None:
    with (
        shared_copy(tmp_path / "spool", "a.b.one", writing(b"1")) as one,
        shared_copy(tmp_path / "spool", "a.b.two", writing(b"2")) as two,
    ):
        assert (one.read_bytes(), two.read_bytes()) == (b"1", b"2")


def test_a_folder_cleared_under_a_reader_does_not_hurt_the_next_one(tmp_path: Path) -> None:
    fetch = writing(b"x")
    spool = tmp_path / "spool"
    with shared_copy(spool, NAME, fetch):
        shutil.rmtree(spool)
        with shared_copy(spool, NAME, fetch) as mine:
            with contextlib.ExitStack() as stack:
                other = stack.enter_context(shared_copy(spool, NAME, fetch))
                assert other == mine
            assert mine.read_bytes() == b"x"
    assert not spool.exists()


def test_a_full_disk_is_an_error_that_says_where_and_leaves_nothing(tmp_path: Path) -> None:
    def fetch(file: Any) -> None:
        file.write(b"some")
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"more")

    with pytest.raises(OSError, match="No space left") as error, shared_copy(tmp_path / "spool", NAME, fetch):
        pass
    assert error.value.errno == errno.ENOSPC
    assert NAME in str(error.value)
    assert not (tmp_path / "spool").exists()
    with shared_copy(tmp_path / "spool", NAME, writing(b"x")) as copy:
        assert copy.exists()


@pytest.mark.parametrize("damage", ["flip", "short"])
def test_a_download_that_is_not_what_was_stored_is_noticed_and_not_kept(
    damage: str, server: str, proxy: Proxy, prefix: str, place: Place
) -> None:
    write(open_tier(place_at(server, prefix), RUN_ID), place, 10)
    candidate = candidate_of(open_tier(place_at(proxy.endpoint, prefix), RUN_ID).read(Version(1, 10)))
    opened = open_candidate(candidate, place.run.spool)
    proxy.fail(damage, "GET", NAME)
    with pytest.raises((Unreadable, OSError)) as error:
        verify(opened)
    assert NAME in str(error.value)
    assert not place.run.spool.exists()
    proxy.heal()
    verify(opened)
