"""Figures that only a look at the real model gives: its tensors, and how long its passes take here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ..planners.machine import Measured
from ..planners.sharding.layout import Cuts, largest_shard, layout_of
from ..planners.sharding.mesh import ALONE, DIMS, mesh_of
from ..planners.sharding.shards import Piece, TensorInfo, own
from ..specs.codes import Code
from ..specs.load import spec_from_json, spec_to_json
from ..specs.models import GptModel, Spec
from .attempt.forks import worker_environment
from .data.build import Batches, build_data
from .data.text import DataError
from .entry import UserCodeError, UserCodeFailed, add_import_paths, told
from .models.build import build_model, compute_loss, to_device
from .optim.masters import lower, updated_by
from .optim.optimizers import build_optimizer, clip_cut_gradients, clip_gradients
from .parallel.context import pick_device, share_cores, sum_over
from .parallel.own import cuts_of
from .parallel.precision import autocast
from .parallel.wrap import replicated, spread
from .process import LAUNCHER, die_with_parent
from .snapshot.state import TrainState, infos, seed_everything
from .snapshot.trialcopy import Trial, trial

REPEATS = 9
COPIES = 5
MOST_WINDOWS = 4
"""Passes of a step in which a copy is tried; a step that has more would take long, and tell no more."""
COUNT, TIME, BESIDE = "count", "time", "beside"
READY = "ready\n"
PATIENCE = timedelta(minutes=5)
"""For a worker that is to exchange gradients and does not come; what it dies of is told at once."""
T = TypeVar("T")


def parameters_of(spec: Spec) -> list[TensorInfo]:
    """The model's parameters; built without memory where its code allows that."""
    return _parameters(_built(spec))


def _built(spec: Spec) -> nn.Module:
    try:
        with torch.device("meta"):
            model = build_model(spec.model)
    except (NotImplementedError, RuntimeError):
        model = build_model(spec.model)  # its constructor needs real tensors
    if spec.training.precision == "bf16":
        lower(model)
    return model


def _parameters(model: nn.Module) -> list[TensorInfo]:
    return infos({name: parameter.detach() for name, parameter in model.named_parameters()})


def count_apart(spec: Spec, import_paths: tuple[str, ...]) -> tuple[list[TensorInfo], Cuts | None]:
    """`parameters_of`, and `cuts_of`, in a process of its own, so that people's code does not run in the launcher.

    Raises UserCodeError or UserCodeFailed with what that process said.
    """
    return _found(_answer(spec, import_paths, COUNT))


def profile(spec: Spec, import_paths: tuple[str, ...]) -> tuple[list[TensorInfo], Cuts | None, Measured]:
    """Count the model, run a few passes of one rank here, copy its shard beside them, and time both (medians).

    In a process of its own, as a worker is: with its threads, and its way to copy. Raises UserCodeError for what is
    wrong with the spec, or its data, and UserCodeFailed for what went wrong in its code.
    """
    with tempfile.TemporaryDirectory(prefix="dtrain-profile-") as folder:
        answer = _answer(spec, import_paths, TIME, meeting=f"{folder}/meeting")
    return *_found(answer), Measured(**answer["measured"])


def _answer(spec: Spec, import_paths: tuple[str, ...], what: str, **further: object) -> dict[str, Any]:
    """What a process says that has done `what`."""
    process = _ask(spec, import_paths, what, **further)
    try:
        output, said = process.communicate()
    finally:
        _end(process)
    if process.returncode == Code.BAD_SPEC:
        raise UserCodeError(said.strip())
    if process.returncode != 0:
        raise UserCodeFailed(said.strip())
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def _found(answer: dict[str, Any]) -> tuple[list[TensorInfo], Cuts | None]:
    cuts = answer["cuts"]
    return (
        [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in answer["parameters"]],
        None if cuts is None else Cuts(cuts["cut_by"], tuple(map(frozenset, cuts["stages"]))),
    )


def _ask(spec: Spec, import_paths: tuple[str, ...], what: str, **further: object) -> subprocess.Popen[str]:
    """Start this module as a process that does `what` for the spec."""
    request = {"what": what, "spec": spec_to_json(spec), "import_paths": import_paths, **further}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "dtrain.engine.profile"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **worker_environment(spec), LAUNCHER: str(os.getpid())},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it says why when it is asked for its answer
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    return process


