"""Supervision: the rank that stands still is ended, and nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from dtrain.engine.attempt import activity, stacks, supervise
from dtrain.engine.attempt.activity import Signs, Use
from dtrain.engine.attempt.supervise import CPU_ALONE, Eyes, Hang, Supervisor, sight_from
from dtrain.engine.attempt.ticker import Ticker
from dtrain.tiers.memory.heartbeat import DONE_STEP, Heartbeat, Phase, start_of
from dtrain.tiers.memory.slots import MemoryDir

Victim = subprocess.Popen[bytes]
Start = Callable[[], Victim]
TIMEOUT = 1.0
STARTUP = 600.0


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Processes that outlive SIGUSR2, as a worker does that writes its stack then."""
    monkeypatch.setattr(stacks, "QUIET_S", 0.01)
    started: list[Victim] = []

    def begin() -> Victim:
        started.append(subprocess.Popen(["sh", "-c", "trap '' USR2; echo; exec sleep 60"], stdout=subprocess.PIPE))
        assert started[-1].stdout is not None
        started[-1].stdout.readline()
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def counter_of(process: Victim, memory: MemoryDir, rank: int) -> Heartbeat:
    """A rank's counter as that process would have made it."""
    counter = Heartbeat(memory, rank)
    counter._pid, counter._started = process.pid, start_of(process.pid) or 0
    counter.enter(Phase.IMPORTS)
    return counter


class Watched:
    """Ranks whose counters a test raises, seen at times that it chooses."""

    def __init__(self, memory: MemoryDir, start: Start, world: int, timeout_s: float = TIMEOUT) -> None:
        self.memory, self.now = memory, 1000.0
        self.ranks = [start() for _ in range(world)]
        self.counters = [counter_of(process, memory, rank) for rank, process in enumerate(self.ranks)]
        self.supervisor = Supervisor(Eyes(memory, range(world)), timeout_s, STARTUP)

    def beat(self, *ranks: int, step: int = 3) -> None:
        for rank in ranks:
            self.counters[rank].beat(step)

    def look(self, seconds: float) -> list[Hang]:
        self.now += seconds
        self.supervisor._look(self.now)
        return self.supervisor.hangs

    def ended(self) -> list[int]:
        """Ranks that are gone, after the kernel has had time."""
        time.sleep(0.05)
        return [rank for rank, process in enumerate(self.ranks) if process.poll() is not None]


@pytest.fixture
def watch(memory: MemoryDir, start: Start) -> Callable[..., Watched]:
    return lambda world=2, timeout_s=TIMEOUT: Watched(memory, start, world, timeout_s)


Watch = Callable[..., Watched]


def test_a_rank_that_stands_still_is_ended_and_named(watch: Watch) -> None:
    job = watch(3)
    job.beat(0, 1, 2, step=7)
    job.look(0)
    job.beat(0, 2, step=7)
    assert job.look(0.9) == []
    assert job.look(0.2) == [Hang(1, 7, pytest.approx(1.1))]
    assert job.ended() == [1]
    assert job.ranks[1].wait(5) == -signal.SIGKILL


def test_the_stack_is_asked_for_before_the_end(memory: MemoryDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "STARVED_S", 20.0)
    script = "import faulthandler as f, sys, time; f.register(12, sys.stdout); print('ready', flush=1); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        counter_of(process, memory, 0).beat(2)
        supervisor = Supervisor(Eyes(memory), TIMEOUT, STARTUP)
        supervisor._look(0.0)
        supervisor._look(1.5)
        try:
            assert process.wait(20) == -signal.SIGKILL
        finally:
            process.kill()
        assert b"most recent call first" in process.stdout.read()


def test_ranks_that_make_progress_are_left_alone(watch: Watch) -> None:
    job = watch(2)
    for _ in range(50):
        job.beat(0, 1)
        assert job.look(0.9) == []
    assert job.ended() == []


