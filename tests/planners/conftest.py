"""Specs and machines that the planner's tests share."""

from __future__ import annotations

import pytest
from tests.planners.build import MakeSpec, tiny

from dtrain.planners.machine import Machine


@pytest.fixture
def make_spec() -> MakeSpec:
    return tiny


@pytest.fixture
def laptop() -> Machine:
    return Machine(cpu_cores=2, host_memory_bytes=16 * 2**30, shm_free_bytes=8 * 2**30, accelerator="cpu")


@pytest.fixture
def dgx() -> Machine:
    return Machine(
        cpu_cores=128,
        host_memory_bytes=2 * 2**40,
        shm_free_bytes=2**40,
        accelerator="h100",
        accelerator_count=8,
    )
