"""A run whose output nobody can read: it trains to its end all the same."""

from __future__ import annotations

import os
import subprocess

import pytest
from tests.job.dtrain import COMMAND, Job


@pytest.mark.parametrize(("behind", "code"), [("pipe", 0), ("full", 69)])
def test_a_run_goes_on_without_its_output(job: Job, behind: str, code: int) -> None:
    reading, pipe = os.pipe()
    os.close(reading)
    full = os.open("/dev/full", os.O_WRONLY)
    ended = subprocess.run(
        [*COMMAND, "run", "spec.yaml", "max_steps=4"],
        stdin=subprocess.DEVNULL, stdout=pipe if behind == "pipe" else full, stderr=subprocess.PIPE,
        cwd=job.folder, check=False, timeout=90,
    )  # fmt: skip
    os.close(pipe)
    os.close(full)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count(b"\n") == (0 if behind == "pipe" else 1), ended.stderr
    assert job.events("finished")
    job.assert_nothing_left()