def test_those_that_wait_for_it_are_not_blamed(watch: Watch) -> None:
    """All stand still; the one with the lowest counter is the one the others wait for."""
    job = watch(3)
    for _ in range(3):
        job.beat(0, 1, 2)
        job.look(0.1)
    job.beat(0, 2)
    job.look(0.1)
    (hang,) = job.look(1.5)
    assert hang.rank == 1
    assert job.ended() == [1]


def test_with_equal_counters_the_one_that_stopped_first_is_named(watch: Watch) -> None:
    job = watch(2)
    job.beat(0, 1)
    job.look(0.1)
    job.beat(1)
    job.look(0.1)
    job.beat(0)
    job.look(0.5)
    (hang,) = job.look(0.9)
    assert hang.rank == 1


def test_the_one_ahead_may_be_silent_while_the_one_behind_moves(watch: Watch) -> None:
    """A rank that waits in a collective for a slow one is no hang."""
    job = watch(2)
    for _ in range(9):
        job.beat(0)
    for _ in range(8):
        job.beat(1)
        assert job.look(0.9) == []
    assert job.ended() == []


def test_long_passes_earn_patience(watch: Watch) -> None:
    job = watch(1)
    job.beat(0)
    job.look(0)
    job.beat(0)
    job.look(0.5)
    assert job.look(4.5) == [], "ten times the longest pass, though the time-out is one second"
    assert [hang.rank for hang in job.look(1.0)] == [0]


def test_what_came_before_the_first_pass_says_nothing_of_a_pass(watch: Watch) -> None:
    """Joining, building and compiling take long; the first warm-up pass ends that."""
    job = watch(2)
    job.look(0)
    assert job.look(500) == []
    job.beat(0, 1, step=0)
    assert job.look(500) == []
    job.beat(0, 1, step=0)
    job.look(0.3)
    job.beat(0, 1, step=1)
    job.look(0.1)
    job.beat(0, step=1)
    job.look(0.1)
    assert job.look(2.5) == [], "ten times the warm-up pass"
    assert [hang.rank for hang in job.look(1.0)] == [1]


def test_loading_a_checkpoint_says_nothing_of_a_pass(watch: Watch) -> None:
    """Between the last warm-up pass and step 1 a rank loads its state and lays out its slots."""
    job = watch(1)
    for _ in range(3):
        job.beat(0, step=0)
        job.look(0.05)
    job.look(60)
    for _ in range(3):
        job.beat(0, step=1)
        job.look(0.05)
    assert [hang.rank for hang in job.look(2)] == [0]


def test_nobody_is_ended_while_one_still_starts(watch: Watch) -> None:
    job = watch(2)
    job.beat(0, step=1)
    job.beat(1, step=0)
    job.look(0)
    assert job.look(60) == []


def test_those_that_signed_off_are_left_alone(watch: Watch) -> None:
    job = watch(2)
    job.beat(0, 1)
    job.look(0)
    job.beat(0, 1, step=DONE_STEP)
    job.look(0.1)
    assert job.look(600) == []
    assert job.ended() == []


def test_nothing_is_known_of_a_new_process_of_the_same_rank(watch: Watch, start: Start) -> None:
    job = watch(1)
    job.beat(0)
    job.look(0)
    job.beat(0)
    job.look(50)
    job.ranks.insert(0, start())
    job.counters[0] = counter_of(job.ranks[0], job.memory, 0)
    job.beat(0)
    assert job.look(5) == []
    assert [hang.rank for hang in job.look(1.5)] == [0]
    assert job.ended() == [0]


def test_after_one_hang_the_watch_begins_anew(watch: Watch) -> None:
    """The others lose the rank that was ended; they get their time to say so."""
    job = watch(2)
    job.beat(0, 1)
    job.look(0)
    job.beat(0)
    job.look(0.5)
    assert len(job.look(1.0)) == 1
    assert len(job.look(0.9)) == 1
    assert job.ended() == [1]


def test_a_rank_that_has_died_does_not_hang(watch: Watch) -> None:
    """Its counter stands still while the agent ends the others; the death is the fault, its number may be reused."""
    job = watch(2)
    job.beat(0, 1)
    job.look(0)
    job.ranks[0].kill()
    job.ranks[0].wait()
    job.beat(1)
    job.look(0.5)
    assert job.look(2) == []


