"""The planner's count of activations beside what torch saves for the backward pass of the same decoder."""

import pytest
import torch
from tests.planners.build import MakeSpec
from torch import Tensor

from dtrain.engine.models.gpt import Gpt
from dtrain.engine.optim.masters import lower
from dtrain.engine.parallel.precision import autocast
from dtrain.planners.models.activations import layer_bytes
from dtrain.specs.models import GptModel

SEQ_LEN, SAMPLES = 64, 2


def saved_bytes(model: GptModel, precision: str) -> int:
    """Bytes of all storages, but those of weights and of their casts, that one forward pass keeps."""
    decoder = Gpt(model)
    if precision == "bf16":
        lower(decoder)
    weights = {tuple(p.shape) for p in decoder.parameters()} | {tuple(p.shape)[::-1] for p in decoder.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        autocast(torch.device("cpu"), precision),
    ):
        decoder(torch.zeros((SAMPLES, SEQ_LEN + 1), dtype=torch.int64))
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16"])
@pytest.mark.parametrize(
    "words", [{}, {"activation": "gelu"}, {"n_kv_heads": 2}, {"dropout": 0.1}, {"dropout": 0.1, "activation": "gelu"}]
)
def test_a_layer_keeps_what_the_plan_counts(make_spec: MakeSpec, precision: str, words: dict[str, object]) -> None:
    spec = make_spec(
        model={"type": "gpt", "d_model": 96, "n_heads": 4, "vocab_size": 64, "n_layers": 1, **words},
        training={"precision": precision},
        dataset={"type": "text", "path": "python:stdlib", "seq_len": SEQ_LEN},
    )
    one = spec.model
    assert isinstance(one, GptModel)
    two = one.model_copy(update={"n_layers": 2})
    per_token = (saved_bytes(two, precision) - saved_bytes(one, precision)) / (SAMPLES * SEQ_LEN)
    planned = layer_bytes(spec, one, SEQ_LEN, on_cpu=True)
    small = 4 * (one.n_heads + 2)  # per token of each head and norm, one number
    assert planned <= per_token <= planned + small
