"""What a person can type. Each command imports its work only when it is called."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from .launch.targets import Starter
from .terminal.epilogs import epilog
from .terminal.outlet import keep_going_without_output
from .terminal.refusal import stop_at_once

app = typer.Typer(
    name="dtrain",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train with PyTorch from a YAML spec; every step is stored, and every fault ends in a restart.",
    epilog=epilog(),
)

SpecPath = Annotated[str, typer.Argument(metavar="SPEC", help="The job spec, a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Replace values of the spec, such as training.optimizer.lr=1e-3."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; talk goes to stderr.")]

Nodes = Annotated[str | None, typer.Option("--nodes", metavar="N|MIN:MAX", help="Nodes of the job (cluster.nodes).")]
NodeRank = Annotated[int | None, typer.Option("--node-rank", min=0, help="Which of them this is, from 0.")]
Rendezvous = Annotated[
    str | None, typer.Option("--rendezvous", metavar="HOST:PORT", help="Where they meet: an address of node 0.")
]
TokenFile = Annotated[
    str | None,
    typer.Option("--token-file", metavar="FILE", help="The run's token, the same on all nodes (or DTRAIN_TOKEN)."),
]

Target = Annotated[
    str, typer.Argument(metavar="RUN_DIR[@STEP]", help="A run (its folder or spec), a step of it, or one checkpoint.")
]


class TierType(StrEnum):
    """Types of tiers that hold checkpoints."""

    MEMORY = "memory"
    PEER = "peer"
    DISK = "disk"
    OBJECT = "object"


WhichTier = Annotated[TierType | None, typer.Option("--tier", help="Look into this tier only.")]


@app.command(epilog=epilog("init"))
def init(
    folder: Annotated[str, typer.Argument(metavar="[DIR]", help="Where to write it.")] = ".",
) -> None:
    """Write a small commented spec that runs as it is."""
    from .init import init as work

    raise typer.Exit(work(folder))


@app.command(epilog=epilog("validate"))
def validate(spec: SpecPath, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check a spec, and nothing else."""
    from .validate import validate as work

    raise typer.Exit(work(spec, overrides or [], as_json))


@app.command(epilog=epilog("plan"))
def plan(
    spec: SpecPath,
    overrides: Overrides = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Build the model and time a few passes here; runs the spec's code.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print what will be stored when, what it costs and what it survives; runs nothing."""
    from .plan.command import plan as work

    raise typer.Exit(work(spec, overrides or [], as_json, profile))


@app.command(epilog=epilog("run"))
def run(
    spec: SpecPath,
    overrides: Overrides = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    token_file: TokenFile = None,
    or_resume: Annotated[
        bool, typer.Option("--or-resume", help="Go on from the newest checkpoint, if the run has one (for schedulers).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train from the first step; on several nodes the same command on each, with its --node-rank."""
    stop_at_once(as_json)
    keep_going_without_output()
    words = [*(overrides or []), *_cluster(nodes, rendezvous)]
    if or_resume:
        from .again import run_or_resume

        raise typer.Exit(run_or_resume(spec, words, as_json, node_rank, token_file))
    from .run import run as work

    raise typer.Exit(work(spec, words, as_json, node_rank, token_file))


def _cluster(nodes: str | None, rendezvous: str | None) -> list[str]:
    """What the options say, as overrides of the spec."""
    wanted = [f"cluster.nodes={nodes}"] if nodes is not None else []
    return [*wanted, *([f"cluster.rendezvous={rendezvous!r}"] if rendezvous is not None else [])]


@app.command(epilog=epilog("resume"))
def resume(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN_DIR|SPEC] [KEY=VALUE]...", help="Which run; without it the one under ./runs active last."
        ),
    ] = None,
    start: Annotated[
        str, typer.Option("--from", metavar="latest|STEP|PATH", help="Which checkpoint to continue from.")
    ] = "latest",
    allow_changed: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-changed",
            metavar="KEY",
            help="This key of the spec's file may be another than before (or a block).",
        ),
    ] = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Continue a run from a checkpoint; never starts from scratch."""
    stop_at_once(as_json)
    keep_going_without_output()
    from .resume import resume as work

    raise typer.Exit(
        work(
            [*(arguments or []), *_cluster(nodes, rendezvous)],
            start,
            as_json,
            node_rank,
            allow_changed or [],
            token_file,
        )
    )


@app.command(name="ls", epilog=epilog("ls"))
def list_checkpoints(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="Folder or spec of the run.")],
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run in all tiers."""
    from .checkpoints.ls import ls as work

    raise typer.Exit(work(run_dir, as_json))


