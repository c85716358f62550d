"""What `dtrain bench` refuses before anything runs, where it writes, and how its figures are shown."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.planners.build import tiny

from dtrain.cli.bench import folder as bench_folder
from dtrain.cli.bench import plot as bench_plot
from dtrain.cli.bench.command import Options, bench
from dtrain.cli.bench.folder import every_step, folder_of_its_own, home_of, refuse_full
from dtrain.cli.bench.follow import BenchView
from dtrain.cli.bench.page import say, to_document
from dtrain.cli.terminal.refusal import Refused
from dtrain.planners.compare import Block
from dtrain.planners.methods import PLAIN
from dtrain.planners.plan import Machine, Plan, make_plan
from dtrain.specs.codes import Code
from dtrain.specs.load import load_spec
from dtrain.specs.models import Spec
from dtrain.tiers.format.layout import RunDir
from dtrain.tiers.lock import FileLock

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "specs/examples/bench.yaml"
TIERS = [{"type": "memory", "every": 5}, {"type": "disk", "every": 10, "keep": 4, "keep_every": 100}]


def spec_in(folder: Path, **changes: Any) -> Spec:
    return tiny(**{"output_dir": str(folder / "runs/mine"), "tiers": TIERS, **changes})


def plan_for(spec: Spec) -> Plan:
    return make_plan(spec, Machine(cpu_cores=2, host_memory_bytes=2**34, shm_free_bytes=2**33, accelerator="cpu"))


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (Options(methods="dcp,pikle"), Code.USAGE, "dcp-async-thread"),
        (Options(plot="figures.gif"), Code.USAGE, ".png"),
        (Options(plot="no/such/folder/a.png"), Code.USAGE, "there is no folder"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(
    options: Options, code: Code, words: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench(str(EXAMPLE), [], options, as_json=True) == code
    told = capsys.readouterr()
    assert words in told.err
    assert json.loads(told.out)["exit_code"] == code
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    picture = str(tmp_path / "a.png")
    assert bench(str(EXAMPLE), [], Options(plot=picture), as_json=False) == Code.MISSING_RESOURCE
    assert "pip install 'dtrain[plot]'" in capsys.readouterr().err


def test_every_tier_that_is_measured_takes_every_step(tmp_path: Path) -> None:
    far = {"type": "object", "url": f"file://{tmp_path}/far", "every": 5}
    spec = spec_in(tmp_path, tiers=[*TIERS, far])
    measured = every_step(spec, RunDir(tmp_path / "own"))
    assert [(tier.type, tier.every) for tier in measured.tiers] == [("memory", 1), ("disk", 1)]
    assert measured.disk_tier is not None
    assert (measured.disk_tier.path, measured.disk_tier.keep, measured.disk_tier.waits) == ("checkpoints", 1, False)
    assert measured.output_dir == str(tmp_path / "own")
    assert (measured.model, measured.training, measured.cluster) == (spec.model, spec.training, spec.cluster)


@pytest.mark.parametrize("there", [(), ("runs",), ("runs/mine",), ("runs/mine/checkpoints",)])
@pytest.mark.parametrize("tiers", [[], TIERS])
def test_the_runs_own_folder_is_never_written(there: tuple[str, ...], tiers: list[Any], tmp_path: Path) -> None:
    for name in there:
        (tmp_path / name).mkdir(parents=True)
    spec = spec_in(tmp_path, tiers=tiers)
    assert home_of(spec) == (tmp_path / "runs" if there else tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with folder_of_its_own(spec) as run:
        assert run.root.parent == home_of(spec)
        (run.root / "rivals").mkdir()
    assert sorted(tmp_path.rglob("*")) == before


def test_it_writes_beside_a_disk_tier_that_lies_elsewhere(tmp_path: Path) -> None:
    disk = tmp_path / "scratch/checkpoints"
    disk.mkdir(parents=True)
    spec = spec_in(tmp_path, tiers=[{"type": "memory", "every": 1}, {"type": "disk", "path": str(disk), "every": 5}])
    assert home_of(spec) == tmp_path / "scratch"


def test_a_disk_of_its_own_is_used_and_no_other(tmp_path: Path, monkeypatch: Any) -> None:
    """A disk tier's folder that is a mount point: the folder above it lies on another disk."""
    mount = tmp_path / "mount"
    mount.mkdir()
    monkeypatch.setattr(bench_folder, "device_of", lambda path: 2 if path.is_relative_to(mount) else 1)
    inside = spec_in(tmp_path, tiers=[{"type": "memory", "every": 1}, {"type": "disk", "path": f"{mount}/checkpoints"}])
    itself = spec_in(tmp_path, tiers=[{"type": "memory", "every": 1}, {"type": "disk", "path": str(mount)}])
    assert home_of(inside) == mount
    with pytest.raises(Refused, match="a file system of its own"):
        home_of(itself)


