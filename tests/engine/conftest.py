"""Fixtures of the engine's tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.engine.build import Ranks

from dtrain.engine.snapshot.state import TrainState
from dtrain.tiers.memory.slots import MemoryDir

MakeRanks = Callable[..., Ranks]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing from more threads, and lose much where cores are taken."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    """Every test begins with the same random states and leaves those that it met."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


@pytest.fixture
def memory(tmp_path: Path) -> MemoryDir:
    made = MemoryDir(tmp_path / "memory")
    made.path.mkdir()
    return made


@pytest.fixture
def ranks(memory: MemoryDir) -> Iterator[MakeRanks]:
    """Make ranks over this test's memory; their threads end with the test."""
    made: list[Ranks] = []

    def make(state: TrainState, world: int = 1, **further: Any) -> Ranks:
        made.append(Ranks(state, memory, world, **further))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        store = tmp_path_factory.mktemp("group") / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()
