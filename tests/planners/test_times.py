from __future__ import annotations

import pytest
from tests.planners.build import MakeSpec

from dtrain.planners import gpt
from dtrain.planners.devices import ACCELERATORS, MODEL_FLOP_UTILISATION, assumptions, rates, with_digest
from dtrain.planners.machine import Machine, Measured
from dtrain.planners.times import exposed_exchange_s, ring_exchange_s, sample_tokens, step_times, update_bytes
from dtrain.specs.models import GptModel


def test_the_table_covers_every_accelerator_of_the_spec() -> None:
    assert set(ACCELERATORS) == {"a100", "h100", "h200", "b200", "mi300x"}
    for name, device in ACCELERATORS.items():
        assert 1.9 < device.bf16_flop_per_s / device.fp32_flop_per_s < 2.1, name
        assert device.source


def test_gpu_passes_run_at_the_assumed_share_of_the_peak(make_spec: MakeSpec, dgx: Machine) -> None:
    large = {"type": "gpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 32000}
    spec = make_spec(model=large, training={"precision": "bf16-mixed"})
    reached = rates(dgx, spec.cluster, "bf16-mixed")
    times = step_times(spec, reached, parameters=10**9, parameter_bytes=4 * 10**9, measured=None)
    assert times is not None
    assert isinstance(spec.model, GptModel)
    flop = gpt.forward_flop(spec.model, 4, 128)
    assert times.forward_s == pytest.approx(flop / (MODEL_FLOP_UTILISATION * 989.4e12))
    assert times.backward_s == pytest.approx(2 * times.forward_s)


def test_a_small_model_on_a_gpu_is_bound_by_launches(make_spec: MakeSpec, dgx: Machine) -> None:
    spec = make_spec()
    times = step_times(spec, rates(dgx, spec.cluster, "fp32"), 10**6, 4 * 10**6, None)
    assert times is not None
    assert times.forward_s == pytest.approx(4 * 2e-4)


def test_cpu_cores_are_shared_by_the_workers(make_spec: MakeSpec, laptop: Machine) -> None:
    two, one = make_spec().cluster, make_spec(cluster={"workers_per_node": 1}).cluster
    assert rates(laptop, one, "fp32").flop_per_s == 2 * rates(laptop, two, "fp32").flop_per_s


def test_measured_times_replace_the_table(make_spec: MakeSpec, laptop: Machine) -> None:
    spec = make_spec()
    times = step_times(spec, rates(laptop, spec.cluster, "fp32"), 10, 40, Measured(0.5, 1.5, 0.25))
    assert times is not None
    assert (times.forward_s, times.backward_s, times.optimizer_s) == (0.5, 1.5, 0.25)


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


def test_only_the_exchange_beyond_the_backward_pass_counts(make_spec: MakeSpec, laptop: Machine) -> None:
    reached = rates(laptop, make_spec().cluster, "fp32")
    whole_s = ring_exchange_s(10**9, 2, reached.exchange_bytes_per_s)
    assert exposed_exchange_s(10**9, 2, reached, backward_s=0.1) == pytest.approx(whole_s - 0.1)
    assert exposed_exchange_s(10**9, 2, reached, backward_s=10.0) == 0


def test_several_nodes_exchange_over_the_network(make_spec: MakeSpec, dgx: Machine) -> None:
    one = rates(dgx, make_spec(cluster={"workers_per_node": 4}).cluster, "fp32")
    many = rates(dgx, make_spec(cluster={"nodes": 4, "workers_per_node": 1}).cluster, "fp32")
    assert many.exchange_bytes_per_s < one.exchange_bytes_per_s


def test_copy_and_digest_follow_each_other() -> None:
    assert with_digest(16 * 2**30) == pytest.approx(8 * 2**30)


@pytest.mark.parametrize(("kwargs", "tokens"), [({"seq_len": 64}, 64), ({}, None), ({"seq_len": True}, None)])
def test_tokens_of_a_python_dataset(make_spec: MakeSpec, kwargs: dict[str, object], tokens: int | None) -> None:
    spec = make_spec(dataset={"type": "python", "entry": "data:build", "kwargs": kwargs})
    assert sample_tokens(spec) == tokens


def test_assumptions_name_only_what_is_used(make_spec: MakeSpec, dgx: Machine) -> None:
    spec = make_spec()
    lines = assumptions(spec, dgx, by_table=True, measured_copy=False)
    assert any("H100" in line for line in lines)
    assert any("storage channel" in line for line in lines)
    assert assumptions(make_spec(tiers=[]), dgx, by_table=False, measured_copy=False) == []
