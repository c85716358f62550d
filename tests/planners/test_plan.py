from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planners.build import MakeSpec, tiny

from dtrain.planners.devices import DISK_COMMIT_S
from dtrain.planners.machine import Machine, Measured
from dtrain.planners.plan import Plan, make_plan, plan_from_json
from dtrain.planners.sharding.shards import TensorInfo
from dtrain.specs.units import LEAST_RATE, LEAST_SECONDS, MOST_RATE, MOST_SECONDS

CONTRACT: dict[str, set[str]] = {
    "model": {"parameters", "layers", "state_bytes", "state_bytes_per_rank"},
    "iteration": {"micro_batches", "forward_s", "backward_s", "window_s", "optimizer_s"},
    "forward": {"windows", "bytes_per_window", "slice_bytes", "tiers"},
    "backward": {"windows", "bytes_per_window", "slice_bytes", "tiers"},
    "memory": {"device_bytes_per_rank", "host_bytes_per_node"},
    "expected": {"overhead", "stall_s", "lost_steps", "recovery_s", "goodput"},
}
TIER_KEYS = {"type", "every", "bytes", "write_s", "keep", "survives"}
MEMORY_AUTO = {"type": "memory", "every": "auto"}
BUCKET = {"type": "object", "url": "s3://bucket/run"}
PYTHON_MODEL = {"type": "python", "entry": "models:build"}
COUNTED = [TensorInfo("weight", "F32", (1000, 100)), TensorInfo("bias", "F32", (100,))]


def read_back(plan: Plan) -> Plan:
    return plan_from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False)))


def capacity(plan: Plan) -> int:
    forward, backward = plan.forward, plan.backward
    assert forward.bytes_per_window is not None
    assert backward.bytes_per_window is not None
    return forward.windows * forward.bytes_per_window + backward.windows * backward.bytes_per_window


def test_json_has_the_keys_of_the_contract(make_spec: MakeSpec, laptop: Machine) -> None:
    document = make_plan(make_spec(), laptop).to_json()
    for key, names in CONTRACT.items():
        assert names <= set(document[key]), key
    for kinds in ("lost_steps", "recovery_s"):
        assert set(document["expected"][kinds]) == {"process", "node", "cluster"}
    assert [tier["type"] for tier in document["tiers"]] == ["memory", "disk"]
    assert all(set(tier) >= TIER_KEYS for tier in document["tiers"])


def test_figures_of_the_small_job(make_spec: MakeSpec, laptop: Machine) -> None:
    plan = make_plan(make_spec(), laptop)
    assert plan.model.parameters == 918_656
    assert plan.model.state_bytes == 12 * 918_656 + 4 * 39
    assert plan.model.state_bytes // 2 <= (plan.model.state_bytes_per_rank or 0) <= plan.model.state_bytes // 2 + 2000
    assert plan.iteration.micro_batches == plan.forward.windows == plan.backward.windows == 4
    assert plan.iteration.window_s == pytest.approx(
        4 * ((plan.iteration.forward_s or 0) + (plan.iteration.backward_s or 0))
    )
    assert plan.source == "table"
    assert [tier.survives for tier in plan.tiers] == [("process",), ("process", "node", "cluster")]
    assert plan.expected.stall_s == 0
    assert 0 < (plan.expected.overhead or 0) < 0.02
    assert 0.9 < (plan.expected.goodput or 0) <= 1


