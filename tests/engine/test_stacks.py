"""The stack that faulthandler leaves in a worker's log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from dtrain.engine.attempt.stacks import MAX_FRAMES, last_stack
from dtrain.engine.attempt.supervise import end_with_stack

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


def test_whatever_a_worker_is_stuck_in_its_main_thread_s_frames_are_found(tmp_path: Path) -> None:
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


def test_a_log_without_a_stack_has_none(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("step 1\nstep 2\n")
    assert last_stack(tmp_path / "log") == last_stack(tmp_path / "nothing") == []
