"""Slower tiers in the plan: when they are written, what they cost, survive and hold."""

from __future__ import annotations

from typing import Any

import pytest
from tests.planners.build import MakeSpec

from dtrain.planners.devices import DISK_COMMIT_S, OBJECT_BYTES_PER_S, OBJECT_COMMIT_S
from dtrain.planners.document import TierPlan
from dtrain.planners.machine import Machine, Measured
from dtrain.planners.plan import Plan, make_plan
from dtrain.tiers.format.layout import Version
from dtrain.tiers.retention import Rule

MEMORY = {"type": "memory"}
DISK = {"type": "disk"}
BUCKET = {"type": "object", "url": "s3://bucket/run"}
FAST = Measured(1e-3, 2e-3, 1e-3)
SLOW = Measured(10.0, 20.0, 1.0)


def tier_of(plan: Plan, kind: str) -> TierPlan:
    tier = plan.tier(kind)
    assert tier is not None
    return tier


def test_the_figures_of_an_object_tier(make_spec: MakeSpec, laptop: Machine) -> None:
    plan = make_plan(make_spec(tiers=[MEMORY, DISK, BUCKET]), laptop)
    bucket, shard = tier_of(plan, "object"), plan.model.state_bytes_per_rank or 0
    assert bucket.write_s == pytest.approx(2 * 2 * shard / OBJECT_BYTES_PER_S + OBJECT_COMMIT_S)
    assert bucket.survives == ("process", "node", "cluster")
    assert bucket.auto
    assert bucket.every % tier_of(plan, "disk").every == 0
    assert any("object store: 191 MiB/s per node" in line for line in plan.assumptions)


def test_without_an_object_tier_the_plan_rests_on_no_figure_of_one(make_spec: MakeSpec, laptop: Machine) -> None:
    assert not any("object store" in line for line in make_plan(make_spec(), laptop).assumptions)


def test_behind_a_disk_an_object_store_is_written_less_often_than_without_one(
    make_spec: MakeSpec, laptop: Machine
) -> None:
    spec = make_spec(tiers=[MEMORY, DISK, BUCKET], max_steps=100_000)
    behind = tier_of(make_plan(spec, laptop, SLOW), "object")
    assert behind.every == pytest.approx(3600 / 121, rel=0.05)  # about one an hour
    alone = tier_of(make_plan(make_spec(tiers=[MEMORY, BUCKET], max_steps=100_000), laptop, SLOW), "object")
    assert alone.every < behind.every


def test_without_a_disk_the_object_s_interval_is_a_multiple_of_memory_s(make_spec: MakeSpec, laptop: Machine) -> None:
    plan = make_plan(make_spec(tiers=[MEMORY | {"every": 7}, BUCKET]), laptop)
    assert tier_of(plan, "object").every % 7 == 0
    assert plan.expected.lost_steps.node == plan.expected.lost_steps.cluster
    assert (plan.expected.lost_steps.node or 0) < 100


@pytest.mark.parametrize(
    "tiers",
    [
        [MEMORY | {"every": "auto"}, DISK, BUCKET | {"every": 60}],
        [MEMORY | {"every": "auto"}, DISK | {"keep_every": 60}, BUCKET],
        [MEMORY | {"every": "auto"}, DISK, BUCKET | {"keep_every": 60}],
        [MEMORY | {"every": 4}, DISK | {"keep_every": 60}, BUCKET | {"keep_every": 120}],
        [DISK | {"keep_every": 7}],
    ],
)
@pytest.mark.parametrize("measured", [None, FAST, SLOW])
def test_planned_intervals_meet_every_step_that_the_spec_asks_for(
    make_spec: MakeSpec, laptop: Machine, tiers: list[dict[str, Any]], measured: Measured | None
) -> None:
    plan = make_plan(make_spec(tiers=tiers), laptop, measured)
    unknown = make_plan(make_spec(tiers=tiers, model={"type": "python", "entry": "m:f"}), laptop)
    for planned in (plan.tiers, unknown.tiers):
        wanted = [tier["keep_every"] for tier in tiers if "keep_every" in tier]
        wanted += [tier.every for tier in planned if not tier.auto and tier.type == "object"]
        assert all(steps % tier.every == 0 for steps in wanted for tier in planned if tier.type != "object"), planned
        assert all(tier.keep_every is None or tier.keep_every % tier.every == 0 for tier in planned)


