"""A worker's place in the job: rank, device, process groups, stop signal, heartbeat."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...planners.machine import threads_each
from ...planners.sharding.mesh import ALONE, DIMS, WITHIN_STAGE, Mesh, mesh_of
from ...specs.models import Spec
from ...tiers.memory.heartbeat import DONE_STEP, Heartbeat, Phase
from ...tiers.memory.slots import MemoryDir
from ..network.channels import StorageChannel, storage_channel
from ..timing import Timed
from .precision import autocast

GROUP_TIMEOUT = timedelta(minutes=30)  # hangs are found by heartbeat, long before


def prepare_signals() -> None:
    """Ctrl-C ends a worker at once; SIGUSR2, and a crash, write the stacks of all threads into its log."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR2, all_threads=True)


@dataclass
class StopFlag:
    """Set by SIGTERM, SIGHUP or SIGUSR1; acted on at the end of a step, when all ranks have agreed.

    Before the first step there is nothing to save, and a worker that waits for a dead one in a library's own code
    would never see the flag: until `install`, these signals end the worker at once.
    """

    is_set: bool = False

    def install(self) -> None:
        """From now on the signals set the flag, and nothing else."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._set)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True


@dataclass
class Context:
    """One worker among the others."""

    rank: int
    local_rank: int
    world: int
    device: torch.device
    stop: StopFlag
    heartbeat: Heartbeat
    mesh: Mesh = ALONE
    control: dist.ProcessGroup | None = field(default=None)
    device_mesh: DeviceMesh | None = None
    """The mesh with its process groups; None: every rank has the whole model."""
    storage: StorageChannel | None = None
    """The storage channel between nodes; None on one node."""
    step: int = 0
    busy_s: float = 0.0
    """Time spent so far on batches and forward passes: what a rank does by itself, whoever it waits for after."""
    unfinished: list[Timed] = field(default_factory=list)
    """Parts of the step before that the device had not come to the end of."""

    @property
    def data_rank(self) -> int:
        """Which part of a step's samples this rank sees."""
        return self.mesh.data_rank(self.rank)

    @property
    def draws_as(self) -> int:
        """What this rank's generators are seeded by: tensor parallel ranks compute alike, so they draw alike."""
        return self.rank // self.mesh.tp

    @cached_property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The process group of `stage`; made at the first call, which all ranks must make at the same place."""
        if self.device_mesh is None or self.mesh.pp == 1:
            return None
        return self.device_mesh[WITHIN_STAGE]._flatten("stage").get_group()

    @property
    def stage(self) -> list[int]:
        """The ranks that have the same layers as this one."""
        return self.mesh.stage(self.rank)

    def beat(self) -> None:
        """Tell the launcher that this rank makes progress."""
        self.heartbeat.beat(self.step, self.busy_s)

    def enter(self, phase: Phase) -> None:
        """Tell the launcher which part of its start this rank has come to."""
        self.heartbeat.enter(phase)

    def sign_off(self) -> None:
        """Tell the launcher that no more progress is to be expected."""
        self.heartbeat.beat(DONE_STEP)

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Sum each number over all ranks (float64, on the host)."""
        return sum_over(values, self.control)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """What each rank gives, on every rank, in the order of the ranks."""
        sizes = [0.0] * self.world
        sizes[self.rank] = float(len(data))
        lengths = [int(size) for size in self.sum_over_ranks(sizes)]
        mine = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        given = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(given, mine, group=self.control)
        return [found[:length].numpy().tobytes() for found, length in zip(given, lengths, strict=True)]

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give all ranks with the same layers what the first of them has."""
        for tensor in tensors:
            if tensor.numel():
                told = tensor.contiguous()
                dist.broadcast(told.reshape(-1).view(torch.uint8), self.stage[0], group=self.stage_group)
                tensor.copy_(told)

    def worst_of_ranks(self, values: list[float]) -> list[float]:
        """The largest of each number over all ranks, the same on each of them."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control)
        largest: list[float] = tensor.tolist()
        return largest

    def all_agree(self, mine: bool) -> bool:
        """Logical and over all ranks."""
        return self.sum_over_ranks([0.0 if mine else 1.0])[0] == 0.0

    def autocast(self, precision: str) -> torch.autocast:
        """The precision of forward passes."""
        return autocast(self.device, precision)


def sum_over(values: list[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Sum each number over the ranks of a group, or over all (float64, on the host)."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, group=group)
    summed: list[float] = tensor.tolist()
    return summed


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a worker; `auto` takes CUDA where there is one."""
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def share_cores(workers: int) -> None:
    """Give this worker its share of the cores, unless OMP_NUM_THREADS says how many threads: torch has followed that.

    The launcher hands a person's OMP_NUM_THREADS on, and gives the same share where there is none.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_each(len(os.sched_getaffinity(0)), workers))


def join(spec: Spec, memory: MemoryDir, stop: StopFlag, beat: Heartbeat | None = None) -> Context:
    """Set up determinism, threads and process groups; returns when all ranks are there.

    `beat` is this rank's counter, where it has one already.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    beat = beat or Heartbeat(memory, rank)  # by it the launcher can end a worker that waits for one that never comes
    beat.enter(Phase.JOINING)
    device = pick_device(spec.cluster.device, local_rank)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # As use_deterministic_algorithms(True, warn_only=True), which imports all of inductor to tell it so: 0.8 s.
    torch.set_deterministic_debug_mode("warn")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a pass over memory; nothing reads it here
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=GROUP_TIMEOUT, device_id=device)
        control = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    else:
        share_cores(spec.cluster.workers_per_node)
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        control = None
    mesh = mesh_of(spec)
    over = None
    if (mesh.pp, mesh.dp_shard, mesh.tp) != (1, 1, 1):
        over = init_device_mesh(device.type, mesh.shape, mesh_dim_names=DIMS)
    storage = storage_channel(rank, world, GROUP_TIMEOUT)
    context = Context(rank, local_rank, world, device, stop, beat, mesh, control, over, storage)
    _ = context.stage_group
    return context


def leave(context: Context, code: int) -> NoReturn:
    """End together, without destructors: those of gloo's groups were seen to hang when all ranks leave at once.

    Everything that matters is in files by now, so a peer that has left already is no fault.
    """
    with contextlib.suppress(RuntimeError):
        context.all_agree(True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
