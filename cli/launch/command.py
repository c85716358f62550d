"""`dtrain launch`: print, or write, what starts a job on several nodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ...planners.plan import make_plan
from ...specs.codes import Code
from ...specs.load import load_spec
from ..machine import this_machine
from ..terminal.refusal import Refused, guarded
from . import k8s as launch_k8s
from . import slurm as launch_slurm
from . import ssh as launch_ssh
from .job import Job, Wanted
from .targets import Starter

OPTIONS = {
    Starter.SLURM: {"nodes", "time", "partition", "gpus_per_node", "cpus_per_node"},
    Starter.K8S: {"nodes", "gpus_per_node", "image", "claim", "port"},
    Starter.SSH: {"hostfile", "port"},
}
WRITERS = {Starter.SLURM: launch_slurm.script, Starter.K8S: launch_k8s.manifest, Starter.SSH: launch_ssh.script}


def launch(spec_path: str, overrides: Sequence[str], target: Starter, wanted: Wanted, output: str | None) -> int:
    """Write the script to `output`, or to stdout. Returns the exit code."""
    return guarded(lambda: _launch(spec_path, overrides, target, wanted, output), as_json=False)


def _launch(spec_path: str, overrides: Sequence[str], target: Starter, wanted: Wanted, output: str | None) -> int:
    for name, value in vars(wanted).items():
        if value is not None and name not in OPTIONS[target]:
            takes = ", ".join(sorted(f"--{option.replace('_', '-')}" for option in OPTIONS[target]))
            raise Refused(Code.USAGE, f"--{name.replace('_', '-')} is not for --to {target}, which takes {takes}")
    nodes = [f"cluster.nodes={wanted.nodes}"] if wanted.nodes is not None else []
    spec = load_spec(spec_path, [*overrides, *nodes])
    plan = make_plan(spec, this_machine(spec, look=False))
    program = str(Path(sys.argv[0]).absolute())
    job = Job(Path(spec_path).absolute(), spec, plan, tuple(overrides), wanted, program, Path.cwd())
    text = WRITERS[target](job)
    if output is None:
        sys.stdout.write(text)
        return Code.DONE
    path = Path(output)
    path.write_text(text)
    if target != Starter.K8S:
        path.chmod(0o755)
    sys.stderr.write(f"wrote {path}\n")
    return Code.DONE
