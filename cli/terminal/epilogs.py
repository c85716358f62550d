"""What stands below the options in each command's help: examples, and the exit codes."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("init", "plan spec.yaml", "run spec.yaml", "resume --from latest"),
    "init": ("init", "init jobs/first"),
    "validate": ("validate spec.yaml", "validate spec.yaml training.optimizer.lr=1e-3 --json"),
    "plan": (
        "plan spec.yaml",
        "plan spec.yaml cluster.nodes=16 checkpoint.max_overhead=2%",
        "plan spec.yaml --profile --json",
    ),
    "run": (
        "run spec.yaml",
        "run spec.yaml max_steps=10 'tiers=[]'",
        "run spec.yaml --nodes 2 --node-rank 0 --rendezvous node0:29500",
        "run --or-resume spec.yaml",
    ),
    "resume": ("resume --from latest", "resume --from 120 runs/my-run", "resume spec.yaml max_steps=400"),
    "ls": ("ls runs/my-run", "ls spec.yaml --json"),
    "inspect": ("inspect runs/my-run", "inspect runs/my-run@120 --tier disk --json"),
    "verify": ("verify runs/my-run", "verify runs/my-run@120"),
    "prune": ("prune runs/my-run --dry-run", "prune runs/my-run --keep 2 --keep-every 1000"),
    "export": ("export runs/my-run weights", "export runs/my-run@120 weights --max-shard 2GB"),
    "bench": ("bench spec.yaml", "bench spec.yaml --methods dtrain,torch-save --blocks 20 --json"),
    "launch": (
        "launch spec.yaml --to slurm --nodes 4 --output job.sh",
        "launch spec.yaml --to ssh --hostfile hosts",
        "launch spec.yaml --to k8s --image registry/dtrain:1 --claim runs",
    ),
    "schema": ("schema > dtrain.schema.json",),
}
"""By command; without one, those of `dtrain` itself."""

EXIT_CODES = (
    "Exit codes: 0 done · 2 wrong command line · 65 no usable checkpoint, or a damaged one · 69 something is missing "
    "(disk, memory, port) or another process holds the run · 70 training failed · 75 stopped with a checkpoint, run "
    "again · 78 wrong spec · 130 interrupted"
)


def epilog(command: str = "") -> str:
    """The examples of a command as its help takes them: brackets are no markup."""
    lines = [f"  dtrain {line}".replace("[", r"\[") for line in EXAMPLES[command]]
    return "\n".join(["Examples:", *lines]) + ("" if command else f"\n\n{EXIT_CODES}")
