"""`dtrain run`: train from the first step."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from ..specs.codes import Code
from ..specs.errors import SpecError
from ..specs.load import load_spec
from ..specs.models import Spec
from ..tiers.disk import DiskTier
from ..tiers.jsonfile import read_lines
from ..tiers.layout import RunDir
from ..tiers.lock import Locked
from .train import Refused, Start, absolute, identity, locked, train


def run(spec_path: str, overrides: list[str], as_json: bool) -> int:
    """Load the spec, take the output folder, train. Returns the exit code."""
    console = Console(stderr=as_json)
    try:
        spec = absolute(load_spec(spec_path, overrides))
        check_supported(spec)
        folder = RunDir(Path(spec.output_dir))
        _make(folder)
        with locked(folder):
            _refuse_used(folder, spec)
            info = identity(folder, spec, Path(spec_path).parent)
            _forget_memory(folder)
            return train(folder, spec, info, Start([], [], "beginning at step 0"), console, as_json)
    except SpecError as error:
        sys.stderr.write(f"{error}\n")
        return Code.BAD_SPEC
    except Locked as error:
        sys.stderr.write(f"another dtrain drives this run: {error}\n")
        return Code.MISSING_RESOURCE
    except Refused as error:
        sys.stderr.write(f"{error}\n")
        return error.code


def check_supported(spec: Spec) -> None:
    """Refuse what can be planned but not yet run."""
    if spec.cluster.nodes > 1:
        raise Refused(
            Code.BAD_SPEC,
            f"cluster.nodes: {spec.cluster.nodes}: running on several nodes is not yet supported "
            "(dtrain plan works); use cluster.nodes=1 with more workers_per_node",
        )


def _make(run: RunDir) -> None:
    try:
        run.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(Code.MISSING_RESOURCE, f"output_dir {run.root}: {error.strerror or error}") from error


def _refuse_used(run: RunDir, spec: Spec) -> None:
    """A folder with a trained step in it belongs to that run."""
    disk = spec.disk_tier
    stored = bool(DiskTier(run.disk(disk.path)).scan()[0]) if disk is not None else False
    if stored or read_lines(run.metrics):
        raise Refused(
            Code.BAD_SPEC,
            f"output_dir {run.root} already holds a run; continue it with\n"
            f"  dtrain resume --from latest {run.root}\nor give another folder: output_dir=…",
        )


def _forget_memory(run: RunDir) -> None:
    """A fresh run never reads what an earlier one of the same folder left in memory."""
    from ..tiers.memory import memory_dir, sweep

    memory_dir(run).remove()
    sweep()
