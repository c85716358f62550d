"""Models that a spec only describes: counted against published figures."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.planners.build import MakeSpec

from dtrain.planners.machine import Machine
from dtrain.planners.models import diffusion, encoder
from dtrain.planners.models.gpt import parameter_count
from dtrain.planners.models.workload import sample_tokens, workload
from dtrain.planners.plan import make_plan
from dtrain.planners.sharding.shards import TensorInfo
from dtrain.specs.shapes import DiffusionShape, EncoderShape

BERT_BASE = {"family": "encoder", "n_layers": 12, "d_model": 768, "n_heads": 12, "vocab_size": 30522}
BERT_LARGE = {"family": "encoder", "n_layers": 24, "d_model": 1024, "n_heads": 16, "vocab_size": 30522}
DIT_XL = {"family": "diffusion", "n_layers": 28, "d_model": 1152, "n_heads": 16}
DIT_S = {"family": "diffusion", "n_layers": 12, "d_model": 384, "n_heads": 6}
LLAMA = {"family": "decoder", "n_layers": 32, "d_model": 4096, "n_heads": 32, "d_ff": 11008, "vocab_size": 32000}


@pytest.mark.parametrize(("sizes", "published"), [(BERT_BASE, 109_514_298), (BERT_LARGE, 335_174_458)])
def test_counts_bert_with_its_masked_head_exactly(sizes: dict[str, object], published: int) -> None:
    assert parameter_count(encoder.parameters(EncoderShape.model_validate(sizes))) == published


def test_counts_dit_xl_2_exactly() -> None:
    assert parameter_count(diffusion.parameters(DiffusionShape.model_validate(DIT_XL))) == 675_129_632


@pytest.mark.parametrize(
    ("layers", "width", "millions", "giga"),
    [(12, 384, 33, 6.06), (12, 768, 130, 23.01), (24, 1024, 458, 80.71), (28, 1152, 675, 118.64)],
)
def test_the_diffusion_transformers_of_the_paper(layers: int, width: int, millions: float, giga: float) -> None:
    shape = DiffusionShape(family="diffusion", n_layers=layers, d_model=width, n_heads=width // 64)
    assert parameter_count(diffusion.parameters(shape)) == pytest.approx(1e6 * millions, rel=0.005)
    assert diffusion.forward_flop(shape, 1) == pytest.approx(2e9 * giga, rel=2e-3)  # it counts a product and sum once
    assert diffusion.forward_flop(shape, 3) == 3 * diffusion.forward_flop(shape, 1)


def test_operations_of_an_encoder_by_hand() -> None:
    shape = EncoderShape(family="encoder", n_layers=2, d_model=8, n_heads=2, d_ff=16, vocab_size=10)
    weights = 2 * (4 * 64 + 2 * 8 * 16) + 64 + 10 * 8
    per_token = 2 * weights + 2 * (4 * 5 * 8)  # s = 5, each token sees all
    assert encoder.forward_flop(shape, samples=3, seq_len=5) == 3 * 5 * per_token


def test_activations_of_an_encoder_match_the_published_count_without_scores() -> None:
    shape = EncoderShape(family="encoder", n_layers=3, d_model=64, n_heads=4, vocab_size=2)
    tokens = 2 * 16
    head = tokens * (2 * 4 * 64 + 2 * (2 + 8))
    assert encoder.activation_bytes(shape, 2, 16, "bf16-mixed") - head == 3 * 34 * tokens * 64


def test_activations_of_a_diffusion_transformer_grow_with_batch_and_element() -> None:
    shape = DiffusionShape.model_validate(DIT_S)
    one = diffusion.activation_bytes(shape, 1, "bf16-mixed")
    assert diffusion.activation_bytes(shape, 4, "bf16-mixed") == 4 * one
    assert diffusion.activation_bytes(shape, 1, "fp32") == 2 * one


@pytest.mark.parametrize("sizes", [BERT_BASE | {"seq_len": 128}, DIT_S, LLAMA | {"seq_len": 64}])
def test_a_described_python_model_is_planned_without_its_code(
    make_spec: MakeSpec, laptop: Machine, sizes: dict[str, object]
) -> None:
    spec = make_spec(
        model={"type": "python", "entry": "no_such_module:build", "like": sizes},
        dataset={"type": "python", "entry": "no_such_module:data"},
    )
    plan, work = make_plan(spec, laptop), workload(spec)
    assert work is not None
    assert plan.source == "table"
    assert plan.model.parameters == parameter_count(work.parameters)
    assert plan.model.layers == sizes["n_layers"]
    assert (plan.iteration.backward_s or 0) == pytest.approx(2 * (plan.iteration.forward_s or 0))
    assert plan.forward.bytes_per_window
    assert any("model.like describes" in line for line in plan.assumptions)


def test_what_is_built_is_counted_and_what_is_described_gives_the_times(make_spec: MakeSpec, laptop: Machine) -> None:
    spec = make_spec(model={"type": "python", "entry": "m:f", "like": BERT_BASE})
    counted = make_plan(spec, laptop, parameters=[TensorInfo("weight", "F32", (1000, 100))])
    assert counted.model.parameters == 100_000
    assert counted.iteration.forward_s == make_plan(spec, laptop).iteration.forward_s


def test_a_described_model_s_samples(make_spec: MakeSpec) -> None:
    def tokens(sizes: dict[str, object], dataset: Mapping[str, object]) -> int | None:
        return sample_tokens(make_spec(model={"type": "python", "entry": "m:f", "like": sizes}, dataset=dataset))

    text = {"type": "text", "path": "corpus", "seq_len": 96}
    own = {"type": "python", "entry": "m:f"}
    assert tokens(BERT_BASE, text) == 96
    assert tokens(BERT_BASE | {"seq_len": 128}, text) == 128
    assert tokens(BERT_BASE, own) is None
    assert tokens(DIT_S | {"patch_size": 4}, own) == 64
