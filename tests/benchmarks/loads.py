"""How long others take to load the state of a job: `torch.load` and DCP `load`, by the workers of the job, in turn.

Every rank loads all it needs, as the documentation of each says, into a model and an optimizer that are there; a rank's
time is from a barrier to the end of the slowest. They read pickles that this benchmark has just written itself.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dtrain.engine.parallel.context import Context, StopFlag, join, leave
from dtrain.engine.training.parts import Parts, assemble
from dtrain.engine.training.step import Progress, train_step
from dtrain.specs.load import load_spec
from dtrain.tiers.memory.slots import TMPFS, MemoryDir

from .ranks import FOLDER, start_ranks

FOUND = "loads.json"


def loads_of_others(spec: Path, overrides: Sequence[str], folder: Path, times: int) -> dict[str, list[float]]:
    """Start the workers of a spec without tiers; returns seconds of each load, by its name."""
    shm = Path(tempfile.mkdtemp(prefix="dtrain-bench-", dir=TMPFS))
    words = [str(spec), str(folder), str(times), *overrides, "tiers=[]"]
    try:
        codes = [rank.wait() for rank in start_ranks(__name__, load_spec(str(spec), words[3:]), shm, words)]
    finally:
        MemoryDir(shm).remove()
    assert not any(codes), codes
    found: dict[str, list[float]] = json.loads((folder / FOUND).read_bytes())
    return found


class Others:
    """The state of one step, stored in both ways, and how it is loaded."""

    def __init__(self, parts: Parts, folder: Path, rank: int) -> None:
        self.parts, self.file, self.folder = parts, folder / "state.pt", folder / "dcp"
        if rank == 0:
            state = {"model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict()}
            torch.save(state, self.file)
        dcp_save(self._state(), checkpoint_id=self.folder)

    def _state(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.parts.passes.wrapped, self.parts.optimizer)
        return {"model": model, "optimizer": optimizer}

    def torch_load(self) -> None:
        state = torch.load(self.file, weights_only=True, map_location="cpu")
        self.parts.model.load_state_dict(state["model"])
        self.parts.optimizer.load_state_dict(state["optimizer"])

    def dcp_load(self) -> None:
        state = self._state()
        dcp_load(state, checkpoint_id=self.folder)
        set_state_dict(
            self.parts.passes.wrapped,
            self.parts.optimizer,
            model_state_dict=state["model"],  # type: ignore[arg-type]
            optim_state_dict=state["optimizer"],  # type: ignore[arg-type]
        )


def timed(context: Context, load: Callable[[], None]) -> float:
    """From a barrier to the end of the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    load()
    dist.barrier()
    return time.perf_counter() - started


def work(spec: str, folder: str, times: str, *overrides: str) -> None:
    loaded = load_spec(spec, list(overrides))
    context = join(loaded, MemoryDir(Path(os.environ[FOLDER])), StopFlag())
    parts = assemble(loaded, context)
    train_step(parts, context, Progress(), None)
    others = Others(parts, Path(folder), context.rank)
    loads = {"torch.load": others.torch_load, "DCP load": others.dcp_load}
    found: dict[str, list[float]] = {name: [] for name in loads}
    for _ in range(int(times)):
        for name, load in loads.items():
            found[name].append(timed(context, load))
    if context.rank == 0:
        (Path(folder) / FOUND).write_text(json.dumps(found))
    leave(context, 0)


if __name__ == "__main__":
    work(*sys.argv[1:])