def test_what_a_killed_benchmark_left_is_removed_by_the_next_and_a_live_one_is_not(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    dead, live, young = (tmp_path / f"{bench_folder.PREFIX}{name}" for name in ("dead", "live", "young"))
    for folder in (dead, live, young):
        folder.mkdir()
        (folder / "lock").touch()
    old = time.time() - 2 * bench_folder.YOUNG_S
    for folder in (dead, live):
        os.utime(folder, (old, old))
    with FileLock(RunDir(live).lock), folder_of_its_own(spec):
        assert sorted(path.name for path in tmp_path.iterdir() if path in (dead, live, young)) == [
            live.name,
            young.name,
        ]


def test_room_is_asked_for_before(tmp_path: Path, monkeypatch: Any) -> None:
    spec = every_step(spec_in(tmp_path), RunDir(tmp_path))
    plan = plan_for(spec)
    state = plan.model.state_bytes or 0
    free = 4 * state - 1

    class Usage:
        def __init__(self, nbytes: int) -> None:
            self.free = nbytes

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free))
    with pytest.raises(Refused, match=f"needs {4 * state:,} bytes"):
        refuse_full(spec, plan, RunDir(tmp_path), ("dtrain-disk", "torch-save"))
    refuse_full(spec, plan, RunDir(tmp_path), ("dtrain-disk",))
    free = 4 * state
    refuse_full(spec, plan, RunDir(tmp_path), ("dtrain-disk", "torch-save"))
    with pytest.raises(Refused, match="dcp-async-process"):
        refuse_full(spec, plan, RunDir(tmp_path), ("dcp-async-process",))


def lines() -> list[dict[str, Any]]:
    """What rank 0 writes: a torch.save that takes half a step, and a DCP that does not work."""

    def block(number: int, method: str, step_s: float, blocked_s: float = 0.0) -> dict[str, Any]:
        saves = 0 if method == PLAIN else 2
        one = Block(method, step_s, blocked_s, 0.0, step_s, 2, 0, saves * 2**20, saves)
        return {"what": "block", "round": number, **one.to_json()}

    found: list[dict[str, Any]] = [
        {"what": "built", "torch": "2.13.0", "threads": 1, "device": "cpu"},
        {"what": "trying", "method": "torch-save"},
        {"what": "failed", "method": "dcp", "error": "RuntimeError: no"},
        {"what": "sized", "steps": 1, "rounds": 6, "blocks": 13, "seconds": 10.0},
        block(0, PLAIN, 1.0),
    ]
    for number in range(6):
        found += [block(number, "torch-save", 1.5 + 0.01 * number, 0.5), block(number, PLAIN, 1.0)]
    return [*found, {"what": "done"}]


def found_in(tmp_path: Path) -> dict[str, Any]:
    spec = spec_in(tmp_path)
    return to_document(spec, plan_for(spec), lines(), 12.0)


def test_the_document_has_every_figure(tmp_path: Path) -> None:
    found = found_in(tmp_path)
    assert found["failed"] == {"dcp": "RuntimeError: no"}
    assert (found["blocks"], found["steps_per_block"], found["plain"]["step_s"]) == (6, 1, 1.0)
    (method,) = found["methods"]
    assert method["step_ratio"]["median"] == pytest.approx(1.525)
    assert (method["step_ratio"]["low"], method["step_ratio"]["high"]) == (1.5, 1.55)
    assert method["step_ratio"]["coverage"] == pytest.approx(1 - 2 / 64)
    assert (method["blocked_s"], method["disk_bytes"], method["disk_saves"]) == (0.5, 2**20, 12)
    assert json.loads(json.dumps(found)) == found


def test_without_any_method_that_works_there_are_no_figures(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    with pytest.raises(Refused, match="none of the methods works here"):
        to_document(spec, plan_for(spec), [line for line in lines() if line["what"] != "block"], 1.0)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_table_fits_80_columns(encoding: str, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding=encoding)
    say(Console(file=stream, width=80, markup=False, highlight=False), found_in(tmp_path))
    stream.flush()
    text = buffer.getvalue().decode(encoding)
    row = next(line for line in text.splitlines() if line.startswith("torch.save"))
    assert row.split() == [
        "torch.save", "+52.5", "%", "+50.0", "to", "+55.0", "%", "500", "ms", "+2.5", "%", "+262", "ms", "1.0", "MiB",
    ]  # fmt: skip
    assert len(row) <= 80
    assert "covers 96.88 %" in text
    assert "never fsynced" in text


def test_progress_in_a_file_is_a_line_now_and_then(tmp_path: Path) -> None:
    path, buffer = tmp_path / "bench.jsonl", io.StringIO()
    with BenchView(Console(file=buffer, width=80), path) as view:
        view.poll()
        path.write_text("".join(json.dumps(line) + "\n" for line in lines()))
        view.poll()
    assert view.lines == lines()
    assert buffer.getvalue().splitlines() == [
        "trying torch.save",
        "warning: dcp fails here and is left out: RuntimeError: no",
        "6 blocks of each, 1 timed step in each block: about 10.0 s",
        *(f"round {number} of 6" for number in range(1, 7)),
    ]


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="dtrain[plot]")
    picture = bench_plot.checked(str(tmp_path / "a.png"))
    assert picture is not None
    bench_plot.draw(found_in(tmp_path), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_shipped_spec_is_what_the_documents_say() -> None:
    plan = plan_for(load_spec(EXAMPLE))
    assert 14e6 < (plan.model.parameters or 0) < 16e6
    assert [tier.type for tier in plan.tiers] == ["memory", "disk"]