def test_a_rank_that_hangs_after_another_has_left_is_ended_in_the_end(watch: Watch) -> None:
    """A worker that leaves with exit code 0 too early is no failure to the agent; it waits for the others for ever."""
    job = watch(2)
    job.beat(0, 1)
    job.look(0)
    job.ranks[0].kill()
    job.ranks[0].wait()
    job.beat(1)
    job.look(0.5)
    assert [hang.rank for hang in job.look(600)] == [1]
    assert job.ended() == [0, 1]


def test_the_end_of_all_ranks_that_nobody_notices_is_told_of(watch: Watch) -> None:
    told: list[float] = []
    job = watch(2)
    job.supervisor.on_unnoticed = lambda: told.append(job.now)
    job.beat(0, 1, step=DONE_STEP)
    job.look(600)
    job.ranks[0].kill()
    job.ranks[0].wait()
    job.look(600)
    assert told == [], "one is still there"
    job.ranks[1].kill()
    job.ranks[1].wait()
    for _ in range(4):
        job.look(TIMEOUT)
    assert told == [], "it may take its time"
    job.look(TIMEOUT)
    assert len(told) == 1


def test_no_counters_no_watch(memory: MemoryDir) -> None:
    supervisor = Supervisor(Eyes(memory), TIMEOUT, STARTUP)
    supervisor._look(0.0)
    memory.remove()
    supervisor._look(50.0)
    assert supervisor.hangs == []


def test_the_thread_finds_a_hang_in_time_and_ends_with_its_block(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "POLL_S", 0.05)
    job = watch(2, timeout_s=0.3)
    job.beat(0, 1)
    began = time.monotonic()
    with job.supervisor as supervisor:
        while not supervisor.hangs and time.monotonic() - began < 10:
            job.beat(0)
            time.sleep(0.02)
        took = time.monotonic() - began
    assert [hang.rank for hang in supervisor.hangs] == [1]
    assert 0.3 <= took < 5
    assert "dtrain-supervisor" not in {thread.name for thread in threading.enumerate()}
    assert job.ended() == [1]


