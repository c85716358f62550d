"""A step of dtrain's loop against the plainest loop one would write by hand: the same model, data and optimizer.

    python -m tests.benchmarks.loops [--spec SPEC] [--blocks N] [--steps N] [--threads N] [key=value ...]

Both loops run in the same workers, in blocks that alternate; ratios are taken between blocks of the same round. With
`strategy.dp_shard` the hand-written one is FSDP2 (`fully_shard` of each layer and of the rest), else DDP. Nothing is
stored. Nothing here is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from dtrain.engine.models.build import build_model
from dtrain.engine.parallel.context import Context, StopFlag, join, leave
from dtrain.engine.parallel.units import units
from dtrain.engine.training.parts import Parts, assemble
from dtrain.engine.training.step import Progress, train_step
from dtrain.specs.load import load_spec
from dtrain.specs.models import AdamW, Spec
from dtrain.tiers.memory.slots import TMPFS, MemoryDir

from .memory_tier import SPEC, WARM_UP, spread, with_interval
from .ranks import FOLDER, start_ranks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default=str(SPEC))
    parser.add_argument("--blocks", type=int, default=16, help="rounds of blocks")
    parser.add_argument("--steps", type=int, default=4, help="steps in a block")
    parser.add_argument("--threads", type=int, help="per worker; default: all cores, divided among the workers")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    spec = load_spec(options.spec, [*options.overrides, "tiers=[]", "max_steps=1000000"])
    if "RANK" in os.environ:
        work(options, spec)
        return
    folder = Path(tempfile.mkdtemp(prefix="dtrain-bench-", dir=TMPFS))
    codes = [rank.wait() for rank in start_ranks("tests.benchmarks.loops", spec, folder)]
    MemoryDir(folder).remove()
    sys.exit(max(codes))


class ByHand:
    """The loop that torch's own examples show."""

    def __init__(self, spec: Spec, context: Context, parts: Parts) -> None:
        assert isinstance(spec.training.optimizer, AdamW)
        self.spec, self.context, self.parts, self.samples = spec, context, parts, 0
        torch.manual_seed(spec.seed)
        self.model: nn.Module = build_model(spec.model).to(context.device)
        if context.device_mesh is not None:
            mesh = context.device_mesh["dp_replicate", "dp_shard"]
            for layer in units(self.model):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        else:
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=spec.training.optimizer.lr, fused=True)

    def step(self) -> None:
        count = self.spec.micro_batches
        for micro in range(count):
            tokens = self.parts.batches.get(self.samples, micro).to(self.context.device)
            if isinstance(self.model, DistributedDataParallel):
                self.model.require_backward_grad_sync = micro == count - 1
            loss = self.model(tokens) / count
            loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), self.spec.training.max_grad_norm or 1e9)
        self.optimizer.step()
        self.optimizer.zero_grad()
        float(norm)
        loss.item()
        self.samples += self.spec.training.global_batch_size


def work(options: argparse.Namespace, spec: Spec) -> None:
    context = join(spec, MemoryDir(Path(os.environ[FOLDER])), StopFlag())
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    parts, progress = assemble(spec, context), Progress()
    plain = ByHand(spec, context, parts)
    loops: dict[str, Callable[[], object]] = {
        "by hand": plain.step,
        "dtrain": lambda: train_step(parts, context, progress, None),
    }
    rounds: list[dict[str, float]] = []
    for number in range(options.blocks + 1):
        names = list(loops) if number % 2 else list(reversed(loops))
        taken = {}
        for name in names:
            context.all_agree(True)
            times = []
            for _ in range(options.steps if number else WARM_UP):
                started = time.perf_counter()
                loops[name]()
                times.append(time.perf_counter() - started)
            taken[name] = statistics.median(times)
        rounds.append(taken)
    if context.rank == 0:
        report(options, spec, rounds[1:])
    leave(context, 0)


def report(options: argparse.Namespace, spec: Spec, rounds: list[dict[str, float]]) -> None:
    result = {
        "spec": options.spec,
        "overrides": options.overrides,
        "workers": spec.world_size,
        "threads_per_worker": torch.get_num_threads(),
        "rounds": len(rounds),
        "steps_per_block": options.steps,
        "step_s": {name: spread([one[name] for one in rounds]) for name in rounds[0]},
        "dtrain / by hand": with_interval([one["dtrain"] / one["by hand"] for one in rounds]),
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
