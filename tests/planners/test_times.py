from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planners.build import MakeSpec

from dtrain.planners.devices import (
    ACCELERATORS,
    COPY_ITEM_S,
    CPU_DIGEST_BYTES_PER_S,
    CPU_FINITE_BYTES_PER_S,
    CPU_MATMUL_SHARE,
    CPU_TRAFFIC_SHARE,
    DISK_BYTES_PER_S,
    DISK_COMMIT_S,
    MODEL_FLOP_UTILISATION,
    OBJECT_BYTES_PER_S,
    OBJECT_COMMIT_S,
    assumptions,
    rates,
    with_digest,
    with_items,
)
from dtrain.planners.machine import Machine, Measured
from dtrain.planners.models import gpt
from dtrain.planners.models.workload import sample_tokens, workload
from dtrain.planners.plan import make_plan
from dtrain.planners.sharding.shards import TensorInfo
from dtrain.planners.sizes import Sizes, count_sizes
from dtrain.planners.times import exposed_exchange_s, ring_exchange_s, step_times, update_bytes
from dtrain.planners.traffic import traffic
from dtrain.specs.models import GptModel, Spec


def sizes_of(spec: Spec) -> Sizes | None:
    work = workload(spec)
    return count_sizes(spec, None if work is None else work.parameters)


def test_the_table_covers_every_accelerator_of_the_spec() -> None:
    assert set(ACCELERATORS) == {"a100", "h100", "h200", "b200", "mi300x"}
    for name, device in ACCELERATORS.items():
        assert 7 < device.bf16_flop_per_s / device.fp32_flop_per_s < 40, name
        assert device.source


