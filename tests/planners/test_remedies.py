"""What the plan says would have to change is enough: put into the spec, it fits, and a little less does not."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.planners.build import tiny

from dtrain.planners.document import Plan
from dtrain.planners.machine import Machine
from dtrain.planners.plan import make_plan

LARGE = {"type": "gpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 32000}
PEER: list[dict[str, Any]] = [{"type": "memory"}, {"type": "peer", "replicas": 3}]


def planned(
    tiers: list[dict[str, Any]], *, seq_len: int = 128, batch: int = 16, accelerator: str = "h100",
    overhead: float = 0.01, cluster: dict[str, Any] | None = None, **changes: Any,
) -> Plan:  # fmt: skip
    """A job of four nodes with two workers each, unless `cluster` says otherwise."""
    machine = Machine(cpu_cores=8, host_memory_bytes=2**44, shm_free_bytes=2**43, accelerator=accelerator)
    training = {"global_batch_size": batch, "micro_batch_size": 2}
    dataset = {"type": "text", "path": "python:stdlib", "seq_len": seq_len}
    found = {"nodes": 4, "workers_per_node": 2, **(cluster or {})}
    checkpoint = {"max_overhead": overhead}
    spec = tiny(
        tiers=tiers, cluster=found, training=training, dataset=dataset, max_steps=1000, checkpoint=checkpoint, **changes
    )
    return make_plan(spec, machine)


def advised(plan: Plan, pattern: str) -> str:
    """What the plan asks for, as it says it."""
    found = re.search(pattern, " ".join(plan.changes))
    assert found, plan.changes
    return found[1]


def test_a_second_link_where_gradients_hold_the_first() -> None:
    def made(**storage: bool) -> Plan:
        return planned(
            [{"type": "memory", "every": "auto"}], seq_len=320, batch=32, model=LARGE, strategy={"dp_shard": 16},
            cluster={"nodes": 2, "workers_per_node": 8, "channels": {"storage": storage}},
        )  # fmt: skip

    shared = made()
    before, after = (float(advised(shared, rf"second link, {words} ([\d.]+) GiB/s")) for words in (
        r"for the copy alone: [\d.]+ GiB/s instead of", "for the copy alone:",
    ))  # fmt: skip
    assert shared.tiers[0].every > 1
    own = made(shared=False)
    assert own.tiers[0].every == 1
    assert not own.changes
    assert shared.storage.bytes_per_s == pytest.approx(before * 2**30, rel=0.01)
    assert own.storage.bytes_per_s == pytest.approx(after * 2**30, rel=0.01)


def test_a_second_link_is_not_asked_for_where_it_would_not_do() -> None:
    plan = planned([{"type": "memory", "every": "auto"}], seq_len=128, model=LARGE, strategy={"dp_shard": 2})
    assert plan.changes
    assert not [line for line in plan.changes if "second link" in line]


@pytest.mark.parametrize("peer", [{}, {"every": 1}])
@pytest.mark.parametrize("model", [LARGE, None])
def test_a_network_that_takes_a_copy_of_every_snapshot(model: dict[str, Any] | None, peer: dict[str, Any]) -> None:
    def made(bytes_per_s: float) -> Plan:
        changes: dict[str, Any] = {} if model is None else {"model": model, "seq_len": 2048}
        tiers = [PEER[0], PEER[1] | peer]
        return planned(tiers, cluster={"hardware": {"network_bandwidth": bytes_per_s}}, **changes)

    def lacks(plan: Plan) -> bool:
        return any(line.startswith("peer") for line in plan.changes)

    slow = made(1e8 if model else 1e6)
    assert lacks(slow)
    amount, unit = advised(slow, r"peer every 1 step.*? needs ([\d.]+ [MG])iB/s from each rank").split()
    rate = float(amount) * 2.0 ** {"M": 20, "G": 30}[unit]
    assert not lacks(made(rate))
    assert made(rate).tiers[1].every == 1
    assert lacks(made(0.97 * rate))


def test_steps_that_are_long_enough_for_a_copy() -> None:
    def made(batch: int) -> Plan:
        return planned(PEER, batch=batch, model=LARGE, seq_len=2048, cluster={"hardware": {"network_bandwidth": 1e8}})

    batch = int(advised(made(16), r"micro-batches per step instead of 1 \(training\.global_batch_size (\d+)\)"))
    assert made(16).tiers[1].every > 1
    assert made(batch).tiers[1].every == 1
    assert made(batch - 16).tiers[1].every > 1
    assert not made(batch).changes


def test_an_overhead_that_a_copy_for_other_nodes_may_take() -> None:
    """On processors sending takes time from the passes."""

    def made(overhead: float) -> Plan:
        tiers = [PEER[0], {"type": "peer"}]
        return planned(tiers, accelerator="cpu", overhead=overhead, batch=64, seq_len=32)

    short = made(0.01)
    assert short.tiers[1].every > 1, short.tiers
    percent = float(advised(short, r"peer every 1 step, with each snapshot, needs checkpoint\.max_overhead ([\d.]+)%"))
    assert made(percent / 100).tiers[1].every == 1


@pytest.mark.parametrize("kind", ["disk", "object"])
def test_a_disk_or_a_store_that_keeps_up(kind: str) -> None:
    tier = {"type": "disk", "every": 1} if kind == "disk" else {"type": "object", "url": "s3://b", "every": 1}

    def made(bytes_per_s: float) -> Plan:
        cluster = {"nodes": 1, "hardware": {f"{kind}_bandwidth": bytes_per_s, "flops": "1TFLOP/s"}}
        return planned([{"type": "memory"}, tier], batch=2048, cluster=cluster)

    def late(plan: Plan) -> bool:
        return any(line.startswith(f"{kind}: one write takes") for line in plan.warnings)

    slow = made(1e6)
    assert late(slow)
    rate = float(advised(slow, rf"{kind} every 1 step needs ([\d.]+) MiB/s per node")) * 2**20
    assert not late(made(rate))
    assert not made(rate).changes
    assert late(made(0.98 * rate))


def test_where_no_disk_is_fast_enough_it_is_said_how_long_a_step_would_have_to_be() -> None:
    def made(batch: int) -> Plan:
        cluster = {"nodes": 1, "hardware": {"flops": "20TFLOP/s"}}
        return planned([{"type": "memory"}, {"type": "disk", "every": 1}], batch=batch, cluster=cluster)

    short = made(16)
    least_s = float(advised(short, r"disk every 1 step needs steps of more than ([\d.]+) ms")) / 1e3
    assert 0 < (short.iteration.step_s or 0) < least_s
    batch = 16
    while (made(batch).iteration.step_s or 0) <= least_s:
        batch += 16
    assert not [line for line in made(batch).changes if "at any rate" in line]
    assert [line for line in made(batch - 16).changes if "at any rate" in line]