@app.command(epilog=epilog("inspect"))
def inspect(target: Target, tier: WhichTier = None, as_json: Json = False) -> None:
    """Show what is in a checkpoint."""
    from .checkpoints.inspect import inspect as work

    raise typer.Exit(work(target, as_json, tier))


@app.command(epilog=epilog("verify"))
def verify(target: Target, tier: WhichTier = None, as_json: Json = False) -> None:
    """Read every byte of every checkpoint and check its digests."""
    from .checkpoints.verify import verify as work

    raise typer.Exit(work(target, as_json, tier))


@app.command(epilog=epilog("prune"))
def prune(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="Folder or spec of the run.")],
    keep: Annotated[
        int | None, typer.Option("--keep", min=1, help="Newest to keep; default: as the spec says.")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option("--keep-every", min=0, help="Keep steps that are a multiple of this too; 0: none of them."),
    ] = None,
    tier: WhichTier = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Delete old checkpoints by rule; never the last good one."""
    from .checkpoints.prune import Wanted
    from .checkpoints.prune import prune as work

    raise typer.Exit(work(run_dir, Wanted(keep, keep_every, tier, dry_run), as_json))


@app.command(epilog=epilog("export"))
def export(
    target: Target,
    out_dir: Annotated[str, typer.Argument(metavar="OUT_DIR", help="A folder that is new or empty.")],
    max_shard: Annotated[
        str, typer.Option("--max-shard", metavar="SIZE", help="Most bytes of tensors in a file.")
    ] = "5GB",
    ema: Annotated[bool, typer.Option("--ema", help="Their averages over the updates (training.ema_decay).")] = False,
    tier: WhichTier = None,
    as_json: Json = False,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder."""
    from .checkpoints.export import export as work

    raise typer.Exit(work(target, out_dir, max_shard, as_json, tier, ema=ema))


@app.command(epilog=epilog("bench"))
def bench(
    spec: SpecPath,
    overrides: Overrides = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="A,B,…", help="Which to compare with plain training; default: nearly all."),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option("--blocks", min=1, help="Blocks of each method; default: as many as fit, 6 to 30.")
    ] = None,
    steps_per_block: Annotated[
        int | None, typer.Option("--steps-per-block", min=1, help="Timed steps in a block; default: about a second.")
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw the figures (.png, .pdf, .svg); needs dtrain\\[plot]."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what storing every step costs here, beside torch.save and DCP."""
    from .bench.command import Options
    from .bench.command import bench as work

    stop_at_once(as_json)
    keep_going_without_output()
    raise typer.Exit(work(spec, overrides or [], Options(methods, blocks, steps_per_block, plot), as_json))


@app.command(epilog=epilog("launch"))
def launch(
    spec: SpecPath,
    to: Annotated[Starter, typer.Option("--to", help="What starts it.")],
    overrides: Overrides = None,
    nodes: Nodes = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="slurm: longest time, such as 12:00:00.")
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME", help="slurm: where it runs.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=0, help="slurm, k8s: with cluster.device cuda one per worker.")
    ] = None,
    cpus_per_node: Annotated[
        int | None, typer.Option("--cpus-per-node", min=1, help="slurm: cores of a node; default: the whole node.")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="IMAGE", help="k8s: the container, with dtrain in it.")
    ] = None,
    claim: Annotated[
        str | None,
        typer.Option("--claim", metavar="NAME[:PATH]", help="k8s: PersistentVolumeClaim of the runs, at /dtrain."),
    ] = None,
    hostfile: Annotated[
        str | None, typer.Option("--hostfile", metavar="FILE", help="ssh: a host a line, node 0 first; default: hosts.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="k8s, ssh: where the nodes meet; default: 29500.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", metavar="FILE", help="Write it there, not to stdout.")
    ] = None,
) -> None:
    """Print what starts the job on several nodes: a script for Slurm or ssh, or YAML for Kubernetes."""
    from .launch.command import launch as work
    from .launch.job import Wanted

    wanted = Wanted(nodes, time, partition, gpus_per_node, cpus_per_node, image, claim, hostfile, port)
    raise typer.Exit(work(spec, overrides or [], to, wanted, output))


@app.command(epilog=epilog("schema"))
def schema() -> None:
    """Print the JSON schema of the spec, for editors."""
    import json

    from ..specs.schema import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        sys.stdout.write(f"dtrain {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself."""
