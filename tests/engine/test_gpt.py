"""The built-in decoder: its tensors are the planner's, and it computes what a causal decoder should."""

import math
from typing import Literal

import pytest
import torch
from tests.engine.build import gpt
from torch import Tensor

from dtrain.engine.models.gpt import Gpt, rotate
from dtrain.engine.optim.masters import lower
from dtrain.engine.optim.optimizers import build_optimizer
from dtrain.engine.profile import parameters_of
from dtrain.engine.snapshot.state import TrainState, infos
from dtrain.planners.models.gpt import parameters
from dtrain.planners.models.workload import Workload
from dtrain.planners.sharding.state import state_tensors
from dtrain.specs.models import AdamW, GptModel, Sgd, Spec, Training

SPECS = {
    "default": gpt(),
    "one layer, one head": gpt(n_layers=1, n_heads=1),
    "grouped": gpt(n_kv_heads=2),
    "one key head": gpt(n_kv_heads=1),
    "gelu": gpt(activation="gelu"),
    "gelu of its own width": gpt(activation="gelu", d_ff=17),
    "swiglu of its own width": gpt(d_ff=13),
    "tied": gpt(tie_embeddings=True),
    "tied gelu grouped": gpt(tie_embeddings=True, activation="gelu", n_kv_heads=2, n_layers=3),
    "one token": gpt(vocab_size=1),
    "wide": gpt(d_model=96, n_heads=6, n_kv_heads=3, vocab_size=300),
    "dropout": gpt(dropout=0.5),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def tokens(spec: GptModel, length: int = 12, batch: int = 3) -> Tensor:
    return torch.randint(spec.vocab_size, (batch, length))


@every_spec
def test_the_planner_knows_every_parameter_in_order(spec: GptModel) -> None:
    model = Gpt(spec)
    assert infos(dict(model.named_parameters())) == parameters(spec)
    assert list(model.named_buffers()) == []


@every_spec
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize(
    "optimizer",
    [AdamW(name="adamw", lr=1), Sgd(name="sgd", lr=1), Sgd(name="sgd", lr=1, momentum=0.5)],
    ids=["adamw", "sgd", "momentum"],
)
def test_the_planner_knows_the_whole_state_to_the_byte(
    spec: GptModel, optimizer: AdamW | Sgd, ema: float | None, precision: Literal["fp32", "bf16"]
) -> None:
    training = Training(
        global_batch_size=1, micro_batch_size=1, optimizer=optimizer, precision=precision, ema_decay=ema
    )
    model = Gpt(spec)
    if precision == "bf16":
        lower(model)
    optimized = build_optimizer(model, optimizer, ema=ema is not None, masters=precision == "bf16")
    live = infos(TrainState(model, optimized).constant())
    planned = state_tensors(Workload(spec, 1, 8, precision).parameters, training)
    assert sorted(live, key=lambda t: t.name) == sorted(planned, key=lambda t: t.name)


def test_parameters_are_counted_without_memory_for_them() -> None:
    huge = gpt(n_layers=2, d_model=65536, n_heads=64, vocab_size=10**6)
    spec = Spec.model_validate(
        {
            "output_dir": "x",
            "max_steps": 1,
            "model": huge.model_dump(),
            "dataset": {"type": "text", "path": "python:stdlib", "seq_len": 8},
            "training": {"global_batch_size": 1, "micro_batch_size": 1, "optimizer": {"name": "adamw", "lr": 1.0}},
        }
    )
    assert parameters_of(spec) == parameters(huge)


@every_spec
def test_the_first_loss_is_that_of_guessing(spec: GptModel) -> None:
    model = Gpt(spec).eval()
    loss = model(tokens(spec, length=33, batch=8)).detach()
    assert loss.dim() == 0
    assert float(loss) == pytest.approx(math.log(spec.vocab_size), abs=0.05)


@every_spec
def test_a_later_token_changes_no_earlier_logits(spec: GptModel) -> None:
    model = Gpt(spec).eval()
    first = tokens(spec)
    kept = model.logits(first)
    assert kept.shape == (3, 12, spec.vocab_size)
    for position in (1, 6, 11):
        other = first.clone()
        other[:, position] = (other[:, position] + 1) % spec.vocab_size
        changed = model.logits(other)
        assert torch.equal(changed[:, :position], kept[:, :position])
        if spec.vocab_size > 1:
            assert not torch.allclose(changed[:, position:], kept[:, position:])


def test_earlier_tokens_reach_the_last_logits() -> None:
    model = Gpt(gpt()).eval()
    first = tokens(model.spec)
    other = first.clone()
    other[:, 0] = (other[:, 0] + 1) % 64
    assert not torch.equal(model.logits(first)[:, -1], model.logits(other)[:, -1])


def test_the_order_of_earlier_tokens_matters() -> None:
    """Attention alone sees a set; the rotary positions make it a sequence."""
    model = Gpt(gpt(n_layers=1)).eval()
    first = torch.tensor([[1, 2, 3, 4]])
    other = torch.tensor([[2, 1, 3, 4]])
    assert not torch.allclose(model.logits(first)[:, -1], model.logits(other)[:, -1], atol=1e-6)


@pytest.mark.parametrize("theta", [100.0, 10_000.0])
def test_rotary_positions_are_relative(theta: float) -> None:
    """The product of a turned query and a turned key depends on their distance alone."""
    model = Gpt(gpt(rope_theta=theta))
    cos, sin = model._positions(20, torch.device("cpu"))
    query, key = torch.randn(8), torch.randn(8)
    turned = [rotate(x.expand(1, 1, 20, 8), cos, sin)[0, 0] for x in (query, key)]
    products = turned[0] @ turned[1].T
    for distance in range(-19, 20):
        diagonal = torch.diagonal(products, distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand(len(diagonal)), atol=1e-4, rtol=1e-4)
    assert float(products[0].std()) > 0.01, "and it does depend on the distance"
    torch.testing.assert_close(turned[0].norm(dim=-1), query.norm().expand(20))
    torch.testing.assert_close(turned[0][0], query)


def test_the_base_of_the_positions_is_the_specs() -> None:
    near, far = (Gpt(gpt(rope_theta=theta))._positions(4, torch.device("cpu")) for theta in (100.0, 10_000.0))
    frequencies = torch.tensor([100.0 ** (-i / 4) for i in range(4)])
    torch.testing.assert_close(near[0][3], (3 * frequencies).cos())
    assert not torch.allclose(near[0], far[0])


@every_spec
def test_every_parameter_gets_a_gradient(spec: GptModel) -> None:
    model = Gpt(spec).eval()
    model(tokens(spec)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert spec.vocab_size == 1 or parameter.grad.abs().max() > 0, name


def test_a_tied_head_is_the_embedding() -> None:
    tied, apart = Gpt(gpt(tie_embeddings=True)), Gpt(gpt())
    assert tied.head.weight is tied.embedding.weight
    assert apart.head.weight is not apart.embedding.weight


def test_the_loss_is_that_of_the_next_token() -> None:
    model = Gpt(gpt()).eval()
    drawn = tokens(model.spec, length=5, batch=2)
    chances = model.logits(drawn[:, :-1]).log_softmax(dim=-1)
    expected = -sum(chances[b, t, drawn[b, t + 1]] for b in range(2) for t in range(4)) / 8
    torch.testing.assert_close(model(drawn), expected)


@every_spec
def test_mixed_precision_stays_finite_and_near(spec: GptModel) -> None:
    model = Gpt(spec).eval()
    drawn = tokens(spec)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(drawn)
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(model(drawn).detach()), abs=0.03)
    assert all(
        p.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None
    )


def test_without_dropout_training_is_a_function_of_the_input() -> None:
    model = Gpt(gpt()).train()
    drawn = tokens(model.spec)
    before = torch.get_rng_state()
    assert torch.equal(model(drawn), model(drawn))
    assert torch.equal(torch.get_rng_state(), before), "nothing was drawn"


def test_dropout_draws_in_training_only() -> None:
    model = Gpt(gpt(dropout=0.3))
    drawn = tokens(model.spec)
    assert not torch.equal(model.train()(drawn), model(drawn))
    assert torch.equal(model.eval()(drawn), model(drawn))


def test_the_same_seed_gives_the_same_weights() -> None:
    made = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        made.append(torch.cat([p.flatten() for p in Gpt(gpt()).parameters()]))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_what_writes_into_the_residual_stream_starts_smaller() -> None:
    model = Gpt(gpt(n_layers=8, d_model=64))
    for layer in model.layers.values():
        for weight in (layer.attention.wo.weight, layer.mlp.down.weight):
            assert float(weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.1)
        assert float(layer.attention.wq.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_it_learns() -> None:
    """Text that repeats itself must be predicted soon."""
    model = Gpt(gpt(d_model=64))
    optimizer = build_optimizer(model, AdamW(name="adamw", lr=3e-3))
    line = torch.arange(40).remainder(8).expand(4, 40)
    for _ in range(30):
        loss = model(line)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss.detach()) < 0.1
