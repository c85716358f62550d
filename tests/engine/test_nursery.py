"""The nursery: what it forks is as good as a process started afresh, and nothing outlives what it depends on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dtrain.engine.attempt.forks import LENGTH, NurseryProcess
from dtrain.engine.attempt.standin import FORKED, STATUS, receive
from dtrain.engine.attempt.standin import __file__ as standin_file
from dtrain.specs.load import load_spec

# A nursery whose workers do what the first word of their command says; what torch adds is for tests/job.
SERVER = """
import os, signal, socket, sys, time
from dtrain.engine import worker
from dtrain.engine.attempt import nursery
from dtrain.engine.process import die_with_parent

def run():
    die_with_parent()
    what, *rest = sys.argv[1:]
    print(os.environ["RANK"], os.getcwd(), os.getpid() == os.getpgid(0), signal.getsignal(signal.SIGTERM), flush=True)
    if what == "exit":
        os._exit(int(rest[0]))
    if what == "kill":
        os.kill(os.getpid(), int(rest[0]))
    if what == "catch":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
        open(rest[0], "w").close()
    time.sleep(60)

def setsid(real=os.setsid):
    time.sleep(0.1)  # a child takes a moment until it is a worker
    real()

worker.run, os.setsid = run, setsid
nursery.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nursery") / "spec.yaml"
    path.write_text(
        "name: n\noutput_dir: runs/n\nmodel: {type: gpt, n_layers: 1, d_model: 8, n_heads: 1}\n"
        'dataset: {type: text, path: "python:stdlib", seq_len: 8}\n'
        "training: {global_batch_size: 1, micro_batch_size: 1, optimizer: {name: adamw, lr: 1e-3}}\nmax_steps: 1\n"
    )
    return path


@pytest.fixture(scope="module")
def nursery(spec: Path) -> Iterator[NurseryProcess]:
    """One server for all tests: it imports torch."""
    made = NurseryProcess(load_spec(str(spec), []), program=("-c", SERVER))
    with made:
        assert made.is_there()
        yield made


def stand_in(nursery: NurseryProcess, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", standin_file, nursery.name, *words],
            cwd=folder, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "RANK": "3"},
        )  # fmt: skip


def wait(condition: object, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.01)


def worker_of(nursery: NurseryProcess) -> psutil.Process | None:
    return next(iter(psutil.Process(nursery.pid).children()), None)


@pytest.mark.parametrize(
    ("words", "code"), [(("exit", "0"), 0), (("exit", "70"), 70), (("kill", "9"), -9), (("kill", "15"), -15)]
)
def test_a_stand_in_ends_as_its_worker_does(
    words: tuple[str, ...], code: int, nursery: NurseryProcess, tmp_path: Path
) -> None:
    assert stand_in(nursery, tmp_path, *words).wait(20) == code
    assert (tmp_path / "log").read_text() == f"3 {tmp_path} True {signal.SIG_DFL!s}\n"
    wait(lambda: worker_of(nursery) is None, "the worker to be reaped")


def test_signals_go_on_to_the_worker_which_shows_who_it_is(nursery: NurseryProcess, tmp_path: Path) -> None:
    process = stand_in(nursery, tmp_path, "catch", str(tmp_path / "ready"))
    wait((tmp_path / "ready").exists, "the worker")
    worker = worker_of(nursery)
    assert worker is not None
    assert "dtrain.engine.worker" in " ".join(worker.cmdline())
    assert worker.environ()["RANK"] == "3"
    process.terminate()
    assert process.wait(20) == 75


def test_a_signal_to_a_worker_that_is_only_just_forked_is_not_lost(nursery: NurseryProcess, tmp_path: Path) -> None:
    process = stand_in(nursery, tmp_path, "sleep")
    wait(lambda: worker_of(nursery) is not None, "the child")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == -signal.SIGINT


def test_a_worker_does_not_outlive_its_stand_in(nursery: NurseryProcess, tmp_path: Path) -> None:
    process = stand_in(nursery, tmp_path, "catch", str(tmp_path / "ready"))
    wait((tmp_path / "ready").exists, "the worker")
    process.kill()
    process.wait()
    wait(lambda: worker_of(nursery) is None, "the worker to end")


def test_a_signal_that_comes_as_the_worker_has_ended_changes_nothing(tmp_path: Path) -> None:
    """The first of two workers to leave in good order has the agent end the other one, which has left by then, too."""
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"dtrain-test-{os.getpid()}"
        listener.bind(f"\0{name}")
        listener.listen()
        with subprocess.Popen([sys.executable, "-I", "-S", standin_file, name], cwd=tmp_path) as process:
            link, _ = listener.accept()
            head, descriptors, _, _ = socket.recv_fds(link, LENGTH.size, 1)
            os.close(descriptors[0])
            receive(link, LENGTH.unpack(head)[0])
            link.sendall(FORKED)
            wait(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING, "it waits for the end")
            process.send_signal(signal.SIGSTOP)
            wait(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it is stopped")
            link.sendall(STATUS.pack(75 << 8))
            link.close()
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
            assert process.wait(10) == 75


def test_odd_visitors_are_sent_away(nursery: NurseryProcess) -> None:
    for data in (b"", b"\xff", LENGTH.pack(5), LENGTH.pack(5) + b"{}", LENGTH.pack(2) + b"{}"):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(f"\0{nursery.name}")
            link.sendall(data)
    assert nursery.is_there()


def test_a_dead_nursery_is_said_to_be_dead_and_takes_its_workers_along(spec: Path, tmp_path: Path) -> None:
    with NurseryProcess(load_spec(str(spec), []), program=("-c", SERVER)) as nursery:
        process = stand_in(nursery, tmp_path, "catch", str(tmp_path / "ready"))
        wait((tmp_path / "ready").exists, "the worker")
        worker = worker_of(nursery)
        assert worker is not None
        os.kill(nursery.pid, signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL
        wait(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the worker to end")
        assert not nursery.is_there()


def test_nothing_runs_in_a_nursery_but_its_one_thread() -> None:
    """A lock that another thread holds would stay locked for ever in the child."""
    code = (
        "import importlib, os\n"
        "from dtrain.engine.attempt.nursery import IMPORTED\n"
        "for module in IMPORTED: importlib.import_module(module)\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    counted = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert counted.stdout == b"1\n"


def test_a_nursery_that_stands_still_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    name = f"dtrain-test-{os.getpid()}"
    code = (
        "import sys\nfrom dtrain.engine.attempt import standin\n"
        "standin.FORK_TIMEOUT_S = 0.2; standin.stand_in(sys.argv[1], [])"
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        ended = subprocess.run([sys.executable, "-c", code, name], cwd=tmp_path, timeout=20, check=False)
    assert ended.returncode == -signal.SIGKILL