def _end(process: subprocess.Popen[str]) -> None:
    """End it and whatever its code has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def measure(spec: Spec, import_paths: tuple[str, ...], meeting: str) -> tuple[list[TensorInfo], Cuts | None, Measured]:
    """Run a few passes of one rank in this process and time them (medians, after a warm-up).

    On a CPU the other workers of a node do the same beside it, for they share its caches and its memory, and then its
    shard is copied while it trains. On one node they meet by the file `meeting` and send each other what they would in
    training; else, and in a pipeline, that is not timed.
    """
    device = pick_device(spec.cluster.device, 0)
    with _neighbours(spec, import_paths, meeting) if device.type == "cpu" else contextlib.nullcontext() as others:
        rank = _Rank(spec, device, others.meeting if others is not None else None)
        rank.warm_up()
        if others is not None:
            others.wait()
        return rank.parameters, rank.cuts, rank.measure()


class _Rank:
    """One worker's model, optimizer and batch."""

    def __init__(self, spec: Spec, device: torch.device, meeting: str | None, rank: int = 0) -> None:
        """The ranks of one node meet by the file `meeting`, and the model is spread over them as in training.

        Without it, on several nodes, and in a pipeline, whose passes wait for each other, each has the whole model.
        """
        if device.type == "cpu":
            share_cores(spec.cluster.workers_per_node)
        seed_everything(spec.seed)
        self.spec, self.device, self.rank = spec, device, rank
        model = build_model(spec.model).to(device)
        masters = spec.training.precision == "bf16"
        if masters:
            lower(model)
        self.parameters, self.cuts = _parameters(model), cuts_of(spec, model)
        together = meeting is not None and spec.cluster.nodes == 1 and not spec.strategy.pp > 1
        self.mesh = mesh_of(spec) if together else ALONE
        self.exchanges = together and self.mesh.by_ddp
        """The model is whole on each, and there is a backward pass with and one without the exchange of gradients."""
        self.cut = together and not self.mesh.by_ddp and (isinstance(spec.model, GptModel) or self.mesh.tp == 1)
        """It is divided among them."""
        self.model: nn.Module = model
        self.wrapped: nn.Module = model
        if self.exchanges or self.cut:
            assert meeting is not None
            store, world = FileStore(meeting, spec.world_size), spec.world_size
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
        if self.cut:
            for parameter in model.parameters():
                parameter.data = parameter.data.contiguous()
            spread(model, spec, self.mesh, init_device_mesh("cpu", self.mesh.shape, mesh_dim_names=DIMS), rank)
        self.optimizer = build_optimizer(model, spec.training.optimizer, masters=masters)
        if self.exchanges:  # after the optimizer, which lays parameters side by side
            self.wrapped = replicated(model, spec)
        batches = Batches(
            build_data(spec)[0],
            seed=spec.seed,
            global_batch=spec.training.global_batch_size,
            micro_batch=spec.training.micro_batch_size,
            rank=self.mesh.data_rank(rank) if self.cut else 0,
            world=spec.data_parallel,
        )
        with _told_as_theirs("reading the first batch"):
            self.batch = to_device(batches.get(0, 0), device)

    @property
    def in_turn(self) -> bool:
        """Whether the others must make the same passes as this one."""
        return self.exchanges or self.cut

    def measure(self) -> Measured:
        """Time some steps, and the copy of this rank's shard while it trains."""
        steps = [self.step() for _ in range(REPEATS)]
        forward_s, backward_s, synced_s, optimizer_s = (median(values) for values in zip(*steps, strict=True))
        rate = None
        if self.spec.used_tiers and self.device.type == "cpu":
            rate = self.copy_speed(forward_s, backward_s)
        exchange_s = max(0.0, synced_s - backward_s) if self.exchanges else 0.0 if self.cut else None
        return Measured(
            forward_s, backward_s, optimizer_s, channel_bytes_per_s=rate, exchange_s=exchange_s, spread=self.cut
        )

    def warm_up(self) -> None:
        """Make the first step, in which code of the spec shows whether it works at all."""
        with _told_as_theirs("the model's first step"):
            self.step()

    def step(self) -> tuple[float, float, float, float]:
        """Passes and one update; returns seconds of forward, backward, backward with the exchange, and update.

        As in training the gradients are already there, to be added to, and are clipped as part of the update.
        """
        with self._apart():
            loss, forward_s = _timed(self._loss, self.device)
            _, backward_s = _timed(loss.backward, self.device)
        synced_s = backward_s
        if self.exchanges:
            _, synced_s = _timed(self._loss().backward, self.device)
        _, optimizer_s = _timed(self._update, self.device)
        return forward_s, backward_s, synced_s, optimizer_s

    def _apart(self) -> contextlib.AbstractContextManager[None]:
        """Around a pass after which no gradients are exchanged."""
        return self.wrapped.no_sync() if isinstance(self.wrapped, DistributedDataParallel) else contextlib.nullcontext()

    def copy_speed(self, forward_s: float, backward_s: float) -> float | None:
        """Bytes per second at which its shard is copied in the windows of some steps; None where it has none."""
        windows = min(MOST_WINDOWS, self.spec.micro_batches)
        with trial(self.model, self.optimizer, self._pieces(), windows, forward_s, backward_s) as copy:
            rates = [self._copied(copy, windows) for _ in range(COPIES)]
        return None if copy is None else median(rates)

    def _copied(self, copy: Trial | None, windows: int) -> float:
        """Make one step, and in its windows the copy, if there is one; returns the bytes that it makes per second."""
        if copy is not None:
            copy.begin()
        for number in range(windows):
            with self._apart() if number < windows - 1 else contextlib.nullcontext():
                if copy is not None:
                    copy.copier.grant(copy.pace.forward_bytes)
                loss = self._loss()
                if copy is not None:
                    copy.copier.grant(copy.pace.backward_bytes)
                loss.backward()
        rate = 0.0 if copy is None else copy.finish()
        self._update()
        return rate

    def _pieces(self) -> Sequence[Piece]:
        if self.cut:
            return own(TrainState(self.model, self.optimizer, mesh=self.mesh, rank=self.rank).held(), self.rank)
        return largest_shard(layout_of(self.spec, self.parameters, self.cuts))

    def _loss(self) -> Tensor:
        with autocast(self.device, self.spec.training.precision):
            return compute_loss(self.wrapped, self.batch)

    def _update(self) -> None:
        updated, limit = updated_by(self.optimizer, self.model), self.spec.training.max_grad_norm
        if self.cut:
            clip_cut_gradients(updated, limit, self.mesh, sum_over)
        else:
            clip_gradients(updated, limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.spec.micro_batches == 1)


