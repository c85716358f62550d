"""Figures that only a look at the real model gives: its tensors, and how long its passes take here."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from torch import nn

from ..planners.machine import Measured
from ..planners.shards import TensorInfo
from ..specs.codes import Code
from ..specs.load import spec_from_json, spec_to_json
from ..specs.models import Spec
from .context import LAUNCHER, die_with_parent, pick_device, share_cores
from .data.build import Batches, build_samples
from .entry import UserCodeError, UserCodeFailed, add_import_paths
from .models.build import build_model, compute_loss, to_device
from .optim import build_optimizer
from .state import infos, seed_everything

REPEATS = 5
COPY_BYTES = 64 * 2**20
T = TypeVar("T")


def parameters_of(spec: Spec) -> list[TensorInfo]:
    """The model's parameters; built without memory where its code allows that."""
    try:
        with torch.device("meta"):
            model = build_model(spec.model)
    except (NotImplementedError, RuntimeError):
        model = build_model(spec.model)  # its constructor needs real tensors
    return _parameters(model)


def _parameters(model: nn.Module) -> list[TensorInfo]:
    return infos({name: parameter.detach() for name, parameter in model.named_parameters()})


def count_apart(spec: Spec, import_paths: tuple[str, ...]) -> list[TensorInfo]:
    """`parameters_of` in a process of its own, so that people's code does not run in the launcher.

    Raises UserCodeError or UserCodeFailed with what that process said.
    """
    request = json.dumps({"spec": spec_to_json(spec), "import_paths": import_paths})
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "dtrain.engine.profile"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, LAUNCHER: str(os.getpid())},
    )
    try:
        output, said = process.communicate(request)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever the code has started
    if process.returncode == Code.BAD_SPEC:
        raise UserCodeError(said.strip())
    if process.returncode != 0:
        raise UserCodeFailed(said.strip())
    return [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(output.splitlines()[-1])]


def profile(spec: Spec) -> tuple[list[TensorInfo], Measured]:
    """Run a few passes of one rank here and time them (medians of five, after a warm-up)."""
    device = pick_device(spec.cluster.device, 0)
    if device.type == "cpu":
        share_cores(spec.cluster.workers_per_node)
    seed_everything(spec.seed)
    model = build_model(spec.model).to(device)
    optimizer = build_optimizer(model, spec.training.optimizer)
    batches = Batches(
        build_samples(spec.dataset),
        seed=spec.seed,
        global_batch=spec.training.global_batch_size,
        micro_batch=spec.training.micro_batch_size,
        rank=0,
        world=spec.world_size,
    )
    batch = to_device(batches.get(0, 0), device)
    mixed = spec.training.precision == "bf16-mixed"
    times: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    for _ in range(1 + REPEATS):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
            loss, seconds = _timed(lambda: compute_loss(model, batch), device)
        times["forward"].append(seconds)
        times["backward"].append(_timed(loss.backward, device)[1])
        times["optimizer"].append(_timed(optimizer.step, device)[1])
        optimizer.zero_grad(set_to_none=True)
    forward_s, backward_s, optimizer_s = (median(values[1:]) for values in times.values())
    measured = Measured(
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        copy_bytes_per_s=_copy_speed() if device.type == "cpu" else None,
    )
    return _parameters(model), measured


def _timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    started = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - started


def _copy_speed() -> float:
    """Bytes per second of a copy into touched tmpfs pages."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    descriptor = os.memfd_create("dtrain-profile")
    try:
        os.posix_fallocate(descriptor, 0, COPY_BYTES)
        with mmap.mmap(descriptor, COPY_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) as target:
            anchor = ctypes.c_char.from_buffer(target)
            times = []
            for _ in range(REPEATS):
                started = time.perf_counter()
                ctypes.memmove(ctypes.addressof(anchor), source.data_ptr(), COPY_BYTES)
                times.append(time.perf_counter() - started)
            del anchor
    finally:
        os.close(descriptor)
    return COPY_BYTES / median(times)


def main() -> int:
    """Answer `count_apart`: a spec as JSON on standard input, the parameters as JSON on standard output."""
    die_with_parent()
    request = json.loads(sys.stdin.read())
    add_import_paths(*request["import_paths"], str(Path.cwd()))
    try:
        found = parameters_of(spec_from_json(request["spec"]))
    except (UserCodeError, UserCodeFailed) as error:
        sys.stderr.write(str(error))
        return int(Code.BAD_SPEC if isinstance(error, UserCodeError) else Code.FAILED)
    sys.stdout.write("\n" + json.dumps([[info.name, info.dtype, list(info.shape)] for info in found]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
