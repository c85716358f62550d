"""`ls` and `inspect`: all that is there is shown, from the fastest tier that can be read, and mistakes are told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.checkpoints import SPEC, Ended, Run, dtrain, flip
from tests.tiers.build import RUN_ID, TENSORS, digest_of

from dtrain.cli.view.format import human_bytes
from dtrain.specs.difference import changes
from dtrain.tiers.format.jsonfile import dumps, read, replace
from dtrain.tiers.format.layout import Version
from dtrain.tiers.format.manifest import Manifest
from dtrain.tiers.format.shardfile import ShardReader
from dtrain.tiers.reading.recovery import find, open_candidate


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("dtrain.tiers.memory.slots.TMPFS", tmp_path)
    return Run(tmp_path)


def places(listed: dict[str, Any]) -> list[tuple[int, str]]:
    return [(row["step"], row["tier"]) for row in listed["checkpoints"]]


def one_line(ended: Ended) -> str:
    assert ended.err.count("\n") == 1, ended.err
    assert "Traceback" not in ended.err
    return ended.err


def edit_manifest(folder: Path, **changed: object) -> None:
    body = json.loads((folder / "manifest.json").read_text())
    del body["digest"]
    (folder / "manifest.json").write_bytes(Manifest(body | changed).to_bytes())


def test_ls_shows_all_tiers_newest_first_and_the_faster_tier_first(run: Run) -> None:
    run.store(10)
    run.store(20)
    run.store(15, attempt=2)
    run.store_object(20)
    run.store_memory(21, attempt=2)
    run.store_memory(20)
    ended = dtrain("ls", run.run.root, "--json")
    assert ended.code == 0
    assert ended.err == ""
    assert places(ended.document) == [
        (21, "memory"),
        (15, "disk"),
        (20, "memory"),
        (20, "disk"),
        (20, "object"),
        (10, "disk"),
    ]
    assert all(row["usable"] and row["bytes"] > 0 for row in ended.document["checkpoints"])
    assert ended.document["unreachable"] == []


def test_ls_gives_the_bytes_of_the_files_without_opening_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run.store(10)
    run.store_memory(11)

    def refuse(*_: object) -> None:
        raise AssertionError("a shard was opened")

    monkeypatch.setattr(ShardReader, "__init__", refuse)
    memory, disk = dtrain("ls", run.run.root, "--json").document["checkpoints"]
    assert disk["bytes"] == sum(file.stat().st_size for file in folder.glob("rank-*"))
    assert memory["bytes"] == disk["bytes"]


def test_ls_for_people_has_a_line_per_checkpoint(run: Run) -> None:
    run.store(10)
    (run.store(20) / "manifest.json").unlink()
    lines = dtrain("ls", run.run.root).out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "20", "10"]
    assert "DAMAGED" in lines[1]
    assert lines[2].endswith("whole")


def test_an_unreachable_tier_is_said_and_the_others_are_listed(run: Run) -> None:
    run.store(10)
    run.write_spec({"type": "disk"}, {"type": "object", "url": run.run.run.as_uri()})
    ended = dtrain("ls", run.run.root, "--json")
    assert ended.code == 0
    assert places(ended.document) == [(10, "disk")]
    (words,) = ended.document["unreachable"]
    assert words.startswith("the object tier ")
    assert words in one_line(ended)


def test_ls_of_unreachable_tiers_alone_is_69(run: Run) -> None:
    run.write_spec({"type": "object", "url": run.run.run.as_uri()})
    ended = dtrain("ls", run.run.root, "--json")
    assert ended.code == 69
    assert ended.document["exit_code"] == 69


def test_a_checkpoint_under_way_is_not_called_damaged(run: Run) -> None:
    run.object.commit.begin(Version(1, 30))
    (run.bucket / "step-0000000030.a0001").mkdir()
    (run.bucket / "step-0000000030.a0001" / "rank-00000.safetensors").write_bytes(b"half")
    (row,) = dtrain("ls", run.run.root, "--json").document["checkpoints"]
    assert not row["usable"]
    assert "unfinished" in row["reason"]
    said = dtrain("verify", run.run.root)
    assert (said.code, "damaged" in said.err) == (65, False)


def test_inspect_says_what_is_in_a_checkpoint(run: Run) -> None:
    folder = run.store(10, world=3)
    edit_manifest(folder, ties={"model.c": "model.a"}, scheduler={"name": "cosine", "step": 10}, mesh={"tp": 1})
    told = dtrain("inspect", run.run.root, "--json").document
    assert (told["step"], told["attempt"], told["world"], told["tier"]) == (10, 1, 3, "disk")
    assert told["state_digest"] == digest_of(open_candidate(find(None, [run.disk]).candidates[0]))
    assert told["tensors"].keys() == {info.name for info in TENSORS}
    for info in TENSORS:
        shown = told["tensors"][info.name]
        assert (shown["dtype"], tuple(shown["shape"]), shown["bytes"]) == (info.dtype, info.shape, info.nbytes)
    pieces = {name: shown["pieces"] for name, shown in told["tensors"].items()}
    assert pieces["model.scalar"] == 1
    assert pieces["model.b"] > 1
    assert told["bytes"] == sum(info["bytes"] for info in told["files"].values())
    assert told["files"] == read(folder / "manifest.json")["files"]
    assert told["ties"] == {"model.c": "model.a"}
    assert told["data"] == {"samples": 80}
    assert told["spec_changes"] is None
    page = dtrain("inspect", run.run.root).out
    assert "model.c is model.a" in page
    assert "37x50" in page
    assert told["state_digest"] in page


def test_inspect_shows_the_mesh_and_what_each_file_weighs(run: Run) -> None:
    folder = run.store(10, world=4)
    assert dtrain("inspect", run.run.root, "--json").document["mesh"] is None, "older ones say nothing of it"
    assert "mesh          -" in dtrain("inspect", run.run.root).out
    mesh = {"dp_replicate": 1, "dp_shard": 2, "tp": 2, "pp": 1}
    edit_manifest(folder, mesh=mesh)
    told = dtrain("inspect", run.run.root, "--json").document
    assert told["mesh"] == mesh
    sizes = {name: info["bytes"] for name, info in told["files"].items()}
    assert sizes == {path.name: path.stat().st_size for path in folder.glob("rank-*")}
    page = dtrain("inspect", run.run.root).out
    assert "mesh          dp_replicate 1, dp_shard 2, tp 2, pp 1" in page
    assert all(f"{name}  {human_bytes(size)}" in page for name, size in sizes.items())


def test_inspect_in_memory_says_the_same_of_the_tensors(run: Run) -> None:
    run.store(10)
    run.store_memory(10)
    disk = dtrain("inspect", run.run.root, "--tier", "disk", "--json").document
    memory = dtrain("inspect", run.run.root, "--json").document
    assert (memory["tier"], disk["tier"]) == ("memory", "disk")
    assert memory["tensors"] == disk["tensors"]
    assert memory["state_digest"] == disk["state_digest"]


def test_inspect_takes_the_fastest_tier_that_can_be_read(run: Run) -> None:
    flip(run.store(10) / "rank-00001.safetensors")
    run.store_object(10)
    told = dtrain("inspect", f"{run.run.root}@10", "--json")
    assert told.code == 0
    assert told.document["tier"] == "object"
    (passed,) = told.document["passed_over"]
    assert passed["tier"] == "disk"
    assert "passed over" in one_line(told)


def test_a_damaged_newest_one_is_passed_over_for_the_one_before(run: Run) -> None:
    run.store(10)
    flip(run.store(20) / "rank-00000.safetensors")
    (run.store(30) / "manifest.json").unlink()
    told = dtrain("inspect", run.run.root, "--json").document
    assert told["step"] == 10
    assert [passed["step"] for passed in told["passed_over"]] == [30, 20]
    ended = dtrain("inspect", f"{run.run.root}@20")
    assert ended.code == 65
    assert "no checkpoint can be read whole" in ended.err


def test_inspect_shows_what_has_changed_in_the_spec_since(run: Run) -> None:
    training = run.spec["training"]
    then = {**run.spec, "max_steps": 7, "training": {**training, "optimizer": {**training["optimizer"], "lr": 0.5}}}
    edit_manifest(run.store(10), spec=then)
    told = dtrain("inspect", run.run.root, "--json").document
    assert told["spec_changes"] == [
        {"key": "max_steps", "then": 7, "now": 200},
        {"key": "training.optimizer.lr", "then": 0.5, "now": 0.001},
    ]
    assert "changed since: training.optimizer.lr: 0.5 → 0.001" in dtrain("inspect", run.run.root).out
    edit_manifest(run.store(11), spec=run.spec)
    assert dtrain("inspect", run.run.root, "--json").document["spec_changes"] == []


def test_a_difference_goes_to_the_leaves() -> None:
    then = {"a": {"b": [1, 2], "c": 1}, "tiers": [{"every": 1}, {"keep": 3}], "output_dir": "x"}
    now = {"a": {"b": [1, 3], "c": 1}, "tiers": [{"every": 1}], "output_dir": "y"}
    assert [str(change) for change in changes(then, now)] == ["a.b: [1, 2] → [1, 3]", "tiers[1].keep: 3 → None"]


def test_tiers_are_compared_by_their_type() -> None:
    disk = {"type": "disk", "keep": 3, "every": 10}
    then = {"tiers": [disk, {"type": "object", "url": "s3://a"}]}
    now = {"tiers": [{"type": "memory", "every": 1}, {**disk, "keep": 4}, {"type": "object", "url": "s3://a"}]}
    assert [str(change) for change in changes(then, now)] == [
        "tiers[disk].keep: 3 → 4",
        "tiers[memory].every: None → 1",
        "tiers[memory].type: None → memory",
    ]


def test_a_target_is_a_run_a_step_latest_or_a_folder(run: Run, tmp_path: Path) -> None:
    folder = run.store(10)
    run.store(20)
    moved = shutil.copytree(folder, tmp_path / "elsewhere" / folder.name)
    words = {run.run.root: 20, f"{run.run.root}@latest": 20, f"{run.run.root}@10": 10, folder: 10, moved: 10}
    for target, step in words.items():
        told = dtrain("inspect", target, "--json").document
        assert told["step"] == step, target
    assert dtrain("verify", moved).code == 0
    flip(moved / "rank-00000.safetensors")
    assert dtrain("verify", moved).code == 65


def test_a_run_may_have_an_at_sign_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.tiers.memory.slots.TMPFS", tmp_path)
    (tmp_path / "me@home").mkdir()
    run = Run(tmp_path / "me@home")
    run.store(10)
    assert dtrain("inspect", run.run.root, "--json").document["step"] == 10
    assert dtrain("inspect", f"{run.run.root}@10", "--json").document["step"] == 10


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
@pytest.mark.parametrize(
    ("suffix", "code", "words"),
    [
        ("@abc", 2, "after @ comes a step number or latest"),
        ("@", 2, "after @ comes a step number or latest"),
        ("@-1", 2, "after @ comes a step number or latest"),
        ("@99999999999999999999999999", 2, "after @ comes a step number or latest"),
        ("@7", 2, "no such checkpoint; there is step 20, 10"),
        ("/nowhere", 2, "no such folder"),
        ("/run.json", 2, "not a folder"),
        ("/logs", 2, "it has no spec.json"),
        ("/checkpoints/step-0000000099.a0001", 2, "no such folder"),
    ],
)
def test_a_target_that_is_not_there_is_one_line(run: Run, command: str, suffix: str, code: int, words: str) -> None:
    run.store(10)
    run.store(20)
    more = [run.bucket.parent / "out"] if command == "export" else []
    ended = dtrain(command, f"{run.run.root}{suffix}", *more, "--json")
    assert ended.code == code
    assert words in one_line(ended)
    assert ended.document["message"] == ended.err.strip()


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "prune", "export"])
def test_an_empty_path_is_not_the_working_directory(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    run.store(10)
    monkeypatch.chdir(run.run.root)
    ended = dtrain(command, "", *(["out"] if command == "export" else []))
    assert ended.code == 2
    assert "the path of the run is empty" in one_line(ended)


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "prune", "export"])
@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("spec.json", b"{}", 78),
        ("spec.json", b"[]", 78),
        ("spec.json", b'{"tiers": 3, "model": {"type": "gpt"}}', 78),
        ("spec.json", b"", 78),
        ("spec.json", b'{"name"', 78),
        ("spec.json", b"[" * 100_000, 78),
        ("spec.json", b'{"a":' * 900 + b"1" + b"}" * 900, 78),
        ("run.json", b"{}", 65),
        ("run.json", b'{"run_id": 7}', 65),
        ("run.json", b"\xff", 65),
    ],
)
def test_a_garbled_file_of_the_run_is_one_line(run: Run, command: str, name: str, text: bytes, code: int) -> None:
    run.store(10)
    (run.run.root / name).write_bytes(text)
    ended = dtrain(command, run.run.root, *([run.run.root / "out"] if command == "export" else []))
    assert ended.code == code
    assert name in one_line(ended)
    assert ended.out == ""


def test_a_tier_that_the_run_does_not_have_is_one_line(run: Run) -> None:
    run.store(10)
    run.write_spec({"type": "disk"})
    ended = dtrain("verify", run.run.root, "--tier", "object")
    assert ended.code == 2
    assert "it has memory, disk" in one_line(ended)


def test_names_in_a_checkpoint_do_not_act_on_the_terminal(run: Run) -> None:
    folder = run.store(10)
    edit_manifest(folder, scheduler={"\x1b[2Jname": "\x07"})
    assert "\x1b" not in dtrain("inspect", run.run.root).out


def test_another_runs_checkpoints_in_the_same_place_are_not_shown(run: Run) -> None:
    run.store(10)
    edit_manifest(run.store(20), run_id="another")
    assert places(dtrain("ls", run.run.root, "--json").document) == [(10, "disk")]
    assert RUN_ID != "another"


def test_memory_of_another_run_of_the_same_folder_is_not_shown(run: Run) -> None:
    replace(run.store_memory(10).path / "owner.json", dumps({"run_id": "another"}))
    assert dtrain("ls", run.run.root).out.endswith("no checkpoints\n")


def test_a_run_whose_folder_is_lost_is_looked_at_through_its_spec(run: Run) -> None:
    run.store_object(30)
    spec = run.run.root.parent / "spec.yaml"
    tiers = [{"type": "memory"}, {"type": "disk"}, {"type": "object", "url": run.bucket.as_uri()}]
    spec.write_text(json.dumps({**SPEC, "output_dir": str(run.run.root), "tiers": tiers}))
    shutil.rmtree(run.run.root)
    assert places(dtrain("ls", spec, "--json").document) == [(30, "object")]
    for words in (["inspect", f"{spec}@30"], ["verify", spec], ["export", f"{spec}@30", run.run.root.parent / "out"]):
        ended = dtrain(*words)
        assert ended.code == 0, ended.err
    assert not run.run.root.exists(), "looking makes no folder"


def keep_for_peers(run: Run, step: int, own: bool = True) -> None:
    """Node 0 of two, with a worker each: its own shard, and a copy of node 1's."""
    run.write_spec({"type": "memory"}, {"type": "peer"}, {"type": "disk"}, cluster={"nodes": 2})
    run.store_memory(step)
    kept = run.own.replica_of(1)
    kept.path.mkdir(exist_ok=True)
    for slot in run.own.all_slots():
        if slot.rank == 1:
            for path in (slot.file, slot.record_file):
                path.rename(kept.path / path.name)
        elif not own and (record := slot.record()) is not None and record.step == step:
            slot.invalidate()


def test_what_nodes_have_between_them_is_shown_where_one_of_them_has_all_of_it(run: Run) -> None:
    keep_for_peers(run, 12)
    keep_for_peers(run, 13, own=False)
    ended = dtrain("ls", run.run.root, "--json")
    assert places(ended.document) == [(13, "peer"), (12, "peer")]
    assert [row["usable"] for row in ended.document["checkpoints"]] == [False, True]
    told = dtrain("ls", run.run.root).out
    assert "in part: this node has the shards of rank 1 of 2" in told
    assert "DAMAGED" not in told
    assert dtrain("verify", f"{run.run.root}@12").code == 0
    assert "peer" in dtrain("inspect", f"{run.run.root}@12", "--tier", "peer").out


def test_a_flipped_bit_in_a_copy_is_found(run: Run) -> None:
    keep_for_peers(run, 12)
    flip(run.own.replica_of(1).path / "rank-00001-of-00002.slot0")
    ended = dtrain("verify", f"{run.run.root}@12")
    assert ended.code == 65
    assert "does not match its digest" in ended.out + ended.err
