"""`prune`: what the rule does not keep goes; never the last good one, a damaged one, or what is somebody else's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.cli.checkpoints import Run, dtrain, flip

from dtrain.tiers import faults
from dtrain.tiers.fence import claim
from dtrain.tiers.format.layout import Version
from dtrain.tiers.lock import FileLock


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("dtrain.tiers.memory.slots.TMPFS", tmp_path)
    return Run(tmp_path)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:15]) for path in folder.glob("step-*"))


def test_the_rule_of_the_spec_holds_in_every_tier(run: Run) -> None:
    for step in (10, 20, 30):
        run.store(step)
        run.store_object(step)
    ended = dtrain("prune", run.run.root, "--json")
    assert ended.code == 0
    assert (steps(run.root), steps(run.bucket)) == ([20, 30], [30])
    disk, remote = ended.document["tiers"]
    assert [one["step"] for one in disk["removed"]] == [10]
    assert [one["step"] for one in remote["removed"]] == [10, 20]
    assert [one["step"] for one in remote["kept"]] == [30]
    sizes = [one["bytes"] for tier in (disk, remote) for one in tier["removed"]]
    assert ended.document["freed_bytes"] == sum(sizes) == disk["freed_bytes"] + remote["freed_bytes"]


def test_a_rule_can_be_given_and_a_tier_chosen(run: Run) -> None:
    for step in range(10, 60, 10):
        run.store(step)
        run.store_object(step)
    ended = dtrain("prune", run.run.root, "--keep", 1, "--keep-every", 20, "--tier", "disk")
    assert ended.code == 0
    assert steps(run.root) == [20, 40, 50]
    assert steps(run.bucket) == [10, 20, 30, 40, 50]
    gone = [line.split()[2] for line in ended.out.splitlines() if line.split()[0] == "gone"]
    stays = [line.split()[2] for line in ended.out.splitlines() if line.split()[0] == "stays"]
    assert (gone, stays) == (["30", "10"], ["50", "40", "20"])


def test_keep_alone_does_not_give_up_what_the_spec_keeps_for_good(run: Run) -> None:
    run.write_spec({"type": "disk", "keep": 3, "keep_every": 20})
    for step in (10, 20, 30, 40, 50):
        run.store(step)
    dtrain("prune", run.run.root, "--keep", 1)
    assert steps(run.root) == [20, 40, 50]
    dtrain("prune", run.run.root, "--keep", 1, "--keep-every", 0)
    assert steps(run.root) == [50]


def test_a_dry_run_says_the_same_and_changes_nothing(run: Run) -> None:
    for step in (10, 20, 30):
        run.store(step)
    run.root.joinpath(".tmp-step-0000000040.a0001").mkdir()
    before = sorted(str(path) for path in run.run.root.rglob("*"))
    with FileLock(run.run.lock):
        dry = dtrain("prune", run.run.root, "--dry-run", "--json")
    run.run.lock.unlink()
    assert dry.code == 0
    assert sorted(str(path) for path in run.run.root.rglob("*")) == before
    wet = dtrain("prune", run.run.root, "--json")
    assert dry.document == {**wet.document, "dry_run": True}
    assert wet.document["tiers"][0]["leftovers"] == [".tmp-step-0000000040.a0001"]


def test_an_active_run_refuses_and_names_who_holds_it(run: Run) -> None:
    for step in (10, 20, 30):
        run.store(step)
    with FileLock(run.run.lock):
        ended = dtrain("prune", run.run.root)
    assert ended.code == 69
    assert f"process {os.getpid()} on " in ended.err
    assert " since 2" in ended.err
    assert ended.err.count("\n") == 1
    assert steps(run.root) == [10, 20, 30]


def test_a_drainer_that_outlives_its_run_is_not_shut_out(run: Run) -> None:
    for step in (10, 20, 30):
        run.store(step)
    run.own.path.mkdir()
    with FileLock(run.own.drainer_lock):
        ended = dtrain("prune", run.run.root)
    assert ended.code == 69
    assert "drainer" in ended.err
    assert steps(run.root) == [10, 20, 30]


def test_the_newest_is_read_before_anything_goes(run: Run) -> None:
    for step in (10, 20, 30):
        run.store(step)
    seen: list[str] = []
    before = faults.watch(lambda name, where, detail: seen.append(f"{name} {os.path.relpath(where, run.root)}"))
    try:
        dtrain("prune", run.run.root, "--tier", "disk")
    finally:
        faults.watch(before)
    read = [seen.index(f"disk.read step-0000000030.a0001/rank-{rank:05d}.safetensors") for rank in (0, 1)]
    assert max(read) < seen.index("disk.rename step-0000000010.a0001")


def test_damaged_ones_are_named_left_alone_and_do_not_count(run: Run) -> None:
    for step in (10, 20, 30, 40):
        run.store(step)
    flip(run.root / "step-0000000040.a0001" / "rank-00000.safetensors")
    (run.store(50) / "manifest.json").unlink()
    ended = dtrain("prune", run.run.root, "--tier", "disk", "--json")
    assert ended.code == 0
    assert steps(run.root) == [20, 30, 40, 50]
    (disk,) = ended.document["tiers"]
    assert [one["step"] for one in disk["damaged"]] == [50, 40]
    assert [one["step"] for one in disk["kept"]] == [20, 30]
    again = dtrain("prune", run.run.root, "--tier", "disk")
    assert again.out.count("DAMAGED") == 2


def test_when_nothing_good_is_left_nothing_goes_and_it_is_65(run: Run) -> None:
    for step in (10, 20, 30):
        flip(run.store(step) / "rank-00001.safetensors")
    ended = dtrain("prune", run.run.root)
    assert ended.code == 65
    assert steps(run.root) == [10, 20, 30]


def test_unfinished_writes_go_and_strangers_stay(run: Run) -> None:
    for step in (10, 20, 30):
        run.store(step)
        run.store_object(step)
    run.object.commit.begin(Version(1, 40))
    half = run.bucket / "step-0000000040.a0001"
    half.mkdir()
    (half / "rank-00000.safetensors").write_bytes(b"half")
    trash = run.root / ".trash-step-0000000005.a0001"
    trash.mkdir()
    (trash / "rank-00000.safetensors").write_bytes(b"old")
    strangers = [run.root / "step-10", run.root / "step-0000000010.a0001" / "mine.txt", run.root / "notes.txt"]
    strangers[0].mkdir()
    for path in strangers[1:]:
        path.write_text("keep me")
    ended = dtrain("prune", run.run.root, "--json")
    assert ended.code == 0
    assert [tier["leftovers"] for tier in ended.document["tiers"]] == [[trash.name], [".tmp-step-0000000040.a0001"]]
    assert not half.exists()
    assert not trash.exists()
    assert all(path.exists() for path in strangers)
    assert [path.name for path in (run.root / "step-0000000010.a0001").iterdir()] == ["mine.txt"]


def put_in(folder: Path, kind: str) -> Path:
    """Something of a person's own, under a name that could be dtrain's or not."""
    path = folder / {"shard": "rank-00077.safetensors", "part": "rank-00001.safetensors.bak"}.get(kind, kind)
    if kind == "folder":
        path.mkdir()
        (path / "rank-00000.safetensors").write_text("keep me")
    elif kind == "link":
        path.symlink_to(folder / "rank-00000.safetensors")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("keep me")
    return path


@pytest.mark.parametrize("kind", ["shard", "part", "notes.txt", "folder", "link", "pipe"])
@pytest.mark.parametrize("tier", ["disk", "object"])
def test_only_what_the_manifest_lists_goes_and_the_report_is_true(run: Run, tier: str, kind: str) -> None:
    place = run.root if tier == "disk" else run.bucket
    for step in (10, 20, 30):
        run.store(step) if tier == "disk" else run.store_object(step)
    mine = put_in(place / "step-0000000010.a0001", kind)
    for words in (["--dry-run"], []):
        ended = dtrain("prune", run.run.root, "--tier", tier, "--keep", 1, "--json", *words)
        (told,) = ended.document["tiers"]
        assert {one["step"]: one["not_ours"] for one in told["removed"]} == {10: [mine.name], 20: []}
    assert os.path.lexists(mine)
    assert os.listdir(mine.parent) == [mine.name]
    assert sorted(path.name for path in place.iterdir()) == [mine.parent.name, "step-0000000030.a0001"]
    assert dtrain("prune", run.run.root).code == 0, "what is left is nobody's checkpoint, or one that is let alone"
    assert os.path.lexists(mine)


def test_a_delete_that_was_cut_is_ended_without_what_the_manifest_did_not_list(run: Run) -> None:
    folder = run.store_object(10)
    run.store_object(20)
    mine = put_in(folder, "shard")
    listed = [path.name for path in folder.glob("rank-0000*")]

    def cut(name: str, where: str, detail: object) -> None:
        if name == "disk.unlink" and where.endswith("rank-00001.safetensors"):
            raise KeyboardInterrupt

    before = faults.watch(cut)
    try:
        with pytest.raises(KeyboardInterrupt):
            run.object.commit.remove(Version(1, 10), listed, lambda: None)
    finally:
        faults.watch(before)
    assert (folder / "rank-00001.safetensors").exists()
    assert dtrain("prune", run.run.root, "--tier", "object").code == 0
    assert os.listdir(folder) == [mine.name]


def test_an_unfinished_folder_that_stays_is_not_called_gone(run: Run) -> None:
    run.store(10)
    trash = run.root / ".trash-step-0000000005.a0001"
    trash.mkdir()
    put_in(trash, "notes.txt")
    ended = dtrain("prune", run.run.root, "--tier", "disk")
    assert f"stays        {trash.name}" in ended.out
    assert f"gone         {trash.name}" not in ended.out
    assert trash.exists()


def test_a_run_without_checkpoints_is_left_as_it_is(run: Run) -> None:
    ended = dtrain("prune", run.run.root)
    assert ended.code == 0
    assert not run.root.exists()
    assert not run.bucket.exists()


def test_a_place_that_another_run_has_claimed_is_left_alone(run: Run) -> None:
    for step in (10, 20, 30):
        run.store(step)
    claim(run.disk.store, "another")
    ended = dtrain("prune", run.run.root, "--tier", "disk")
    assert ended.code == 69
    assert "belongs to another run" in ended.err
    assert steps(run.root) == [10, 20, 30]


def test_a_tier_that_fails_does_not_keep_the_others_from_being_pruned(run: Run) -> None:
    for step in (10, 20, 30):
        run.store(step)
    run.bucket.write_text("a file where the bucket should be")
    ended = dtrain("prune", run.run.root, "--json")
    assert ended.code == 69
    assert len(ended.document["unreachable"]) == 1
    assert steps(run.root) == [20, 30]


def test_the_claim_is_given_back(run: Run) -> None:
    for step in (10, 20, 30):
        run.store(step)
    dtrain("prune", run.run.root)
    assert sorted(path.name for path in run.root.rglob("epoch-*")) == []


def test_without_run_json_nothing_is_deleted(run: Run) -> None:
    for step in (10, 20, 30):
        run.store(step)
    run.run.run.unlink()
    ended = dtrain("prune", run.run.root)
    assert ended.code == 65
    assert "run.json is missing" in ended.err
    assert steps(run.root) == [10, 20, 30]


@pytest.mark.parametrize("words", [("--keep", 0), ("--keep", "x"), ("--keep-every", -1), ("--tier", "memory")])
def test_a_wrong_rule_is_2(run: Run, words: tuple[object, object]) -> None:
    run.store(10)
    assert dtrain("prune", run.run.root, *words).code == 2
