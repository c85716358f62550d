"""`dtrain launch --to slurm`: a batch script with one task per node, which is put back into the queue on exit code 75.

The sources of what it rests on: sbatch(1), srun(1), scontrol(1). Without `B:` the signal goes to the processes of the
steps and not to the batch shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from .job import Job, quoted


def script(job: Job) -> str:
    """The script, for sbatch."""
    lines = [
        "#!/bin/bash",
        f"# {job.spec.name} on {job.nodes} nodes of Slurm; start it with: sbatch THIS_FILE",
        *(f"#SBATCH {option}" for option in _options(job)),
        *([f"# {job.gpu_words}"] if job.gpu_words else []),
        "",
        f"cd -- {shlex.quote(str(job.folder))} || exit 69",
        "cancelled=",
        "trap 'cancelled=yes' TERM # the tasks get it too; this shell outlives them",
        "# dtrain starts the workers of a node, on any of its cores; all nodes end by themselves, with the same code",
        f"srun --ntasks-per-node=1 {_cores(job)} --kill-on-bad-exit=0 --wait=0 \\",
        f"    {quoted(job.command(str(job.spec_path)))} --nodes {_count(job)}",
        "code=$?",
        "# 75: stopped by a signal, with its newest step stored",
        'if [ "$code" -eq 75 ] && [ -z "$cancelled" ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _options(job: Job) -> Iterator[str]:
    wanted = job.wanted
    yield f"--job-name={job.name}"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={wanted.cpus_per_node}" if wanted.cpus_per_node is not None else "--exclusive"
    if job.gpus:
        yield f"--gpus-per-node={job.gpus}"
    if wanted.time is not None:
        yield f"--time={wanted.time}"
    if wanted.partition is not None:
        yield f"--partition={wanted.partition}"
    if job.spec.cluster.nodes.elastic:
        yield "--no-kill"  # the nodes that are left go on when one is lost
    yield "--requeue"
    yield "--open-mode=append"
    yield "--output=%x-%j.log"
    yield f"--signal=USR1@{job.stop_s}"


def _count(job: Job) -> str:
    nodes = job.spec.cluster.nodes
    return str(nodes.to_spec()) if nodes.elastic else '"$SLURM_JOB_NUM_NODES"'


def _cores(job: Job) -> str:
    """A task would be bound to one core, and srun does not take `--cpus-per-task` over from sbatch (22.05)."""
    cores = job.wanted.cpus_per_node
    return f"--cpus-per-task={cores}" if cores is not None else "--cpu-bind=none"
