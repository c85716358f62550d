"""What the environment says of the nodes of a job: Slurm, torchrun's variables, an Indexed Job of Kubernetes.

The command line comes first, then the spec; what neither says is taken from here. The sources of the names: srun(1)
"output environment variables", the `PET_` options of torchrun, "Indexed Job" in the documentation of Kubernetes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from ..specs.codes import Code
from ..specs.models import RENDEZVOUS_PATTERN, Spec
from .terminal.refusal import Refused

if TYPE_CHECKING:
    from ..engine.network.addresses import Endpoint

FIRST_PORT, PORTS = 15000, 15000
"""Where the ports of Slurm's jobs are taken from: below those that Linux gives to outgoing connections (32768)."""
MASTER_PORT = 29500
"""torchrun's default."""
_IN_BATCH_SCRIPT = (
    "Slurm has given this job {nodes} nodes, and this is its batch script, which runs on one of them: start it with "
    "srun --ntasks-per-node=1 dtrain … (dtrain launch --to slurm writes such a script), or give --nodes 1"
)
_HOST = re.compile(r"[^,\[\]]+|\[[^\[\]]*\]|,")


@dataclass(frozen=True)
class Surroundings:
    """What starts this process says of the job; None: nothing."""

    by: str = ""
    nodes: str | None = None
    rank: int | None = None
    rank_variable: str = ""
    rendezvous: str | None = None
    problem: str | None = None
    """Why several nodes cannot be started by what this process was started by."""

    @property
    def fallbacks(self) -> list[str]:
        """What holds where neither the spec nor the command line says it, as overrides of the spec."""
        return [f"cluster.nodes={self.nodes}"] if self.nodes is not None else []


def surroundings(environ: Mapping[str, str] = os.environ) -> Surroundings:
    """What the environment says. Raises Refused where it cannot be meant."""
    if "SLURM_NODEID" in environ:
        return _slurm(environ)
    endpoint = _endpoint(environ, "PET_RDZV_ENDPOINT") or _endpoint(environ, "PET_MASTER_ADDR", "PET_MASTER_PORT")
    endpoint = endpoint or _endpoint(environ, "MASTER_ADDR", "MASTER_PORT")
    if "PET_NODE_RANK" in environ or "PET_NNODES" in environ:
        nodes, rank = environ.get("PET_NNODES"), _number(environ, "PET_NODE_RANK")
        return Surroundings("torchrun's variables", nodes, rank, "PET_NODE_RANK", endpoint)
    if "JOB_COMPLETION_INDEX" in environ:
        rank = _number(environ, "JOB_COMPLETION_INDEX")
        return Surroundings("Kubernetes", None, rank, "JOB_COMPLETION_INDEX", endpoint)
    return Surroundings("MASTER_ADDR", rendezvous=endpoint) if endpoint is not None else Surroundings()


def tell_place(spec: Spec, node: int, around: Surroundings, console: Console) -> None:
    """Say in one line what was taken from the environment; nothing on one node."""
    if spec.cluster.nodes == 1 or not around.by:
        return
    count = f"nodes: {spec.cluster.nodes}"
    if around.nodes is not None:
        same = str(spec.cluster.nodes) == around.nodes
        count += f" by {around.by}" if same else f" by the spec, {around.nodes} by {around.by}"
    console.print(f"{count}; this is node {node}, they meet at {meeting_point(spec)}", soft_wrap=True)


def meeting_point(spec: Spec) -> str | None:
    """Where the nodes meet, `HOST:PORT`; None where nothing says it. Raises Refused.

    What the environment says is not kept in the spec: the next start of the run may be on other nodes.
    """
    said = spec.cluster.rendezvous
    if said not in ("auto", "slurm"):
        return said
    around = surroundings()
    if said == "slurm" and around.by != "Slurm":
        raise Refused(
            Code.USAGE,
            "cluster.rendezvous is slurm, and this is no task of Slurm (there is no SLURM_NODEID): start it with srun, "
            "or give --rendezvous HOST:PORT",
        )
    return around.rendezvous


def endpoint_of(spec: Spec) -> Endpoint:
    """As `meeting_point`, of a run on several nodes."""
    from ..engine.network.addresses import parse_endpoint

    found = meeting_point(spec)
    assert found is not None, "place_of_this has looked"
    return parse_endpoint(found)


def _slurm(environ: Mapping[str, str]) -> Surroundings:
    """One task per node; of a step where there is one, else of the job."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if step is None and "SLURM_PROCID" in environ:  # the batch script itself, which runs on the first node only
        if nodes is None or nodes == 1:
            return Surroundings()
        return Surroundings("Slurm", str(nodes), problem=_IN_BATCH_SCRIPT.format(nodes=nodes))
    tasks = _tasks(environ)
    if tasks > 1:
        raise Refused(
            Code.USAGE,
            f"Slurm starts {tasks} tasks on a node (SLURM_NTASKS_PER_NODE); dtrain starts the workers of a node by "
            "itself (cluster.workers_per_node): one task per node, srun --ntasks-per-node=1",
        )
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    host = next(hosts(listed), None) if listed else None
    rank = _number(environ, "SLURM_NODEID")
    port = FIRST_PORT + ((_number(environ, "SLURM_JOB_ID", "SLURM_JOBID") or 0) + _step(step)) % PORTS
    found = str(nodes) if nodes is not None else None
    return Surroundings("Slurm", found, rank, "SLURM_NODEID", f"{host}:{port}" if host else None)


def _step(step: str | None) -> int:
    return int(step) if step is not None and step.isdecimal() else 0


def _tasks(environ: Mapping[str, str]) -> int:
    """Most tasks on one node; of the step in the form `2(x3),1`."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE") or "1"
    return max((int(number) for number in re.findall(r"(?:^|,)(\d+)", listed)), default=1)


def hosts(nodelist: str) -> Iterator[str]:
    """The hosts of Slurm's form `a[01-03,7],b5`, in order, as `scontrol show hostnames` gives them."""
    names = [""]
    for part in _HOST.findall(nodelist):
        if part == ",":
            yield from names
            names = [""]
        elif part.startswith("["):
            names = [name + number for name in names for number in _numbers(part[1:-1])]
        else:
            names = [name + part for name in names]
    yield from (name for name in names if name)


def _numbers(ranges: str) -> Iterator[str]:
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        if not last:
            yield first
            continue
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is there."""
    for name in names:
        text = environ.get(name)
        if text is None:
            continue
        if not text.isdecimal():
            raise Refused(Code.USAGE, f"{name}={text} in the environment is no whole number; unset it")
        return int(text)
    return None


def _endpoint(environ: Mapping[str, str], host: str, port: str = "") -> str | None:
    """What two variables, or one, say of the meeting point."""
    name = environ.get(host)
    if not name:
        return None
    if ":" in name and not name.startswith("[") and name.count(":") > 1:
        name = f"[{name}]"
    has_port = re.search(r":\d+$", name) is not None and not name.endswith("]")
    text = name if has_port else f"{name}:{environ.get(port) or MASTER_PORT}"
    if not re.fullmatch(RENDEZVOUS_PATTERN, text):
        raise Refused(Code.USAGE, f"{host} in the environment gives {text}, which is no HOST:PORT; give --rendezvous")
    return text