small_specs = st.fixed_dictionaries(
    {
        "model": st.builds(
            lambda layers, heads, head, vocab, activation, tied: {
                "type": "gpt", "n_layers": layers, "d_model": heads * head, "n_heads": heads,
                "vocab_size": vocab, "activation": activation, "tie_embeddings": tied,
            },
            st.integers(1, 6), st.integers(1, 8), st.sampled_from([2, 16, 64]), st.integers(1, 5000),
            st.sampled_from(["swiglu", "gelu"]), st.booleans(),
        ),
        "cluster": st.builds(
            lambda nodes, workers, bandwidth, shared, network: {
                "nodes": nodes, "workers_per_node": workers, "hardware": {"network_bandwidth": network},
                "channels": {"storage": {"bandwidth": bandwidth, "shared": shared}},
            },
            st.integers(1, 4), st.integers(1, 8), st.one_of(st.just("auto"), st.floats(1e4, 1e12)),
            st.sampled_from(["auto", True, False]), st.one_of(st.just("auto"), st.floats(1e4, 1e12)),
        ),
        "tiers": st.sampled_from([
            [{"type": "memory"}],
            [{"type": "memory"}, {"type": "disk"}],
            [{"type": "memory"}, {"type": "disk", "every": 3}],
            [MEMORY_AUTO, {"type": "disk"}],
            [MEMORY_AUTO, {"type": "disk", "every": 12}],
            [{"type": "disk"}],
            [],
            [MEMORY_AUTO, {"type": "disk"}, BUCKET],
            [MEMORY_AUTO, {"type": "disk", "keep_every": 12}, BUCKET | {"every": 24, "when_slow": "skip"}],
            [MEMORY_AUTO, {"type": "disk", "every": 3, "when_slow": "skip"}, BUCKET | {"keep_every": 9}],
            [MEMORY_AUTO, BUCKET],
            [BUCKET | {"every": 7}],
        ]),
        "checkpoint": st.builds(lambda part: {"max_overhead": part}, st.floats(0, 1)),
    }
)  # fmt: skip
ROUNDED = 1 + 1e-12
machines = st.builds(
    Machine,
    cpu_cores=st.integers(1, 128),
    host_memory_bytes=st.just(2**34),
    shm_free_bytes=st.one_of(st.none(), st.just(2**30)),
    accelerator=st.sampled_from(["cpu", "a100", "h100", "h200", "b200", "mi300x"]),
)
times = st.one_of(
    st.none(), st.builds(Measured, *[st.floats(1e-6, 100)] * 3, st.one_of(st.none(), st.floats(1e3, 1e12)))
)


@settings(max_examples=200, deadline=None)
@given(small_specs, machines, times, st.integers(1, 9), st.sampled_from(["adamw", "sgd"]))
def test_any_plan_holds_its_promises(
    changes: dict[str, Any], machine: Machine, measured: Measured | None, n: int, optimizer: str
) -> None:
    world = changes["cluster"]["nodes"] * changes["cluster"]["workers_per_node"]
    training = {
        "global_batch_size": n * 2 * world,
        "micro_batch_size": 2,
        "optimizer": {"name": optimizer, "lr": 0.1},
    }
    plan = make_plan(tiny(**changes, training=training), machine, measured)
    assert read_back(plan) == plan
    assert plan.iteration.micro_batches == n
    if plan.tiers:
        assert capacity(plan) >= (plan.model.state_bytes_per_rank or 0)
    assert all(slower.every % faster.every == 0 for faster, slower in pairwise(plan.tiers))
    assert all(tier.keep_every is None or tier.keep_every % tier.every == 0 for tier in plan.tiers)
    lost = plan.expected.lost_steps
    assert (lost.process or 0) <= (lost.node or 0) * ROUNDED <= (lost.cluster or 0) * ROUNDED**2
    assert 0 <= (plan.expected.goodput or 0) <= 1
    assert (plan.expected.overhead or 0) >= (plan.expected.stall_s or 0) / (plan.iteration.step_s or 1) - 1e-12


def test_a_slower_tier_never_loses_less_than_a_faster_one() -> None:
    """Where a budget of nothing left training 200 steps behind, the disk was said to lose none."""
    cluster = {"nodes": 4, "workers_per_node": 8}
    training = {"global_batch_size": 576, "micro_batch_size": 2, "optimizer": {"name": "adamw", "lr": 0.1}}
    tiers = [MEMORY_AUTO, {"type": "disk"}]
    spec = tiny(cluster=cluster, training=training, tiers=tiers, checkpoint={"max_overhead": 0.0})
    lost = make_plan(spec, Machine(1, 2**34, None, "cpu"), Measured(1.0, 63.0, 1.0, None)).expected.lost_steps
    assert lost.process is not None and lost.node is not None and lost.cluster is not None
    assert 0 < lost.process <= lost.node <= lost.cluster


