"""An exception that does not come to its end is seen, and one that is dealt with is not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dtrain.engine.wayout import WayOut
from dtrain.tiers.memory.heartbeat import Heartbeat, read_heartbeats
from dtrain.tiers.memory.slots import MemoryDir


class Watched:
    """A watch whose thread a test plays."""

    def __init__(self, memory: MemoryDir) -> None:
        self.memory = memory
        self.notes: list[BaseException] = []
        self.watch = WayOut(Heartbeat(memory, 0), self.notes.append, self.notes.clear)

    def look(self, times: int = 1) -> bool:
        """Look so often from another thread; whether the launcher is told of an exception now."""
        for _ in range(times):
            thread = threading.Thread(target=self.watch.look)
            thread.start()
            thread.join()
        return read_heartbeats(self.memory)[0].raising


@pytest.fixture
def watched(memory: MemoryDir) -> Watched:
    return Watched(memory)


def test_one_that_stays_on_its_way_is_left_as_a_note(watched: Watched) -> None:
    error = MemoryError("no room")

    def stuck() -> None:
        try:
            raise error
        finally:
            assert not watched.look()
            assert watched.look()
            assert watched.notes == [error]
            assert watched.look(3)
            assert watched.notes == [error], "once"

    with pytest.raises(MemoryError):
        stuck()
    assert not watched.look()
    assert watched.notes == [], "it was dealt with"


def test_exceptions_that_are_dealt_with_one_after_the_other_are_none(watched: Watched) -> None:
    for _ in range(5):
        try:
            raise KeyError("not in the cache")
        except KeyError:
            assert not watched.look()
    assert watched.notes == []


def test_nothing_is_raised_nothing_is_told(watched: Watched) -> None:
    assert not watched.look(3)


@contextmanager
def handling(where: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Somebody handles an exception meanwhile."""
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        try:
            raise TimeoutError("try again")
        except TimeoutError:
            entered.set()
            leave.wait(10)

    where(work)
    assert entered.wait(5)
    try:
        yield
    finally:
        leave.set()


def test_a_thread_that_does_something_else_may_handle_what_it_likes(watched: Watched) -> None:
    with handling(lambda work: threading.Thread(target=work, daemon=True).start()):
        assert not watched.look(3)


def test_when_the_exception_has_arrived_its_note_is_another_ones_to_write(memory: MemoryDir) -> None:
    notes: list[BaseException] = []
    with pytest.raises(ValueError, match="the cause"), WayOut(Heartbeat(memory, 0), notes.append, notes.clear):
        raise ValueError("the cause")
    assert "dtrain-way-out" not in {thread.name for thread in threading.enumerate() if not thread.daemon}
    assert notes == []
