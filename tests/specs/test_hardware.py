"""Figures of the hardware and descriptions of models: what the plan is told, and what is refused."""

from __future__ import annotations

import pytest
from tests.specs.build import Desk, changed

from dtrain.specs.load import spec_from_json, spec_to_json
from dtrain.specs.models import Hardware
from dtrain.specs.shapes import DiffusionShape, EncoderShape

CLUSTER = "cluster: {nodes: 2, workers_per_node: 2, device: cpu}"
MODEL = "model: {type: gpt, n_layers: 2, d_model: 64, n_heads: 4}"


def hardware(figures: str) -> str:
    return changed((CLUSTER, f"cluster: {{nodes: 2, workers_per_node: 2, device: cpu, hardware: {{{figures}}}}}"))


def like(sizes: str) -> str:
    return changed((MODEL, f"model: {{type: python, entry: 'm:f', like: {{{sizes}}}}}"))


def test_every_figure_is_read_in_its_unit_and_stored(desk: Desk) -> None:
    spec = desk.load(
        hardware(
            "flops: 400TFLOP/s, memory_bandwidth: 3TB/s, node_bandwidth: 450GB/s, network_bandwidth: 400Gbit/s, "
            "disk_bandwidth: 5GB/s, object_bandwidth: 1GB/s, device_memory: 141GB, host_memory: 2TiB, restart_time: 45s"
        )
    )
    assert spec.cluster.hardware == Hardware(
        flops=4e14, memory_bandwidth=3e12, node_bandwidth=4.5e11, network_bandwidth=5e10, disk_bandwidth=5e9,
        object_bandwidth=1e9, device_memory=141 * 10**9, host_memory=2 * 2**40, restart_time=45,
    )  # fmt: skip
    assert spec_from_json(spec_to_json(spec)) == spec
    assert desk.load(hardware("flops: 400e12")).cluster.hardware.flops == 4e14


@pytest.mark.parametrize(
    ("figures", "key", "words"),
    [
        ("flops: 400 TB/s", "cluster.hardware.flops", "400TFLOP/s"),
        ("flops: 0", "cluster.hardware.flops", "above 0"),
        ("disk_bandwidth: 5GB", "cluster.hardware.disk_bandwidth", "10GiB/s"),
        ("tflops: 400", "cluster.hardware.tflops", "flops"),
        ("disk_bandwith: 5GB/s", "cluster.hardware.disk_bandwith", "disk_bandwidth"),
        ("restart_time: soon", "cluster.hardware.restart_time", "30s"),
    ],
)
def test_a_wrong_figure_is_refused_with_its_line_and_a_remedy(desk: Desk, figures: str, key: str, words: str) -> None:
    problem = desk.problem(hardware(figures))
    assert key in str(problem)
    assert words in str(problem)
    assert "job.yaml:" in str(problem)


def test_a_described_model_is_read_by_its_family(desk: Desk) -> None:
    spec = desk.load(like("family: encoder, n_layers: 12, d_model: 768, n_heads: 12, vocab_size: 30522"))
    assert spec.model.type == "python"
    assert spec.model.like == EncoderShape(family="encoder", n_layers=12, d_model=768, n_heads=12, vocab_size=30522)
    image = desk.load(like("family: diffusion, n_layers: 28, d_model: 1152, n_heads: 16, patch_size: 4"))
    assert image.model.type == "python"
    assert isinstance(image.model.like, DiffusionShape)
    assert image.model.like.tokens == 64
    assert spec_from_json(spec_to_json(image)) == image


@pytest.mark.parametrize(
    ("sizes", "key", "words"),
    [
        ("family: rnn, n_layers: 2", "model.like.family", "decoder"),
        ("n_layers: 2, d_model: 8, n_heads: 2, vocab_size: 10", "model.like", "family: encoder"),
        ("family: encoder, n_layers: 2, d_model: 8, n_heads: 2", "model.like", "vocab_size"),
        ("family: encoder, n_layers: 2, d_model: 9, n_heads: 2, vocab_size: 10", "model.like.d_model", "d_model 8"),
        ("family: decoder, n_layers: 2, d_model: 6, n_heads: 2, vocab_size: 10", "model.like.d_model", "odd"),
        ("family: decoder, n_layers: 2, d_model: 16, n_heads: 4, n_kv_heads: 3, vocab_size: 9", "n_kv_heads", "1, 2"),
        ("family: diffusion, n_layers: 2, d_model: 8, n_heads: 2, input_size: 33", "input_size", "32 or 34"),
        (
            "family: encoder, n_layers: 2, hidden_size: 8, d_model: 8, n_heads: 2, vocab_size: 9",
            "hidden_size",
            "d_model",
        ),
    ],
)
def test_a_wrong_description_is_refused_with_a_remedy(desk: Desk, sizes: str, key: str, words: str) -> None:
    problem = desk.problem(like(sizes))
    assert key in str(problem)
    assert words in str(problem)


def test_the_built_in_model_needs_no_description(desk: Desk) -> None:
    problem = desk.problem(changed((MODEL, MODEL.replace("}", ", like: {family: encoder}}"))))
    assert "model.like" in str(problem)