def test_a_slow_channel_stalls_and_widens_an_auto_interval(make_spec: MakeSpec, laptop: Machine) -> None:
    slow = {"workers_per_node": 2, "channels": {"storage": {"bandwidth": "10MB/s"}}}
    fixed = make_plan(make_spec(cluster=slow), laptop)
    assert (fixed.storage.load or 0) > 1
    constant_s = (fixed.iteration.window_s or 0) + (fixed.iteration.exchange_s or 0)
    assert fixed.expected.stall_s == pytest.approx((fixed.storage.copy_s or 0) - constant_s)
    assert any("max_overhead" in line for line in fixed.warnings)
    auto = make_plan(make_spec(cluster=slow, tiers=[MEMORY_AUTO, {"type": "disk"}]), laptop)
    memory = auto.tier("memory")
    assert memory is not None
    assert 1 < memory.every < 200
    assert (auto.expected.overhead or 1) <= 0.01 * 1.01  # the drain of the tenth checkpoint comes on top


def test_wider_budgets_never_make_intervals_wider(make_spec: MakeSpec, laptop: Machine) -> None:
    slow = {"workers_per_node": 2, "channels": {"storage": {"bandwidth": "10MB/s"}}}
    intervals = []
    for budget in (0.005, 0.01, 0.05, 0.5):
        spec = make_spec(cluster=slow, tiers=[MEMORY_AUTO], checkpoint={"max_overhead": budget})
        intervals.append(make_plan(spec, laptop).tiers[0].every)
    assert intervals == sorted(intervals, reverse=True)


def test_given_intervals_are_kept_and_warned_about(make_spec: MakeSpec, laptop: Machine) -> None:
    tiers = [{"type": "memory", "every": 2}, {"type": "disk", "every": 301}]
    plan = make_plan(make_spec(tiers=tiers), laptop)
    assert [tier.every for tier in plan.tiers] == [2, 301]
    assert any("not a multiple" in line and "snapshots of their own" in line for line in plan.warnings)
    assert any("200 steps only" in line for line in plan.warnings)


def test_a_disk_that_cannot_keep_up_is_waited_for(make_spec: MakeSpec, laptop: Machine) -> None:
    tiers = [{"type": "memory"}, {"type": "disk", "every": 1}]
    plan = make_plan(make_spec(tiers=tiers), laptop, Measured(1e-3, 2e-3, 1e-3))
    assert (plan.expected.stall_s or 0) > 0
    assert any("wait for the disk" in line for line in plan.warnings)


@pytest.mark.parametrize(("limit", "said"), [("1ms", [True, True]), ("50ms", [True, True]), ("1h", [False, False])])
def test_a_stop_that_takes_longer_than_whoever_stops_the_job_may_wait_is_told(
    make_spec: MakeSpec, laptop: Machine, limit: str, said: list[bool]
) -> None:
    tiers = [{"type": "memory"}, {"type": "disk"}, {"type": "object", "url": "s3://bucket/x"}]
    plan = make_plan(make_spec(tiers=tiers, cluster={"shutdown_timeout": limit}), laptop)
    words = ("last step and its write to the disk", "the last step of a stopped run will not be there")
    assert [any(word in line for line in plan.warnings) for word in words] == said


def test_without_tiers_everything_is_lost_and_nothing_is_copied(make_spec: MakeSpec, laptop: Machine) -> None:
    plan = make_plan(make_spec(tiers=[]), laptop)
    assert (plan.forward.tiers, plan.forward.bytes_per_window) == ((), 0)
    assert plan.expected.overhead == 0
    assert plan.expected.lost_steps.process == plan.expected.lost_steps.cluster == 100
    assert plan.memory.slot_bytes_per_node == 0


def test_the_memory_tier_alone_does_not_survive_the_node(make_spec: MakeSpec, laptop: Machine) -> None:
    plan = make_plan(make_spec(tiers=[{"type": "memory"}]), laptop)
    assert (plan.expected.lost_steps.process or 0) < 2
    assert plan.expected.lost_steps.node == 100


