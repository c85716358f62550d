"""Where every part of the state lies under each strategy, and what that does to times and memory."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planners.build import MakeSpec, tiny

from dtrain.planners.devices import rates, with_items
from dtrain.planners.known import LEAST_OF_LINK
from dtrain.planners.machine import Machine, Measured
from dtrain.planners.models.activations import in_flight
from dtrain.planners.models.workload import workload
from dtrain.planners.plan import make_plan
from dtrain.planners.sharding.layers import layers_of_stages
from dtrain.planners.sharding.layout import FEW_RANKS, largest_shard, layout_of
from dtrain.planners.sharding.mesh import DIMS, Mesh
from dtrain.planners.sharding.shards import own, shard_bytes
from dtrain.planners.sharding.state import state_tensors
from dtrain.planners.sizes import count_sizes
from dtrain.planners.traffic import Link, link
from dtrain.specs.models import Spec
from dtrain.tiers.format.boxes import tile

DEGREES = st.fixed_dictionaries(
    {
        "dp_replicate": st.integers(1, 3),
        "dp_shard": st.integers(1, 4),
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([1, 2, 3]),
    }
)


def spread(make_spec: MakeSpec, degrees: dict[str, Any], **further: Any) -> Spec:
    world = degrees["dp_replicate"] * degrees["dp_shard"] * degrees["tp"] * degrees["pp"]
    model = {"type": "gpt", "n_layers": 6, "d_model": 40, "n_heads": 4, "vocab_size": 260, **further.pop("model", {})}
    batch = 4 * degrees["dp_replicate"] * degrees["dp_shard"] * degrees["pp"]
    return make_spec(
        model=model,
        strategy=degrees,
        cluster={"workers_per_node": world},
        training={"global_batch_size": batch, "micro_batch_size": 4},
        **further,
    )


@given(degrees=DEGREES)
@settings(max_examples=60, deadline=None)
def test_the_pieces_of_all_ranks_make_up_every_tensor_once(degrees: dict[str, Any]) -> None:
    spec = spread(tiny, degrees)
    work = workload(spec)
    assert work is not None
    layout = layout_of(spec, work.parameters)
    boxes: dict[str, list[Any]] = {}
    for rank in range(layout.mesh.world):
        for piece in own(layout.held(rank), rank):
            boxes.setdefault(piece.tensor.name, []).append((piece.offset, piece.shape))
    tensors = state_tensors(work.parameters, spec.training)
    assert boxes.keys() == {tensor.name for tensor in tensors}
    for tensor in tensors:
        if tensor.shape:
            assert tile(tensor.shape, boxes[tensor.name]), tensor.name
        else:
            assert boxes[tensor.name] == [((), ())]
    shards = [shard_bytes(layout.shard(rank)) for rank in range(layout.mesh.world)]
    assert sum(shards) == sum(tensor.nbytes for tensor in tensors)
    first = max(shards[layout.mesh.rank({**dict.fromkeys(DIMS, 0), "pp": pp})] for pp in range(layout.mesh.pp))
    assert max(shards) - first <= 4 * 4 * 260, "of many ranks only the first of each stage is looked at"
    assert shard_bytes(largest_shard(layout)) == (max(shards) if layout.mesh.world <= FEW_RANKS else first)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_rank_s_place_and_back(pp: int, replicas: int, shard: int, tp: int) -> None:
    mesh = Mesh(pp, replicas, shard, tp)
    seen = set()
    for rank in range(mesh.world):
        place = mesh.place(rank)
        assert mesh.rank(place) == rank
        seen.add((place["pp"], place["tp"], mesh.data_rank(rank)))
        assert rank in mesh.alike(rank, DIMS[1:])
        assert len(mesh.alike(rank, ("tp",))) == tp
    assert len(seen) == mesh.world


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_layer_stands_in_one_stage_and_stages_are_even(layers: int, stages: int) -> None:
    ranges = layers_of_stages(layers, stages)
    assert [layer for stage in ranges for layer in stage] == list(range(layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def plan(spec: Spec, machine: Machine, measured: Measured | None = None) -> Any:
    return make_plan(spec, machine, measured)


ONE = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1}


def test_each_strategy_divides_what_it_divides(make_spec: MakeSpec, dgx: Machine) -> None:
    alone = plan(spread(make_spec, ONE), dgx).memory.parts
    for key in ("dp_shard", "tp", "pp"):
        parts = plan(spread(make_spec, {**ONE, key: 2}), dgx).memory.parts
        assert parts.weights_bytes < 0.7 * alone.weights_bytes, key
        assert parts.optimizer_bytes < 0.7 * alone.optimizer_bytes, key
    kept = plan(spread(make_spec, {**ONE, "dp_replicate": 2}), dgx).memory.parts
    assert kept.weights_bytes == alone.weights_bytes


def test_the_casts_of_a_pass_outlive_the_weights_that_they_were_made_of(make_spec: MakeSpec, dgx: Machine) -> None:
    """Autocast keeps the copy of every gathered layer until the backward pass has multiplied with it."""
    model = {"type": "gpt", "n_layers": 6, "d_model": 40, "n_heads": 4, "vocab_size": 260}
    training = {"global_batch_size": 32, "precision": "bf16-mixed"}
    for degrees, part in (({"dp_shard": 8}, 1), ({"dp_shard": 4, "tp": 2}, 2)):
        made = plan(
            make_spec(model=model, strategy=degrees, cluster={"workers_per_node": 8}, training=training),
            dgx,
        )
        assert made.memory.parts.casts_bytes == pytest.approx(2 * made.model.parameters / part, rel=0.05)


def test_recomputing_keeps_less_and_takes_longer(make_spec: MakeSpec, dgx: Machine) -> None:
    large = {"n_layers": 32, "d_model": 4096, "n_heads": 32}
    usual = plan(spread(make_spec, ONE, model=large), dgx)
    again = plan(spread(make_spec, {**ONE, "activation_checkpointing": "full"}, model=large), dgx)
    assert again.memory.parts.activations_bytes < usual.memory.parts.activations_bytes / 4
    assert again.iteration.backward_s == pytest.approx(1.5 * usual.iteration.backward_s)


def test_a_pipeline_has_a_bubble_and_a_window_per_pass_of_each_stage(make_spec: MakeSpec, dgx: Machine) -> None:
    large = {"n_layers": 32, "d_model": 4096, "n_heads": 32}
    spec = spread(make_spec, {**ONE, "pp": 2}, model=large)
    made = plan(spec, dgx)
    times = made.iteration
    assert times.bubble_s == pytest.approx(times.forward_s + times.backward_s)
    assert made.forward.windows == made.backward.windows == spec.micro_batches
    interleaved = plan(spread(make_spec, {**ONE, "pp": 2, "pp_schedule": "interleaved-1f1b"}, model=large), dgx)
    assert interleaved.forward.windows == 2 * spec.micro_batches
    assert interleaved.iteration.bubble_s < 0.6 * times.bubble_s
    for each in (made, interleaved):
        stored = each.forward.windows * (each.forward.bytes_per_window + each.backward.bytes_per_window)
        assert stored >= each.model.state_bytes_per_rank


@pytest.mark.parametrize(("schedule", "first"), [("1f1b", 2), ("gpipe", 8), ("interleaved-1f1b", 5)])
def test_passes_in_flight(make_spec: MakeSpec, schedule: str, first: int) -> None:
    spec = spread(make_spec, {**ONE, "pp": 2, "pp_schedule": schedule})
    spec = spec.model_copy(
        update={"training": spec.training.model_copy(update={"global_batch_size": 8 * spec.training.micro_batch_size})}
    )
    assert in_flight(spec, 0) == first


def test_the_plan_names_the_strategy(make_spec: MakeSpec, dgx: Machine) -> None:
    made = plan(spread(make_spec, {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "pp": 2}), dgx)
    assert made.training.strategy == "dp_replicate 2 x dp_shard 2 x tp 2 x pp 2"
    assert plan(spread(make_spec, {**ONE, "tp": 2}), dgx).training.strategy == "tp 2"


def test_ten_trillion_parameters_over_sixteen_thousand_accelerators_at_once(make_spec: MakeSpec, dgx: Machine) -> None:
    """A generous limit: what is meant is that nothing is counted rank by rank."""
    spec = make_spec(
        model={"type": "gpt", "n_layers": 512, "d_model": 40960, "n_heads": 320, "vocab_size": 128000},
        strategy={"dp_shard": 64, "tp": 8, "pp": 16},
        cluster={"nodes": 2048, "workers_per_node": 8},
        training={"global_batch_size": 128 * 32, "micro_batch_size": 1},
    )
    started = time.process_time()
    made = plan(spec, dgx)
    assert time.process_time() - started < 5
    assert made.model.parameters > 10**13
    assert made.model.state_bytes_per_rank == pytest.approx(made.model.state_bytes / 16384, rel=0.1)


FIGURES = {"node_bandwidth": "400GB/s", "network_bandwidth": "25GB/s"}


@pytest.mark.parametrize(
    ("degrees", "nodes", "dim", "rate", "crosses"),
    [
        ({"tp": 8, "dp_shard": 4}, 4, "tp", 400e9, False),
        ({"tp": 8, "dp_shard": 4}, 4, "dp_shard", 25e9, True),
        ({"tp": 2, "dp_shard": 16}, 4, "dp_shard", 100e9, True),
        ({"dp_shard": 32}, 4, "dp_shard", 200e9, True),
        ({"dp_shard": 8}, 4, "dp_shard", 400e9, False),
        ({"dp_shard": 8}, 4, "dp_replicate", 25e9, True),
        ({"tp": 16}, 4, "tp", 200e9, True),
        ({"tp": 8, "pp": 4}, 4, "pp", 25e9, True),
        ({"pp": 2}, 1, "pp", 400e9, True),
    ],
)
def test_a_ring_between_nodes_has_the_links_of_its_own_ranks(
    make_spec: MakeSpec, dgx: Machine, degrees: dict[str, int], nodes: int, dim: str, rate: float, crosses: bool
) -> None:
    cluster = {"nodes": nodes, "workers_per_node": 8, "hardware": FIGURES}
    spec = make_spec(strategy=degrees, cluster=cluster, training={"global_batch_size": 512})
    assert link(spec, rates(dgx, spec.cluster, "fp32"), dim) == Link(rate, crosses)


@pytest.mark.parametrize(("shared", "slower"), [(True, True), (False, False)])
def test_what_is_sent_in_every_pass_leaves_the_copy_less_of_a_shared_link(
    make_spec: MakeSpec, dgx: Machine, shared: bool, slower: bool
) -> None:
    cluster = {"nodes": 2, "workers_per_node": 8, "channels": {"storage": {"shared": shared}}}
    large = {"type": "gpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 256}
    batch = {"global_batch_size": 64, "micro_batch_size": 4, "precision": "bf16-mixed"}
    spec = make_spec(model=large, strategy={"dp_shard": 16}, cluster=cluster, training=batch)
    work = workload(spec)
    assert work is not None
    made, sizes = plan(spec, dgx), count_sizes(spec, work.parameters)
    assert sizes is not None
    table = rates(dgx, spec.cluster, "bf16-mixed").copy_bytes_per_s
    alone = with_items(table, sizes.shard_bytes, sizes.shard_items)
    assert (made.storage.bytes_per_s < 0.99 * alone) == slower
    assert made.storage.bytes_per_s >= LEAST_OF_LINK * alone
    assert any("leaves the node by the same link" in line for line in made.why) == slower
    inside = make_spec(model=large, strategy={"dp_shard": 8, "pp": 2}, cluster=cluster, training=batch)
    assert plan(inside, dgx).storage.bytes_per_s > made.storage.bytes_per_s or not slower


def test_the_micro_batches_that_are_asked_for_suit_the_schedule(make_spec: MakeSpec, dgx: Machine) -> None:
    cluster = {"workers_per_node": 4, "channels": {"storage": {"bandwidth": "20MB/s"}}}
    strategy = {"pp": 4, "pp_schedule": "interleaved-1f1b"}
    model = {"type": "gpt", "n_layers": 8, "d_model": 512, "n_heads": 4, "vocab_size": 256}
    training = {"global_batch_size": 16, "micro_batch_size": 4}

    def made(batch: int) -> Any:
        spec = make_spec(
            model=model, strategy=strategy, cluster=cluster, training=training | {"global_batch_size": batch},
            tiers=[{"type": "memory"}],
        )  # fmt: skip
        return plan(spec, dgx)

    advised = next(line for line in made(16).changes if "global_batch_size" in line)
    batch = int(advised.partition("global_batch_size ")[2].rstrip(")"))
    assert batch % 16 == 0
    assert made(batch).expected.overhead <= 0.01 < made(batch // 2).expected.overhead