def test_steps_that_the_run_never_reaches_narrow_no_interval(make_spec: MakeSpec, laptop: Machine) -> None:
    slow = {"workers_per_node": 2, "channels": {"storage": {"bandwidth": "10MB/s"}}}
    tiers = [MEMORY | {"every": "auto"}, DISK | {"every": 211}]
    assert tier_of(make_plan(make_spec(cluster=slow, tiers=tiers), laptop), "memory").every > 1


def test_what_is_kept_for_good_and_never_made_is_warned_about(make_spec: MakeSpec, laptop: Machine) -> None:
    tiers = [MEMORY | {"every": 2}, DISK | {"every": 4, "keep_every": 6}, BUCKET | {"every": 10}]
    warnings = make_plan(make_spec(tiers=tiers), laptop).warnings
    assert any("keep_every 6 is not a multiple of every 4: only every 12 steps are kept" in line for line in warnings)
    assert any("object every 10 is not a multiple of disk every 4: only every 20" in line for line in warnings)


def late(make_spec: MakeSpec, laptop: Machine, *tiers: dict[str, Any]) -> Plan:
    cluster = {"workers_per_node": 2, "hardware": {"disk_bandwidth": "200MB/s"}}
    return make_plan(make_spec(tiers=[MEMORY, *tiers], cluster=cluster), laptop, FAST)


def test_a_tier_that_is_late_is_waited_for_or_leaves_checkpoints_out_as_the_spec_says(
    make_spec: MakeSpec, laptop: Machine
) -> None:
    for first, place in ((DISK, "disk"), (BUCKET, "object store")):
        waits = late(make_spec, laptop, first | {"every": 1})
        assert (waits.expected.stall_s or 0) > DISK_COMMIT_S / 2
        assert any(f"the training will wait for the {place} (use every: auto)" in line for line in waits.warnings)
        skips = late(make_spec, laptop, first | {"every": 1, "when_slow": "skip"})
        assert skips.expected.stall_s == 0
        assert any("checkpoints will be left out" in line for line in skips.warnings)
        assert (skips.expected.lost_steps.cluster or 0) > (waits.expected.lost_steps.cluster or 0)


def test_nobody_waits_for_an_object_store_behind_a_disk(make_spec: MakeSpec, laptop: Machine) -> None:
    disk = DISK | {"every": 10}
    plan = late(make_spec, laptop, disk, BUCKET | {"every": 10, "when_slow": "wait"})
    assert plan.expected.stall_s == late(make_spec, laptop, disk).expected.stall_s
    assert any(line.startswith("object:") and "will be left out" in line for line in plan.warnings)


def test_a_disk_inside_a_node_is_said_to_be_lost_with_it(make_spec: MakeSpec, laptop: Machine) -> None:
    one = make_plan(make_spec(), laptop).assumptions
    two = make_plan(make_spec(cluster={"nodes": 2, "workers_per_node": 2}), laptop).assumptions
    assert "the disk tier outlives the nodes; a disk inside a node is lost with that node" in one
    assert any("every node reaches the disk tier's file system" in line and "is lost with" in line for line in two)
    assert not any("disk" in line for line in make_plan(make_spec(tiers=[MEMORY, BUCKET]), laptop).assumptions)


@pytest.mark.parametrize(("keep", "keep_every"), [(1, None), (3, None), (3, 10), (2, 200), (5, 500)])
def test_the_peak_is_what_retention_can_leave(
    make_spec: MakeSpec, laptop: Machine, keep: int, keep_every: int | None
) -> None:
    rule: dict[str, Any] = {"every": 5, "keep": keep, "keep_every": keep_every}
    plan = make_plan(make_spec(tiers=[DISK | rule, BUCKET | rule]), laptop)
    most = Rule(keep, keep_every).at_most(200)
    kept: set[Version] = set()
    for step in range(5, 201, 5):
        assert len(kept) + 1 <= most
        kept = Rule(keep, keep_every).kept(kept | {Version(1, step)})
    for tier, files in zip(plan.tiers, (2 + 2, 2 + 1), strict=True):
        assert tier.peak_bytes == most * (plan.model.state_bytes or 0)
        assert tier.peak_files == most * files  # two shards, the manifest, and on a disk the folder


def test_the_peak_of_memory_and_of_a_folder_by_url(make_spec: MakeSpec, laptop: Machine) -> None:
    plan = make_plan(make_spec(tiers=[MEMORY, BUCKET | {"url": "file:///mnt/x"}]), laptop)
    memory, folder = plan.tiers
    assert (memory.peak_bytes, memory.peak_files, memory.keep_every) == (3 * (plan.model.state_bytes or 0), None, None)
    assert folder.peak_files == 4 * 4