def test_a_python_model_is_unknown_until_counted(make_spec: MakeSpec, laptop: Machine) -> None:
    plan = make_plan(make_spec(model=PYTHON_MODEL), laptop)
    assert (plan.model.parameters, plan.model.state_bytes, plan.iteration.step_s) == (None, None, None)
    assert plan.forward.bytes_per_window is None
    assert plan.source == "unknown"
    assert any("--profile" in line for line in plan.assumptions)
    assert [tier.every for tier in plan.tiers] == [1, 20]
    assert read_back(plan) == plan


def test_a_counted_python_model_has_windows_before_it_has_times(make_spec: MakeSpec, laptop: Machine) -> None:
    plan = make_plan(make_spec(model=PYTHON_MODEL), laptop, parameters=COUNTED)
    assert plan.model.parameters == 100_100
    assert capacity(plan) >= (plan.model.state_bytes_per_rank or 0) > 0
    assert plan.iteration.forward_s is None
    seen = Measured(0.1, 0.3, 0.05, channel_bytes_per_s=2**33)
    timed = make_plan(make_spec(model=PYTHON_MODEL), laptop, seen, COUNTED)
    assert timed.source == "measured"
    assert timed.storage.bytes_per_s == 2**33
    assert read_back(timed) == timed


def test_the_spec_s_bandwidth_wins_over_a_measured_one(make_spec: MakeSpec, laptop: Machine) -> None:
    spec = make_spec(cluster={"workers_per_node": 2, "channels": {"storage": {"bandwidth": "1GiB/s"}}})
    assert make_plan(spec, laptop, Measured(0.1, 0.2, 0.1, channel_bytes_per_s=2**33)).storage.bytes_per_s == 2**30


def test_a_run_that_has_timed_its_first_steps_plans_again(make_spec: MakeSpec, laptop: Machine) -> None:
    spec = make_spec()
    seen = Measured(
        0.2, 0.4, 0.05, channel_bytes_per_s=3e9, exchange_s=0.07, disk_bytes_per_s=4e8, object_bytes_per_s=1e8
    )
    plan = make_plan(spec, laptop, seen)
    assert (plan.source, plan.storage.bytes_per_s, plan.iteration.exchange_s) == ("measured", 3e9, 0.07)
    assert plan.tiers[1].write_s == pytest.approx((plan.model.state_bytes or 0) / 4e8 + DISK_COMMIT_S, rel=1e-3)
    assert any("disk" in line and "(measured)" in line for line in plan.assumptions)
    assert make_plan(spec, laptop, seen) == plan


@pytest.mark.parametrize(
    ("nodes", "shared", "held"), [(1, "auto", False), (2, "auto", True), (2, False, False), (1, True, True)]
)
def test_gradients_of_several_nodes_leave_a_gpu_by_the_copy_s_link(
    make_spec: MakeSpec, dgx: Machine, nodes: int, shared: str | bool, held: bool
) -> None:
    cluster = {"nodes": nodes, "workers_per_node": 4, "channels": {"storage": {"shared": shared}}}
    plan = make_plan(make_spec(cluster=cluster, training={"global_batch_size": 64}), dgx)
    assert ((plan.storage.gradients_s or 0) > 0) == held


def test_the_plan_says_why(make_spec: MakeSpec, laptop: Machine) -> None:
    def why(batch: int = 32, **storage: Any) -> str:
        cluster = {"workers_per_node": 2, "channels": {"storage": storage}, "hardware": {"node_bandwidth": "100MB/s"}}
        return " ".join(make_plan(make_spec(cluster=cluster, training={"global_batch_size": batch}), laptop).why)

    assert "75 % of the windows' time" in why()
    assert "before the last backward pass, in which gradients need" in why(8, bandwidth="400MB/s", shared=True)
    assert "full rate; " in why(bandwidth="20MB/s")
    assert "of it fits, and the update waits" in why(bandwidth="10MB/s")
    assert make_plan(make_spec(tiers=[]), laptop).why == ()


