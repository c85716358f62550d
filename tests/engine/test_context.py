"""How many threads a worker computes with."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from dtrain.engine.parallel.context import share_cores


@pytest.mark.parametrize(("workers", "threads"), [(1, 8), (3, 2), (16, 1)])
def test_the_cores_are_shared_unless_a_person_says_otherwise(workers: int, threads: int, monkeypatch: Any) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share_cores(workers)
    assert asked == [threads]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    share_cores(workers)
    assert asked == [threads]
