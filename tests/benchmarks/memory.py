"""Memory of a rank as the plan says it against what the workers really take, for each way to spread a model.

    python -m tests.benchmarks.memory [--spec SPEC] [--only NAME ...] [--steps N] [key=value ...]

Measured is the peak of anonymous memory over some steps, less what the interpreter, torch and the process groups take
before the model is built: the peak of the resident set (VmHWM, set back before) without pages of files. It is the rank
with the most of it that counts, for the plan speaks of that one. Nothing is stored, so that no slot is in it. The C
library is told to give large blocks back; with `--holes` it keeps them as it does by itself. Nothing here is asserted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dtrain.cli.machine import this_machine
from dtrain.engine.parallel.context import StopFlag, join, leave
from dtrain.engine.training.parts import assemble
from dtrain.engine.training.step import Progress, train_step
from dtrain.planners.plan import make_plan
from dtrain.specs.load import load_spec
from dtrain.specs.models import Spec
from dtrain.tiers.memory.slots import TMPFS, MemoryDir

from .ranks import FOLDER, start_ranks

SPEC = Path(__file__).parents[2] / "specs/examples/tiny-gpt.yaml"
MODEL = "model={type: gpt, n_layers: 8, d_model: 512, n_heads: 8, vocab_size: 4096}"
COMMON = [
    MODEL, f"dataset.path={__file__}", "dataset.seq_len=128", "tiers=[]",
    "training.global_batch_size=16", "training.micro_batch_size=2",
]  # fmt: skip
BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""The C library gives blocks of this size back at once, instead of keeping what lay between others."""
AGAIN = "strategy.activation_checkpointing=full"
STRATEGIES: dict[str, list[str]] = {
    "one": ["cluster.workers_per_node=1"],
    "ddp": ["cluster.workers_per_node=2"],
    "ddp, recomputed": ["cluster.workers_per_node=2", AGAIN],
    "ddp, bf16-mixed": ["cluster.workers_per_node=2", "training.precision=bf16-mixed"],
    "ddp, bf16": ["cluster.workers_per_node=2", "training.precision=bf16"],
    "fsdp": ["cluster.workers_per_node=4", "strategy.dp_shard=4"],
    "fsdp, recomputed": ["cluster.workers_per_node=4", "strategy.dp_shard=4", AGAIN],
    "hybrid": ["cluster.workers_per_node=4", "strategy.dp_shard=2"],
    "tensor": ["cluster.workers_per_node=2", "strategy.tp=2"],
    "tensor and fsdp": ["cluster.workers_per_node=4", "strategy.tp=2", "strategy.dp_shard=2"],
    "pipeline": ["cluster.workers_per_node=2", "strategy.pp=2"],
    "pipeline, recomputed": ["cluster.workers_per_node=2", "strategy.pp=2", AGAIN],
    "pipeline, gpipe": ["cluster.workers_per_node=2", "strategy.pp=2", "strategy.pp_schedule=gpipe"],
    "pipeline, interleaved": ["cluster.workers_per_node=2", "strategy.pp=2", "strategy.pp_schedule=interleaved-1f1b"],
    "pipeline and fsdp": ["cluster.workers_per_node=4", "strategy.pp=2", "strategy.dp_shard=2"],
    "pipeline and replicas": ["cluster.workers_per_node=4", "strategy.pp=2"],
    "pipeline and tensor": ["cluster.workers_per_node=4", "strategy.pp=2", "strategy.tp=2"],
}
STEPS = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default=str(SPEC))
    parser.add_argument("--only", action="append", choices=list(STRATEGIES), help="these ways alone")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--holes", action="store_true", help="let the C library keep freed blocks")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if "RANK" in os.environ:
        work(load_spec(options.spec, options.overrides), options.steps)
        return
    if not options.holes:
        os.environ.update(BLOCKS)
    sys.stdout.write(f"{'strategy':28}{'predicted':>12}{'measured':>12}{'ratio':>8}\n")
    for name in options.only or STRATEGIES:
        words = [*COMMON, *STRATEGIES[name], *options.overrides]
        spec = load_spec(options.spec, words)
        plan = make_plan(spec, this_machine(spec))
        predicted, measured = plan.memory.device_bytes_per_rank, measure(spec, options, words)
        assert predicted is not None
        mib = [f"{bytes_ / 2**20:8.0f} MiB" for bytes_ in (predicted, measured)]
        sys.stdout.write(
            f"{name:28}{mib[0]:>12}{mib[1]:>12}{measured / predicted:>8.2f}   {parts_of(plan.memory.parts)}\n"
        )
        sys.stdout.flush()


def parts_of(parts: object) -> str:
    """The prediction by use, in MiB."""
    fields = ("weights", "gradients", "optimizer", "casts", "gathered", "activations", "exchange")
    values = {field: getattr(parts, f"{field}_bytes", 0) for field in fields}
    return ", ".join(f"{field} {bytes_ / 2**20:.0f}" for field, bytes_ in values.items() if bytes_)


def measure(spec: Spec, options: argparse.Namespace, words: list[str]) -> int:
    """Bytes of the rank that takes the most."""
    folder = Path(tempfile.mkdtemp(prefix="dtrain-bench-", dir=TMPFS))
    try:
        given = ["--spec", options.spec, "--steps", str(options.steps), *words]
        ranks = start_ranks("tests.benchmarks.memory", spec, folder, given)
        if any([rank.wait() for rank in ranks]):
            raise subprocess.SubprocessError(f"a rank has failed: {words}")
        return max(int(path.read_text()) for path in folder.glob("rank-*.json"))
    finally:
        MemoryDir(folder).remove()
        shutil.rmtree(folder, ignore_errors=True)


def work(spec: Spec, steps: int) -> None:
    folder = Path(os.environ[FOLDER])
    context = join(spec, MemoryDir(folder), StopFlag())
    context.all_agree(True)
    before = anonymous("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    parts, progress = assemble(spec, context), Progress()
    for _ in range(steps):
        train_step(parts, context, progress, None)
    taken = anonymous("VmHWM") - before
    (folder / f"rank-{context.rank}.json").write_text(str(taken))
    leave(context, 0)


def anonymous(key: str) -> int:
    """A figure of /proc/self/status in bytes; pages of files, which a peak counts too, are taken out of it."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1:] == ["kB"]}
    return found[key] - (found["RssFile"] + found["RssShmem"] if key == "VmHWM" else 0)


if __name__ == "__main__":
    main()
