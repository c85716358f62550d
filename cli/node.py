"""Several nodes: which one this is, and what a node other than node 0 does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console

from ..specs.codes import Code
from ..specs.models import Spec
from ..tiers.format.jsonfile import dumps, finished_at, replace
from ..tiers.format.layout import RunDir
from ..tiers.lock import FileLock, FolderLock, Locked
from ..tiers.memory.heartbeat import end_workers
from ..tiers.memory.slots import MemoryDir, MemoryTierError, memory_dir, open_memory_dir
from ..tiers.peers.seal import Seal
from .folder import make_folder
from .scheduler import Surroundings, endpoint_of, meeting_point
from .terminal.refusal import Refused, stop_at_once, tidied
from .token import shared_seal
from .train import import_paths_of, locked, nursery_of, ranks_of, talk, write_down

if TYPE_CHECKING:
    from ..engine.attempt.forks import NurseryProcess
    from ..engine.network.lane import Message
    from ..engine.network.line import Line
    from ..engine.outcome import Outcome

ORPHAN_S = 10.0
TOKEN_S = 30.0
"""A network file system may remember for this long that a file was not there."""


def place_of_this(spec: Spec, node_rank: int | None, around: Surroundings) -> int:
    """The rank of this node. Raises Refused when it cannot be one, or when nothing tells where the nodes meet."""
    nodes, said = spec.cluster.nodes, f"--node-rank {node_rank}"
    if node_rank is None and around.rank is not None and (nodes > 1 or around.nodes is not None):
        node_rank, said = around.rank, f"{around.rank_variable}={around.rank} in the environment"
    if nodes == 1:
        if node_rank:
            raise Refused(Code.USAGE, f"{said}: the job has 1 node (--nodes, cluster.nodes)")
        return 0
    if node_rank is None and around.problem is not None:
        raise Refused(Code.USAGE, around.problem)
    if meeting_point(spec) is None:
        raise Refused(
            Code.BAD_SPEC,
            f"cluster.nodes is {nodes}, and nothing says where they meet: give an address of node 0 and a free port "
            "there, --rendezvous HOST:PORT or cluster.rendezvous=HOST:PORT, the same on all nodes",
        )
    if node_rank is None:
        raise Refused(Code.USAGE, f"which of the {nodes} nodes is this? give --node-rank, 0 to {nodes - 1}")
    if node_rank >= nodes:
        raise Refused(Code.USAGE, f"{said}: the job has {nodes} nodes (--nodes, cluster.nodes), and ranks begin at 0")
    return node_rank


def join(spec: Spec, spec_folder: Path, node: int, as_json: bool, seal: Seal | None) -> Code:
    """Take part in a run that node 0 leads, until it ends. `seal` is of the token that was given, if one was."""
    from ..engine.network.addresses import NetworkError

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what matters of the store's failures we say ourselves
    console = talk(as_json)
    run = RunDir(Path(spec.output_dir).absolute(), node)
    make_folder(run)
    with locked(run), nursery_of(spec) as nursery:
        try:
            outcome = _serve(run, spec, spec_folder, nursery, console, seal)
        except NetworkError as error:
            raise Refused(Code.MISSING_RESOURCE, str(error)) from error
    log = f" (log: {outcome.log})" if outcome.log is not None else ""
    console.print(f"node {node} of {spec.cluster.nodes}: {outcome.message}{log}", soft_wrap=True)
    if as_json:
        told = {**outcome.to_json(), "node": node, "attempt": outcome.attempt, "run_dir": str(run.root)}
        sys.stdout.write(json.dumps(told) + "\n")
    return outcome.code


def _serve(
    run: RunDir, spec: Spec, spec_folder: Path, nursery: NurseryProcess | None, console: Console, seal: Seal | None
) -> Outcome:
    """Join, and join again if node 0 gives this node up while it is stopped or cut off.

    A node that was started again after the others had finished finds nobody: there is nothing left to do for it.
    """
    from ..engine.member import GivenUp
    from ..engine.network.addresses import NetworkError, check_interfaces
    from ..engine.network.hello import hello
    from ..engine.network.line import Line, wait_for_host
    from ..engine.outcome import Outcome

    endpoint = endpoint_of(spec)
    check_interfaces(spec)
    while True:
        deadline = time.monotonic() + spec.cluster.rejoin_timeout
        console.print(f"node {run.node} of {spec.cluster.nodes}: looking for node 0 at {endpoint}")
        try:
            wait_for_host(endpoint, deadline, lambda words: console.print(f"node {run.node}: {words}", soft_wrap=True))
        except NetworkError as error:
            if (step := finished_at(RunDir(run.root).events) or 0) < spec.max_steps:
                raise
            words = f"the run is complete at step {step}: nothing to do ({error})"
            return Outcome("complete", Code.DONE, words, step, run.last_attempt())
        seal = seal or shared_seal(run, time.monotonic() + TOKEN_S)
        with Line(endpoint, run.node, lambda address: hello(spec, run.node, address).to_json(), deadline, seal) as line:
            try:
                return _take_part(run, spec, spec_folder, nursery, line, console)
            except GivenUp as reason:
                console.print(f"node {run.node}: {reason}; joining again")
                stop_at_once(as_json=console.stderr)  # until it has joined


def _take_part(
    run: RunDir, spec: Spec, spec_folder: Path, nursery: NurseryProcess | None, line: Line, console: Console
) -> Outcome:
    from ..engine.member import Member
    from ..engine.preflight import MissingResource, preflight
    from ..planners.plan import plan_from_json

    welcome = _welcome(line, 2 * spec.cluster.heartbeat_timeout)
    run_id, plan = str(welcome["run_id"]), plan_from_json(welcome["plan"])
    ranks = ranks_of(spec, run.node)
    end_orphans(memory_dir(run, ranks))
    if welcome["fresh"] and not welcome["resumes"]:
        memory_dir(run).remove()
    try:
        for words in preflight(spec, plan, run, memory_dir(run)):
            console.print(f"warning: {words}", soft_wrap=True)
        memory = open_memory_dir(run, run_id, ranks)
    except (MissingResource, MemoryTierError) as error:
        line.post({"kind": "unable", "detail": str(error)})
        raise Refused(Code.MISSING_RESOURCE, str(error)) from error
    info = {"run_id": run_id, "name": spec.name, "import_paths": [str(Path.cwd()), str(spec_folder.resolve())]}
    with tidied(memory.remove_unneeded), FolderLock(memory.path, shared=True):
        replace(run.run, dumps(info))
        write_down(run, spec, plan)
        console.print(f"node {run.node} of {spec.cluster.nodes}: joined the run of node 0 at {line.endpoint}")
        say = _sayer(console, run.node)
        member = Member(run, spec, plan, memory, run_id, import_paths_of(spec, info), nursery, line, say)
        return member.serve()


def _sayer(console: Console, node: int) -> Any:
    return lambda words: console.print(f"node {node}: {words}", soft_wrap=True)


def _welcome(line: Line, patience_s: float) -> Message:
    """What node 0 answers. Raises Refused."""
    while True:
        message = line.receive()
        if message is not None and message.get("kind") == "welcome":
            return message
        if message is not None and message.get("kind") == "refused":
            raise Refused(Code.BAD_SPEC, f"node 0 at {line.endpoint} refuses this node: {message.get('detail')}")
        if message is not None and message.get("kind") == "end":
            raise Refused(Code(int(message["code"])), str(message["message"]))
        if (why := line.lost(patience_s)) is not None:
            raise Refused(Code.MISSING_RESOURCE, why)
        time.sleep(0.02)


def end_orphans(memory: MemoryDir) -> None:
    """End what an earlier launcher of this node left behind: nobody waits for its drainer's part any more."""
    if not memory.path.is_dir():
        return
    end_workers(memory)
    lock = FileLock(memory.drainer_lock)
    try:
        with lock:
            return
    except (Locked, FileNotFoundError):
        pid = lock.holder_pid()
    with contextlib.suppress(psutil.Error, ProcessLookupError, FileNotFoundError):
        if pid is not None and str(memory.path) in " ".join(psutil.Process(pid).cmdline()):
            os.kill(pid, signal.SIGKILL)
        with FileLock(memory.drainer_lock, timeout_s=ORPHAN_S):
            pass
