"""The stack that faulthandler leaves in a worker's log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtrain.engine.attempt import stacks
from dtrain.engine.attempt.stacks import MAX_FRAMES, end_with_stack, last_stack

WORKER = """
import ctypes, os, sys, threading, time
from dtrain.engine.parallel.context import prepare_signals
prepare_signals()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def deep(n):
    if n:
        return deep(n - 1)
    print("ready", flush=True)
    while True:
        {stuck}
deep(40)
"""
STUCK = {
    "asleep": "time.sleep(60)",
    "holds the GIL": "ctypes.PyDLL(None).sleep(60)",
    "stopped": "os.kill(os.getpid(), 19)",
    "crashed": "ctypes.string_at(0)",
}


def test_whatever_a_worker_is_stuck_in_its_main_thread_s_frames_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "STARVED_S", 20.0)
    for name, stuck in STUCK.items():
        log = tmp_path / f"{name}.log"
        log.write_text("Current thread 0x1 (most recent call first):\n  File of an earlier dump\n\n")
        with (
            log.open("ab") as file,
            subprocess.Popen(
                [sys.executable, "-c", WORKER.format(stuck=stuck)],
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ},
            ) as process,
        ):
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            if name == "crashed":
                assert process.wait(20) == -signal.SIGSEGV
            else:
                end_with_stack(process.pid)
                assert process.wait(20) == -signal.SIGKILL
        frames = last_stack(log)
        assert len(frames) == MAX_FRAMES, (name, log.read_text())
        assert any("in deep" in frame for frame in frames[:3]), frames


def test_a_worker_is_not_killed_in_the_middle_of_its_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that comes late holds the dump up, as a machine without a free core does."""
    monkeypatch.setattr(stacks, "QUIET_S", 0.05)
    monkeypatch.setattr(stacks, "STARVED_S", 20.0)
    reading, writing = os.pipe()
    room = os.fpathconf(writing, "PC_PIPE_BUF")
    with subprocess.Popen(
        [sys.executable, "-c", WORKER.format(stuck=STUCK["asleep"])], stdout=subprocess.PIPE, stderr=writing
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.set_blocking(writing, False)
        filled = 0
        with pytest.raises(BlockingIOError):
            while True:
                filled += os.write(writing, b"." * room)
        os.set_blocking(writing, True)
        os.close(writing)
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(end_with_stack, process.pid)
            time.sleep(0.5)
            assert process.poll() is None
            with os.fdopen(reading, "rb") as pipe:
                dump = pipe.read()[filled:].decode()
            ended.result(30)
        assert process.wait(20) == -signal.SIGKILL
    assert "in deep" in dump
    assert dump.rstrip().endswith("in <module>")


def test_a_log_without_a_stack_has_none(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("step 1\nstep 2\n")
    assert last_stack(tmp_path / "log") == last_stack(tmp_path / "nothing") == []