@contextlib.contextmanager
def _told_as_theirs(what: str) -> Iterator[None]:
    """Raise errors of the spec's code as UserCodeFailed; what is already put in words stays as it is."""
    try:
        yield
    except (UserCodeError, UserCodeFailed, DataError):
        raise
    except Exception as error:
        raise UserCodeFailed(told(error, f"{what} failed")) from error


@dataclass(frozen=True)
class _Neighbours:
    """The node's other workers, in processes of their own."""

    processes: list[subprocess.Popen[str]]
    meeting: str | None
    """The file by which they meet the one that is timed; None: there are none."""

    def wait(self) -> None:
        """Until they compute."""
        for other in self.processes:
            assert other.stdout is not None
            if READY not in iter(other.stdout.readline, ""):
                raise UserCodeFailed(
                    f"a worker beside the one that is timed has failed: {other.communicate()[1].strip()}"
                )


@contextlib.contextmanager
def _neighbours(spec: Spec, import_paths: tuple[str, ...], meeting: str) -> Iterator[_Neighbours]:
    """Let the node's other workers compute."""
    ranks = range(1, spec.cluster.workers_per_node)
    others = [_ask(spec, import_paths, BESIDE, meeting=meeting, rank=rank) for rank in ranks]
    try:
        yield _Neighbours(others, meeting if others else None)
    finally:
        for other in others:
            _end(other)


def _timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    started = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - started


def main() -> int:
    """Answer `count_apart` or `profile` as JSON, or keep a core busy as a neighbour of `profile`."""
    die_with_parent()
    request = json.loads(sys.stdin.readline())
    add_import_paths(*request["import_paths"], str(Path.cwd()))
    spec = spec_from_json(request["spec"])
    try:
        if request["what"] == BESIDE:
            _compute_on(spec, request["meeting"], request["rank"])
        if request["what"] == TIME:
            found, cuts, measured = measure(spec, tuple(request["import_paths"]), request["meeting"])
        else:
            model, measured = _built(spec), None
            found, cuts = _parameters(model), cuts_of(spec, model)
    except (UserCodeError, UserCodeFailed, DataError) as error:
        sys.stderr.write(str(error))
        return int(Code.FAILED if isinstance(error, UserCodeFailed) else Code.BAD_SPEC)
    said = {
        "parameters": [[info.name, info.dtype, list(info.shape)] for info in found],
        "cuts": cuts and {"cut_by": dict(cuts.cut_by), "stages": [sorted(stage) for stage in cuts.stages]},
        "measured": measured and asdict(measured),
    }
    sys.stdout.write("\n" + json.dumps(said) + "\n")
    return 0


def _compute_on(spec: Spec, meeting: str, rank: int) -> NoReturn:
    """Do the same as the one that is timed, and go on making steps until killed where none waits for another."""
    worker = _Rank(spec, torch.device("cpu"), meeting, rank)
    worker.warm_up()
    sys.stdout.write(READY)
    sys.stdout.flush()
    worker.measure()
    while worker.in_turn:
        signal.pause()
    while True:
        worker.step()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without destructors: those of a process group may wait for the others, who are dead by now
