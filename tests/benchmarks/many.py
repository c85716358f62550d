"""What a snapshot of thousands of small tensors costs beyond its bytes.

    python -m tests.benchmarks.many [--counts 3000,100000] [--rounds N] [--steps N]

For every count, `count` vectors of 16 numbers beside two layers that take the time of a step are trained with AdamW
beside the same numbers in one tensor; blocks of both alternate in one process of one thread. Counted is processor time,
which other work on the machine changes little: of a step without its snapshot, of the training thread at the step
boundary (`begin`) and before the update (`finish`), and of the copier. `small_share` is what the many take more than
the one, over the processor time of the step of the many; medians over all steps. Nothing here is asserted.

The model is also that of `memory_tier --spec tests/benchmarks/many.yaml`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from dtrain.engine.optim.optimizers import build_optimizer, clip_gradients
from dtrain.engine.snapshot.snapshots import Cadence, Pace, Snapshots
from dtrain.engine.snapshot.state import TrainState
from dtrain.specs.models import AdamW
from dtrain.tiers.memory.slots import TMPFS, MemoryDir

WIDTH = 16
WARM_UP = 2


class Many(nn.Module):
    """`count` vectors of `width` numbers, beside two layers that take the time of a step."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(width) * 0.1) for _ in range(count))
        self.layers = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256))

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.layers(x).square().mean() + torch.cat(list(self.vectors)).square().mean()
        return mean


class Waves:
    """Sample i is a wave of its own."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        return torch.sin(torch.arange(256.0) * (index + 1))


class Trained:
    """A model whose every step is stored in memory, and the processor time that its parts take, in seconds."""

    def __init__(self, count: int, width: int, folder: Path) -> None:
        self.model = Many(count, width)
        self.optimizer = build_optimizer(self.model, AdamW(name="adamw", lr=1e-3))
        folder.mkdir()
        self.snapshots = Snapshots(
            TrainState(self.model, self.optimizer),
            MemoryDir(folder),
            run_id="bench",
            attempt=1,
            device=torch.device("cpu"),
            cadence=Cadence(1, 0, False),
            pace=Pace(2**40, 2**40, 2**20),
            restored=None,
            alive=lambda: None,
        )
        thread = self.snapshots.copier._thread.ident
        assert thread is not None
        self.copier_clock = time.pthread_getcpuclockid(thread)
        self.x = torch.stack([Waves()[index] for index in range(64)])
        self.step = 0
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self._train()

    def _train(self) -> None:
        marks, copied = [time.thread_time()], time.clock_gettime(self.copier_clock)
        self.snapshots.forward_window()
        loss = self.model(self.x)
        self.snapshots.backward_window()
        loss.backward()
        marks.append(time.thread_time())
        self.snapshots.finish()
        self.snapshots.superseded()
        marks.append(time.thread_time())
        clip_gradients(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        marks.append(time.thread_time())
        self.snapshots.begin(self.step, {}, drain_busy=False)
        marks.append(time.thread_time())
        passes, finish, update, begin = (after - before for before, after in pairwise(marks))
        copier = time.clock_gettime(self.copier_clock) - copied
        for name, seconds in {"step": passes + update, "begin": begin, "finish": finish, "copier": copier}.items():
            self.seconds[name].append(seconds)

    def told(self) -> dict[str, float]:
        """Medians in ms, the steps of the warm-up left out."""
        return {name: 1000 * statistics.median(seconds[WARM_UP:]) for name, seconds in self.seconds.items()}


def compare(count: int, rounds: int, steps: int, folder: Path) -> dict[str, object]:
    both = {"many": Trained(count, WIDTH, folder / "many"), "one": Trained(1, count * WIDTH, folder / "one")}
    for trained in both.values():
        trained.train(WARM_UP)
    for _ in range(rounds):
        for trained in both.values():
            trained.train(steps)
    told = {name: trained.told() for name, trained in both.items()}
    for trained in both.values():
        trained.snapshots.close()
    costs = {name: ms["begin"] + ms["finish"] + ms["copier"] for name, ms in told.items()}
    share = (costs["many"] - costs["one"]) / told["many"]["step"]
    return {"count": count, "steps": rounds * steps, "ms": told, "small_share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="3000,100000")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for count in map(int, options.counts.split(",")):
        with tempfile.TemporaryDirectory(prefix="dtrain-bench-", dir=TMPFS) as folder:
            told = compare(count, options.rounds, options.steps, Path(folder))
        sys.stdout.write(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