@pytest.mark.parametrize("disk", [LEAST_RATE, MOST_RATE])
@pytest.mark.parametrize("flops", [LEAST_RATE, MOST_RATE])
@pytest.mark.parametrize("mtbf", [LEAST_SECONDS, MOST_SECONDS])
@pytest.mark.parametrize("every", ["auto", 1])
def test_the_least_and_the_most_that_a_spec_can_give_make_a_plan(
    make_spec: MakeSpec, laptop: Machine, disk: float, flops: float, mtbf: float, every: str | int
) -> None:
    figures = {"disk_bandwidth": disk, "node_bandwidth": disk, "flops": flops, "memory_bandwidth": flops}
    cluster = {"workers_per_node": 2, "hardware": figures, "mtbf": {"process": mtbf, "node": mtbf}}
    channels = {"storage": {"bandwidth": disk, "shared": True}}
    tiers = [MEMORY_AUTO, {"type": "disk", "every": every}]
    plan = make_plan(make_spec(cluster=cluster | {"channels": channels}, tiers=tiers), laptop)
    assert read_back(plan) == plan
    json.dumps(plan.to_json(), allow_nan=False)


def test_a_batch_too_small_for_the_ranks_is_refused(make_spec: MakeSpec, laptop: Machine) -> None:
    with pytest.raises(ValueError, match="global_batch_size 4 is less than"):
        make_plan(make_spec(training={"global_batch_size": 4}), laptop)


def test_workers_that_share_an_accelerator_are_warned_about(make_spec: MakeSpec, dgx: Machine) -> None:
    plan = make_plan(make_spec(cluster={"workers_per_node": 16}, training={"global_batch_size": 64}), dgx)
    assert any("16 workers per node share 8 accelerators" in line for line in plan.warnings)


def test_ten_trillion_parameters_on_512_ranks(make_spec: MakeSpec, dgx: Machine) -> None:
    spec = make_spec(
        model={
            "type": "gpt", "n_layers": 500, "d_model": 40960, "n_heads": 320, "vocab_size": 128000,
            "activation": "gelu",
        },
        dataset={"type": "text", "path": "corpus", "seq_len": 8192},
        training={"global_batch_size": 8192, "micro_batch_size": 1, "precision": "bf16-mixed"},
        cluster={"nodes": 64, "workers_per_node": 8},
    )  # fmt: skip
    plan = make_plan(spec, dgx)
    assert plan.training.world == 512
    assert plan.model.parameters == pytest.approx(1.0e13, rel=0.02)
    assert plan.model.state_bytes == 12 * (plan.model.parameters or 0) + 4 * 4003
    assert plan.model.state_bytes_per_rank == pytest.approx(plan.model.state_bytes / 512, rel=1e-4)
    assert plan.iteration.micro_batches == 16
    assert capacity(plan) >= (plan.model.state_bytes_per_rank or 0)
    assert (plan.memory.device_fits, plan.memory.slots_fit) == (False, False)
    assert read_back(plan) == plan


@pytest.mark.parametrize("broken", [{}, {"model": {}}, {"model": {"parameters": 1}}, {"tiers": [7]}])
def test_what_is_not_a_plan_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a plan"):
        plan_from_json(broken)


def test_a_plan_with_an_unknown_key_is_refused(make_spec: MakeSpec, laptop: Machine) -> None:
    document = make_plan(make_spec(), laptop).to_json()
    document["iteration"]["coffee_s"] = 1
    with pytest.raises(ValueError, match="coffee_s"):
        plan_from_json(document)


@pytest.mark.parametrize(
    ("device", "accelerator", "said"),
    [
        ("cpu", "h100", True),
        ("cuda", "cpu", True),
        ("cuda", "h100", False),
        ("auto", "h100", False),
        ("cpu", "auto", False),
    ],
)
def test_a_plan_for_another_device_than_the_spec_trains_on_says_so(
    make_spec: MakeSpec, laptop: Machine, device: str, accelerator: str, said: bool
) -> None:
    cluster = {"workers_per_node": 2, "device": device, "accelerator": accelerator}
    warnings = make_plan(make_spec(cluster=cluster), laptop).warnings
    assert any(line.startswith("planned for cluster.accelerator") for line in warnings) == said
