"""`dtrain run`: train from the first step."""

from __future__ import annotations

from pathlib import Path

from ..specs.codes import Code
from ..specs.datasets import TokenDataset
from ..specs.load import load_spec
from ..specs.models import Spec
from ..tiers.format.jsonfile import newest_lines
from ..tiers.format.layout import RunDir
from ..tiers.peers.seal import Seal
from ..tiers.tier import disk_tier
from .folder import make_folder
from .identity import fresh_identity
from .node import join, place_of_this
from .scheduler import Surroundings, surroundings, tell_place
from .terminal.refusal import Refused, guarded
from .token import given_seal
from .train import Start, absolute, locked, talk, train


def run(
    spec_path: str, overrides: list[str], as_json: bool, node_rank: int | None = None, token_file: str | None = None
) -> int:
    """Load the spec, take the output folder, train. Returns the exit code."""
    return guarded(lambda: _run(spec_path, overrides, as_json, node_rank, token_file), as_json)


def _run(spec_path: str, overrides: list[str], as_json: bool, node_rank: int | None, token_file: str | None) -> int:
    seal = given_seal(token_file)
    around = surroundings()
    spec = absolute(load_spec(spec_path, overrides, around.fallbacks))
    return begin(spec, Path(spec_path).parent, as_json, node_rank, around, seal)


def begin(
    spec: Spec, spec_folder: Path, as_json: bool, node_rank: int | None, around: Surroundings, seal: Seal | None,
    *, again: bool = False,
) -> int:  # fmt: skip
    """Train by a spec that was read, with its data paths made absolute. Returns the exit code, raises Refused.

    `again`: a run that was cut off before anything was stored may be in the folder.
    """
    check_supported(spec)
    node = place_of_this(spec, node_rank, around)
    tell_place(spec, node, around, talk(as_json))
    if node > 0:
        return join(spec, spec_folder, node, as_json, seal)
    folder = RunDir(Path(spec.output_dir).absolute())
    make_folder(folder)
    with locked(folder):
        if not again:
            _refuse_used(folder, spec)
        info = fresh_identity(folder, spec, spec_folder)
        return train(folder, spec, info, Start([], [], "beginning at step 0"), talk(as_json), as_json, seal)


def check_supported(spec: Spec) -> None:
    """Refuse what can be planned but not yet run."""
    own = spec.evaluation.dataset if spec.evaluation is not None else None
    for key, dataset, use in (("dataset", spec.dataset, "train on"), ("evaluation.dataset", own, "be judged by")):
        if not isinstance(dataset, TokenDataset) or dataset.path.startswith("python:"):
            continue
        data = Path(dataset.path).resolve()
        if Path(spec.output_dir).resolve().is_relative_to(data):
            raise Refused(
                Code.BAD_SPEC,
                f"output_dir {spec.output_dir} lies inside {key}.path {data}: the run would {use} its own logs; "
                "put it elsewhere",
            )


def _refuse_used(run: RunDir, spec: Spec) -> None:
    """A folder with a trained step in it belongs to that run."""
    disk = spec.disk_tier
    inside = disk is not None and not Path(disk.path).is_absolute()
    stored = disk is not None and inside and bool(disk_tier(run.disk(disk.path), None).scan()[0])
    if stored or next(newest_lines(run.metrics), None) is not None:
        raise Refused(
            Code.BAD_SPEC,
            f"output_dir {run.root} already holds a run; continue it with\n"
            f"  dtrain resume --from latest {run.root}\nor give another folder: output_dir=…",
        )
