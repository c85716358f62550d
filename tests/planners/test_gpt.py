from __future__ import annotations

import pytest

from dtrain.planners.models import gpt
from dtrain.planners.models.workload import BACKWARD_TO_FORWARD
from dtrain.specs.models import GptModel


def model(**keys: object) -> GptModel:
    return GptModel.model_validate({"type": "gpt", **keys})


LLAMA_7B = model(n_layers=32, d_model=4096, n_heads=32, d_ff=11008, vocab_size=32000)
LLAMA3_8B = model(n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_ff=14336, vocab_size=128256)
LLAMA3_70B = model(n_layers=80, d_model=8192, n_heads=64, n_kv_heads=8, d_ff=28672, vocab_size=128256)


@pytest.mark.parametrize(
    ("shape", "published"),
    [(LLAMA_7B, 6_738_415_616), (LLAMA3_8B, 8_030_261_248), (LLAMA3_70B, 70_553_706_496)],
)
def test_counts_published_models_exactly(shape: GptModel, published: int) -> None:
    assert gpt.parameter_count(gpt.parameters(shape)) == published


def test_names_and_shapes_in_order() -> None:
    grouped = model(n_layers=1, d_model=8, n_heads=4, n_kv_heads=2, d_ff=20, vocab_size=11)
    assert [(t.name, t.shape) for t in gpt.parameters(grouped)] == [
        ("embedding.weight", (11, 8)),
        ("layers.0.attention_norm.weight", (8,)),
        ("layers.0.attention.wq.weight", (8, 8)),
        ("layers.0.attention.wk.weight", (4, 8)),
        ("layers.0.attention.wv.weight", (4, 8)),
        ("layers.0.attention.wo.weight", (8, 8)),
        ("layers.0.mlp_norm.weight", (8,)),
        ("layers.0.mlp.gate.weight", (20, 8)),
        ("layers.0.mlp.up.weight", (20, 8)),
        ("layers.0.mlp.down.weight", (8, 20)),
        ("norm.weight", (8,)),
        ("head.weight", (11, 8)),
    ]


def test_gelu_has_no_gate_and_tied_embeddings_no_head() -> None:
    plain = model(n_layers=2, d_model=8, n_heads=2, activation="gelu", tie_embeddings=True)
    names = [tensor.name for tensor in gpt.parameters(plain)]
    assert "head.weight" not in names
    assert not any("gate" in name for name in names)
    # 256·8 + 2·(2·8 + 4·64 + 2·8·32) + 8
    assert gpt.parameter_count(gpt.parameters(plain)) == 2048 + 2 * (16 + 256 + 512) + 8


def test_forward_flop_by_hand() -> None:
    small = model(n_layers=2, d_model=8, n_heads=2, d_ff=16, vocab_size=10)
    weights = 2 * (4 * 64 + 3 * 8 * 16) + 10 * 8
    per_token = 2 * weights + 2 * (2 * 5 * 8)  # s = 5, causal
    assert gpt.matmul_weights(small) == weights
    assert gpt.forward_flop(small, samples=3, seq_len=5) == 3 * 5 * per_token


def test_a_step_is_about_six_flop_per_parameter_and_token() -> None:
    flop = gpt.forward_flop(LLAMA_7B, 1, 2048) * (1 + BACKWARD_TO_FORWARD)
    assert flop / (6 * 6.74e9 * 2048) == pytest.approx(1.02, abs=0.005)


def test_a_tied_head_multiplies_like_an_untied_one() -> None:
    untied = model(n_layers=1, d_model=8, n_heads=2)
    tied = model(n_layers=1, d_model=8, n_heads=2, tie_embeddings=True)
    assert gpt.forward_flop(tied, 1, 16) == gpt.forward_flop(untied, 1, 16)


def test_activations_match_the_published_count_without_scores() -> None:
    width, layers, tokens = 64, 3, 2 * 16
    gelu = model(n_layers=layers, d_model=width, n_heads=4, activation="gelu", vocab_size=2, dropout=0.1)
    after_layers = tokens * (2 * 2 * width + 2 * (2 + 8))
    assert gpt.activation_bytes(gelu, 2, 16, "bf16-mixed") - after_layers == layers * 34 * tokens * width


def test_activations_grow_with_batch_and_element() -> None:
    one = gpt.activation_bytes(LLAMA_7B, 1, 2048, "bf16-mixed")
    assert gpt.activation_bytes(LLAMA_7B, 4, 2048, "bf16-mixed") == 4 * one
    assert gpt.activation_bytes(LLAMA_7B, 1, 2048, "fp32") > 1.9 * one