def test_a_launcher_that_was_stopped_itself_blames_nobody(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 103: after a long gap in its own watch nobody's silence counts, and the time-out begins anew."""
    job = watch(1)
    job.beat(0)
    supervisor = job.supervisor
    now = supervisor._before
    monkeypatch.setattr(supervise, "time", SimpleNamespace(monotonic=lambda: now))
    hangs_after = []
    for gap in (0.2, 0.2, 60.0, 0.5, 0.4, 0.2):
        now += gap
        supervisor._tick()
        hangs_after.append(len(supervisor.hangs))
    assert hangs_after == [0, 0, 0, 0, 0, 1]


def test_a_mistake_in_what_is_done_again_and_again_is_shown_once_and_it_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else nobody would be supervised any more, without a word."""
    turns = threading.Semaphore(0)

    def work() -> None:
        turns.release()
        raise ValueError("a mistake")

    with Ticker("test", 0.001, work):
        assert all(turns.acquire(timeout=5) for _ in range(3))
    assert capsys.readouterr().err.count("ValueError: a mistake") == 1


def at_start(job: Watched, rank: int, phase: Phase) -> None:
    """A rank has come to a part of its start."""
    job.counters[rank].enter(phase)


def test_a_rank_that_shows_no_sign_before_its_first_step_is_ended_and_named(watch: Watch) -> None:
    """Issue 6: in a constructor; the others have gone on to where they wait for it."""
    job = watch(3)
    at_start(job, 1, Phase.MODEL)
    for rank in (0, 2):
        at_start(job, rank, Phase.PARTS)
    job.look(0)
    assert job.look(STARTUP - 1) == []
    (hang,) = job.look(2)
    assert (hang.rank, hang.step, hang.phase) == (1, 0, Phase.MODEL)
    assert hang.silent_s == pytest.approx(STARTUP + 1)
    assert job.ended() == [1]


def test_a_rank_that_comes_further_has_all_its_time_again(watch: Watch) -> None:
    job = watch(1)
    for phase in list(Phase)[1:]:
        at_start(job, 0, phase)
        assert job.look(STARTUP - 1) == []
    job.beat(0, step=0)
    assert job.look(STARTUP - 1) == []
    assert job.look(2) == [], "the beat was seen at the last look"
    assert [hang.phase for hang in job.look(STARTUP)] == [Phase.FIRST_STEP]


def test_a_rank_that_works_without_a_word_is_left_alone(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model is read for longer than any time-out, and all others wait for it."""
    job = watch(2)
    used = {process.pid: Use() for process in job.ranks}
    monkeypatch.setattr(activity, "use_of", lambda pids: {pid: used[pid] for pid in pids})
    at_start(job, 1, Phase.JOINING)
    job.look(0)
    for hours in range(1, 20):
        used[job.ranks[0].pid] = Use(cpu_s=0.02 * STARTUP * hours) if hours % 2 else Use(0.02 * STARTUP * hours, 2**30)
        assert job.look(STARTUP) == []
    assert [hang.rank for hang in job.look(2 * STARTUP)] == [0]


def test_of_ranks_that_start_alike_nobody_is_blamed_while_one_does_something(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them fetches what the others wait for, and then it stands still as well."""
    job = watch(3)
    used = {process.pid: Use() for process in job.ranks}
    monkeypatch.setattr(activity, "use_of", lambda pids: {pid: used[pid] for pid in pids})
    job.look(0)
    for turn in range(1, 10):
        used[job.ranks[2].pid] = Use(nbytes=turn * 2**20)
        assert job.look(STARTUP) == []
    job.counters[0].enter(Phase.JOINING)
    assert job.look(STARTUP / 2) == []
    assert [hang.rank for hang in job.look(STARTUP)] == [1], "silent for longest, of those that are furthest behind"


def test_processor_time_alone_does_not_count_for_ever(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has got into a loop that never ends; rank 0 came into the same part later and waits there for it."""
    job = watch(2)
    used = {process.pid: Use() for process in job.ranks}
    monkeypatch.setattr(activity, "use_of", lambda pids: {pid: used[pid] for pid in pids})
    at_start(job, 1, Phase.MODEL)
    job.look(0)
    at_start(job, 0, Phase.MODEL)
    for turn in range(1, 2 * CPU_ALONE + 1):
        used[job.ranks[1].pid] = Use(cpu_s=turn * STARTUP / 2, nbytes=turn * 1000)
        assert job.look(STARTUP / 2) == [], "that long a compiler may take"
    used[job.ranks[1].pid] = Use(cpu_s=(CPU_ALONE + 1) * STARTUP, nbytes=2**15)
    (hang,) = job.look(1)
    assert (hang.rank, hang.phase, hang.spins) == (1, Phase.MODEL, True)
    assert hang.silent_s == pytest.approx(CPU_ALONE * STARTUP + 1)


def test_one_that_only_waits_is_named_before_one_that_spins_because_it_waits(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for a GPU, or for a collective of NCCL, takes a whole processor."""
    job = watch(2)
    used = {process.pid: Use() for process in job.ranks}
    monkeypatch.setattr(activity, "use_of", lambda pids: {pid: used[pid] for pid in pids})
    job.look(0)
    used[job.ranks[0].pid] = Use(cpu_s=1.0, nbytes=2**30)
    assert job.look(1) == []
    for turn in range(1, CPU_ALONE + 1):
        used[job.ranks[0].pid] = Use(cpu_s=1.0 + turn * STARTUP, nbytes=2**30)
        assert job.look(STARTUP) == []
    used[job.ranks[0].pid] = Use(cpu_s=7.0 * STARTUP, nbytes=2**30)
    (hang,) = job.look(1)
    assert (hang.rank, hang.spins) == (1, False)


def test_a_rank_that_never_gets_to_have_a_counter_is_named(memory: MemoryDir) -> None:
    """It is stuck in its first imports; it is found by its environment."""
    environment = {**os.environ, "RANK": "1"}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        supervisor = Supervisor(Eyes(memory, [1]), TIMEOUT, STARTUP)
        supervisor._look(0.0)
        supervisor._look(STARTUP - 1)
        assert process.poll() is None
        supervisor._look(STARTUP + 1)
        try:
            assert process.wait(5) == -signal.SIGKILL
        finally:
            process.kill()
    assert [(hang.rank, hang.phase) for hang in supervisor.hangs] == [(1, Phase.IMPORTS)]


def test_one_that_starts_still_may_keep_those_at_work_waiting(watch: Watch) -> None:
    """It loads its first batch; the others stand in the first exchange."""
    job = watch(2)
    at_start(job, 1, Phase.FIRST_STEP)
    job.beat(0, step=1)
    job.look(0)
    assert job.look(STARTUP - 1) == []
    assert [hang.rank for hang in job.look(2)] == [1]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_row_99_of_equal_counters_the_one_on_the_way_out_of_an_exception_is_named(watch: Watch, rank: int) -> None:
    job = watch(3)
    job.beat(0, 1, 2, step=9)
    job.look(0)
    job.counters[rank].raising(True)
    (hang,) = job.look(1.1)
    assert (hang.rank, hang.raising) == (rank, True)
    assert job.ended() == [rank]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_of_equal_counters_the_one_whose_process_is_stopped_is_named(watch: Watch, rank: int) -> None:
    """It may have been stopped in a collective, where the others wait for it with the same counter."""
    job = watch(3)
    job.beat(0, 1, 2, step=9)
    job.look(0)
    os.kill(job.ranks[rank].pid, signal.SIGSTOP)
    while not any(sight.halted for sight in job.supervisor.eyes.look(job.now)):
        time.sleep(0.01)
    assert [hang.rank for hang in job.look(1.1)] == [rank]
    assert job.ended() == [rank]


def test_one_that_deals_with_an_exception_and_goes_on_is_not_blamed_for_another(watch: Watch) -> None:
    job = watch(2)
    job.counters[0].raising(True)
    for _ in range(6):
        job.beat(0)
        job.look(0.1)
        job.beat(1) if job.now < 1000.2 else None
    job.beat(0)
    job.look(0.9)
    assert [hang.rank for hang in job.supervisor.hangs] == [1]


def test_what_is_seen_of_a_rank_goes_over_the_line(memory: MemoryDir) -> None:
    counter = Heartbeat(memory, 4)
    counter.enter(Phase.DATA)
    counter.raising(True)
    counter.beat(3, 0.25)
    (sight,) = Eyes(memory).look(0.0)
    assert (sight.rank, sight.phase, sight.raising, sight.busy_s) == (4, Phase.DATA, True, 0.25)
    assert sight_from(sight.to_json()) == sight
    assert [one.rank for one in Eyes(memory, [3, 4]).look(0.0)] == [4, 3]


def test_what_a_process_group_uses_is_seen(memory: MemoryDir) -> None:
    """Also by a child of the worker; one that sleeps uses nothing."""
    script = "read line; dd if=/dev/zero of=/dev/null bs=1M count=64 2>/dev/null; echo; read line; exec sleep 60"
    with subprocess.Popen(
        ["sh", "-c", f"exec 3<&0; ({script}) <&3 & wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        watched = activity.Activity()
        try:
            assert [watched.signs([process.pid], now)[process.pid] for now in (0.0, 1.0, 2.0)] == [Signs()] * 3
            process.stdin.write(b"go\n")
            process.stdin.flush()
            process.stdout.readline()
            seen = [watched.signs([process.pid], now)[process.pid] for now in (2.1, 3.0, 60.0)]
            assert seen == [Signs(), Signs(1, 1), Signs(1, 1)]
        finally:
            os.killpg(process.pid, signal.SIGKILL)