def test_gpu_passes_run_at_the_assumed_share_of_the_peak(make_spec: MakeSpec, dgx: Machine) -> None:
    large = {"type": "gpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 32000}
    spec = make_spec(model=large, training={"precision": "bf16-mixed"})
    reached = rates(dgx, spec.cluster, "bf16-mixed")
    times = step_times(spec, reached, workload(spec), sizes_of(spec), None)
    assert times is not None
    assert isinstance(spec.model, GptModel)
    flop = gpt.forward_flop(spec.model, 4, 128)
    assert times.forward_s == pytest.approx(flop / (MODEL_FLOP_UTILISATION * 989.4e12))
    assert times.backward_s == pytest.approx(2 * times.forward_s)


def test_a_small_model_on_a_gpu_is_bound_by_launches(make_spec: MakeSpec, dgx: Machine) -> None:
    spec = make_spec()
    times = step_times(spec, rates(dgx, spec.cluster, "fp32"), workload(spec), sizes_of(spec), None)
    assert times is not None
    assert times.forward_s == pytest.approx(4 * 2e-4)


def test_cpu_cores_are_shared_by_the_workers(make_spec: MakeSpec, laptop: Machine) -> None:
    two, one = make_spec().cluster, make_spec(cluster={"workers_per_node": 1}).cluster
    assert rates(laptop, one, "fp32").flop_per_s == 2 * rates(laptop, two, "fp32").flop_per_s


def test_a_worker_computes_with_as_many_threads_as_it_is_given(make_spec: MakeSpec, laptop: Machine) -> None:
    one = make_spec(cluster={"workers_per_node": 1}).cluster
    asked = replace(laptop, omp_threads=1)
    assert rates(laptop, one, "fp32").flop_per_s == 2 * rates(asked, one, "fp32").flop_per_s
    assert (laptop.spare_cores(1), asked.spare_cores(1), asked.spare_cores(2)) == (0, 1, 0)
    many = replace(laptop, omp_threads=8)
    assert rates(many, one, "fp32") == rates(laptop, one, "fp32"), "it has no more cores than there are"
    odd = replace(laptop, cpu_cores=3)
    assert (odd.threads(2), odd.spare_cores(2)) == (1, 1), "the third core is left over"
    assert "OMP_NUM_THREADS=1" in basis(make_spec(), asked, by_table=True)[0]


def test_measured_times_replace_the_table(make_spec: MakeSpec, laptop: Machine) -> None:
    spec = make_spec()
    times = step_times(
        spec, rates(laptop, spec.cluster, "fp32"), workload(spec), sizes_of(spec), Measured(0.5, 1.5, 0.25)
    )
    assert times is not None
    assert (times.forward_s, times.backward_s, times.optimizer_s) == (0.5, 1.5, 0.25)


def test_what_was_measured_of_the_job_as_it_is_spread_is_neither_divided_nor_added_to(
    make_spec: MakeSpec, laptop: Machine
) -> None:
    spec = make_spec(
        cluster={"workers_per_node": 4}, strategy={"dp_shard": 2, "tp": 2, "activation_checkpointing": "full"}
    )
    seen = Measured(0.5, 1.5, 0.25, exchange_s=0.0, spread=True)
    plan = make_plan(spec, laptop, seen)
    assert (plan.iteration.forward_s, plan.iteration.backward_s, plan.iteration.optimizer_s) == (0.5, 1.5, 0.25)
    assert plan.iteration.exchange_s == 0
    alone = make_plan(spec, laptop, replace(seen, spread=False)).iteration
    assert alone.forward_s is not None
    assert 0.25 < alone.forward_s < 0.5, "half of its operations and what it sends"


@pytest.mark.parametrize(
    ("optimizer", "clip", "words"),
    [
        ({"name": "adamw", "lr": 1e-3}, None, 7),
        ({"name": "adamw", "lr": 1e-3}, 1.0, 10),
        ({"name": "sgd", "lr": 1e-3}, None, 3),
        ({"name": "sgd", "lr": 1e-3, "momentum": 0.9}, None, 5),
    ],
)
def test_memory_traffic_of_the_update(
    make_spec: MakeSpec, optimizer: dict[str, object], clip: float | None, words: int
) -> None:
    spec = make_spec(training={"optimizer": optimizer, "max_grad_norm": clip})
    assert update_bytes(spec, 1000) == 4 * words * 1000


def test_ring_exchange() -> None:
    assert ring_exchange_s(100, 1, 10.0) == 0
    assert ring_exchange_s(100, 4, 10.0) == pytest.approx(15.0)


def test_only_the_exchange_beyond_the_backward_pass_counts(make_spec: MakeSpec, dgx: Machine) -> None:
    reached = rates(dgx, make_spec().cluster, "fp32")
    whole_s = ring_exchange_s(10**12, 2, reached.exchange_bytes_per_s)
    assert exposed_exchange_s(10**12, 2, reached, backward_s=0.1) == pytest.approx(whole_s - 0.1)
    assert exposed_exchange_s(10**12, 2, reached, backward_s=10.0) == 0


def test_processors_that_add_gradients_compute_nothing_else(make_spec: MakeSpec, laptop: Machine) -> None:
    cluster = make_spec(cluster={"workers_per_node": 2, "hardware": {"node_bandwidth": "1GB/s"}}).cluster
    assert exposed_exchange_s(10**9, 2, rates(laptop, cluster, "fp32"), backward_s=10.0) == pytest.approx(1.0)


def test_the_workers_of_a_node_carry_the_ring_between_nodes_together(make_spec: MakeSpec, dgx: Machine) -> None:
    figures = {"node_bandwidth": "300GB/s", "network_bandwidth": "25GB/s"}

    def rate(nodes: int, workers: int) -> float:
        cluster = {"nodes": nodes, "workers_per_node": workers, "hardware": figures}
        return rates(dgx, make_spec(cluster=cluster).cluster, "fp32").exchange_bytes_per_s

    assert (rate(1, 8), rate(4, 1), rate(4, 8), rate(2, 16)) == (300e9, 25e9, 200e9, 300e9)


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16-mixed", 4), ("bf16", 2)])
def test_a_tied_embedding_over_a_pipeline_is_summed_by_its_two_ends_once_per_step(
    make_spec: MakeSpec, dgx: Machine, precision: str, width: int
) -> None:
    def step_s(*, tied: bool, **strategy: int) -> float:
        model = {"type": "gpt", "n_layers": 4, "d_model": 64, "n_heads": 4, "vocab_size": 1024, "tie_embeddings": tied}
        cluster = {"workers_per_node": 8, "hardware": {"node_bandwidth": "1GB/s"}}
        spec = make_spec(model=model, strategy=strategy, cluster=cluster, training={"precision": precision})
        shared = make_spec(model={**model, "tie_embeddings": True}, training={"precision": precision})
        return traffic(spec, rates(dgx, spec.cluster, precision), workload(spec), sizes_of(shared)).step_s

    for strategy in ({"pp": 2, "tp": 2, "dp_shard": 2}, {"pp": 4, "tp": 2}, {"pp": 2, "dp_shard": 2}, {"pp": 4}):
        cut = strategy.get("tp", 1) * strategy.get("dp_shard", 1)
        difference = step_s(tied=True, **strategy) - step_s(tied=False, **strategy)
        assert difference == pytest.approx(1024 * 64 * width / cut / 1e9)
    assert step_s(tied=True, tp=2) == step_s(tied=False, tp=2)


def test_figures_of_the_spec_win_over_measured_ones_and_those_over_the_table(
    make_spec: MakeSpec, laptop: Machine
) -> None:
    measured = Measured(0.1, 0.2, 0.1, disk_bytes_per_s=5e8, object_bytes_per_s=6e7)
    given = make_spec(cluster={"hardware": {"disk_bandwidth": "2GB/s", "flops": "90GFLOP/s"}}).cluster
    reached = rates(laptop, given, "fp32", measured)
    assert (reached.disk_bytes_per_s, reached.object_bytes_per_s, reached.flop_per_s) == (2e9, 6e7, 90e9)
    plain = rates(laptop, make_spec().cluster, "fp32")
    assert (plain.disk_bytes_per_s, plain.object_bytes_per_s) == (DISK_BYTES_PER_S, OBJECT_BYTES_PER_S)


def test_a_machine_that_was_looked_at_is_not_taken_from_the_table(make_spec: MakeSpec, laptop: Machine) -> None:
    seen = replace(laptop, core_flop_per_s=100e9, core_traffic_bytes_per_s=40e9)
    reached = rates(seen, make_spec().cluster, "fp32")
    assert (reached.flop_per_s, reached.update_bytes_per_s) == (CPU_MATMUL_SHARE * 100e9, CPU_TRAFFIC_SHARE * 40e9)
    assert any("just now" in line for line in basis(make_spec(), seen, by_table=True))


def test_copy_digest_and_look_follow_each_other() -> None:
    assert 1 / with_digest(8e9) == pytest.approx(1 / 8e9 + 1 / CPU_DIGEST_BYTES_PER_S + 1 / CPU_FINITE_BYTES_PER_S)


@pytest.mark.parametrize(("kwargs", "tokens"), [({"seq_len": 64}, 64), ({}, None), ({"seq_len": True}, None)])
def test_tokens_of_a_python_dataset(make_spec: MakeSpec, kwargs: dict[str, object], tokens: int | None) -> None:
    spec = make_spec(dataset={"type": "python", "entry": "data:build", "kwargs": kwargs})
    assert sample_tokens(spec) == tokens


def basis(spec: Spec, machine: Machine, *, by_table: bool) -> list[str]:
    reached = rates(machine, spec.cluster, spec.training.precision)
    return assumptions(spec, machine, by_table, None, reached, reached.copy_bytes_per_s)


def test_assumptions_name_only_what_is_used(make_spec: MakeSpec, dgx: Machine) -> None:
    lines = basis(make_spec(), dgx, by_table=True)
    assert any("H100" in line for line in lines)
    assert any("storage channel" in line for line in lines)
    given = basis(make_spec(cluster={"hardware": {"flops": "300e12", "disk_bandwidth": "2GB/s"}}), dgx, by_table=True)
    assert any("300 TFLOP/s per rank (given)" in line for line in given)
    assert any(line.startswith("disk: 1.86 GiB/s") and "(given)" in line for line in given)
    assert basis(make_spec(tiers=[]), dgx, by_table=False) == []


def test_every_piece_of_a_shard_takes_a_copier_time_of_its_own(make_spec: MakeSpec, laptop: Machine) -> None:
    """Of two models of the same size the one of many tensors is copied slower; a step counter is a piece, too."""
    rate, rows, copies = rates(laptop, make_spec().cluster, "fp32").copy_bytes_per_s, 2**20, []
    for tensors in (1, 64):
        counted = [TensorInfo(str(n), "F32", (rows // tensors, 4)) for n in range(tensors)]
        spec = make_spec(
            model={"type": "python", "entry": "a:b"}, tiers=[{"type": "memory"}], cluster={"workers_per_node": 1}
        )
        plan = make_plan(spec, laptop, parameters=counted)
        assert plan.model.state_bytes_per_rank == 3 * 16 * rows + 4 * tensors
        copies.append(plan.model.state_bytes_per_rank / plan.storage.bytes_per_s)
    assert copies[0] == pytest.approx(3 * 16 * rows / rate + 4 * COPY_ITEM_S, rel=1e-6)
    assert copies[1] == pytest.approx(3 * 16 * rows / rate + 4 * 64 * COPY_ITEM_S, rel=1e-5)
    assert with_items(rate, 0, 0) == rate, "a rank may have nothing to store"


def test_a_folder_as_object_store_is_a_disk_and_no_request_away(make_spec: MakeSpec, laptop: Machine) -> None:
    def upload_s(url: str, **hardware: str) -> float:
        tiers = [{"type": "memory"}, {"type": "object", "url": url, "every": 10}]
        plan = make_plan(make_spec(tiers=tiers, cluster={"workers_per_node": 2, "hardware": hardware}), laptop)
        return plan.tiers[1].write_s or 0.0

    state = 2 * (make_plan(make_spec(), laptop).model.state_bytes_per_rank or 0)
    assert upload_s("file:///store") == pytest.approx(2 * state / DISK_BYTES_PER_S + DISK_COMMIT_S)
    assert upload_s("s3://bucket/store") == pytest.approx(2 * state / OBJECT_BYTES_PER_S + OBJECT_COMMIT_S)
    assert upload_s("file:///mount", object_bandwidth="1MB/s") == pytest.approx(2 * state / 1e6 + DISK_COMMIT_S)
