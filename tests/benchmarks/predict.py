"""What `dtrain plan` says beforehand beside what a run measures, from tables and after `--profile`, over several specs.

    python -m tests.benchmarks.predict [--times 3] [--steps 30] [--only NAME] [key=value ...]

Each time every spec is planned from tables (on a CPU with the look at the machine), planned with `--profile`, and run,
all by the commands, one after the other. A pass is a micro-batch's; a backward pass has its part of the gradients'
exchange, which a run cannot tell from it. Bytes are those of a window, as planned and as the run settled on. What is
quoted is measured over predicted: the median over the times, with the smallest and the largest. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from dtrain.cli.view.figures import planned_backward_s
from dtrain.specs.codes import Code
from dtrain.tiers.format.jsonfile import read_lines
from dtrain.tiers.format.layout import RunDir

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "specs/examples"
WARM_UP = 2
"""Steps that are left out, as in the run's own summary."""
CASES: dict[str, tuple[Path, tuple[str, ...]]] = {
    "gpt, 2 workers": (EXAMPLES / "tiny-gpt.yaml", ()),
    "gpt, 1 worker": (EXAMPLES / "bench.yaml", ()),
    "long rows, 1 worker": (
        EXAMPLES / "tiny-gpt.yaml",
        ("cluster.workers_per_node=1", "dataset.seq_len=512", "training.micro_batch_size=2",
         "training.global_batch_size=4", "model.n_layers=2"),
    ),
    "wide, dp_shard 2": (
        EXAMPLES / "tiny-gpt.yaml",
        ("strategy.dp_shard=2", "model.d_model=384", "training.micro_batch_size=8", "training.global_batch_size=32"),
    ),
    "encoder, 2 workers": (HERE / "encoder.yaml", ()),
}  # fmt: skip


def of_plan(plan: Mapping[str, Any]) -> dict[str, float]:
    """The predicted figures."""
    times = plan["iteration"]
    return {
        "forward_s": times["forward_s"],
        "backward_s": planned_backward_s(plan) or 0.0,
        "optimizer_s": times["optimizer_s"],
        "step_s": times["step_s"],
        "bytes of forward": plan["forward"]["bytes_per_window"],
        "bytes of backward": plan["backward"]["bytes_per_window"],
        "snapshot_bytes": plan["model"]["state_bytes_per_rank"],
        "copy_bytes_per_s": plan["storage"]["bytes_per_s"],
    }


def of_run(run: RunDir) -> dict[str, float]:
    """The measured ones: medians over steps, and what the workers have settled on."""
    plan = json.loads(run.plan.read_text())
    lines, n, settled = read_lines(run.metrics)[WARM_UP:], plan["iteration"]["micro_batches"], plan["measured"]

    def middle(key: str) -> float:
        return float(median(line[key] for line in lines))

    return {
        "forward_s": middle("forward_s") / n,
        "backward_s": middle("backward_s") / n,
        "optimizer_s": middle("optimizer_s"),
        "step_s": middle("step_s"),
        "bytes of forward": settled["forward_bytes"],
        "bytes of backward": settled["backward_bytes"],
        "snapshot_bytes": middle("snapshot_bytes"),
        "copy_bytes_per_s": settled["copy_bytes_per_s"],
    }


def command(*words: str) -> bytes:
    """Run one dtrain command and return its JSON; what it says to people comes with its failure."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("dtrain")), *words, "--json"], capture_output=True, check=False
    )
    if done.returncode != Code.DONE:
        raise SystemExit(f"dtrain {' '.join(words)}: {done.returncode}\n{done.stderr.decode()}")
    return done.stdout


def once(spec: Path, overrides: Sequence[str], steps: int) -> dict[str, dict[str, float]]:
    """All three of one spec."""
    tables = of_plan(json.loads(command("plan", str(spec), *overrides)))
    profiled = of_plan(json.loads(command("plan", str(spec), *overrides, "--profile")))
    with tempfile.TemporaryDirectory(prefix="dtrain-bench-") as folder:
        command("run", str(spec), *overrides, f"output_dir={folder}/run", f"max_steps={steps}")
        return {"tables": tables, "profile": profiled, "run": of_run(RunDir(Path(folder) / "run"))}


def spread(words: Sequence[str]) -> str:
    """Of values in order, in words: the middle one (first to last)."""
    return words[0] if len(words) == 1 else f"{words[len(words) // 2]} ({words[0]} to {words[-1]})"


def figure(key: str, value: float) -> str:
    """A figure in ms, MiB or GiB/s."""
    if key == "copy_bytes_per_s":
        return f"{value / 2**30:.2f} GiB/s"
    return f"{1000 * value:.1f} ms" if key.endswith("_s") else f"{value / 2**20:.2f} MiB"


def table(name: str, found: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """One spec's figures."""
    lines = [f"{name}: what a run measured, and that over what was predicted"]
    for key in found[0]["run"]:
        measured = spread([figure(key, value) for value in sorted(one["run"][key] for one in found)])
        cells = [f"  {key:18} {measured:34}"]
        for source in ("tables", "profile"):
            ratios = sorted(one["run"][key] / one[source][key] for one in found)
            cells.append(f"{source} {spread([f'{ratio:.2f}' for ratio in ratios]):22}")
        lines.append(" ".join(cells).rstrip())
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="odd, so that one is in the middle")
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in CASES if options.only in name}
    for _ in range(options.times):
        for name, runs in found.items():
            spec, overrides = CASES[name]
            runs.append(once(spec, [*overrides, *options.overrides], options.steps))
    sys.stdout.write(f"{options.times} times, load average {psutil.getloadavg()[0]:.1f}\n")
    sys.stdout.write("".join(table(name, each) for name, each in found.items()))


if __name__ == "__main__":
    main()
