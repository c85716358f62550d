"""Tensor parallel plan of the built-in decoder.

Matrices that open a part (queries, keys, values, gate, up) are cut by their outputs, those that close it (output of
attention, down) by their inputs, embedding and head by the vocabulary: Shoeybi et al. 2019, arXiv:1909.08053. With
`sequence`, what lies between the parts is cut along the sequence, and so are its norms: Korthikanti et al. 2022,
arXiv:2205.05198.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ..models.gpt import Gpt, tie


def parallelize(model: Gpt, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Cut the matrices of the whole decoder over the ranks of `mesh`, in place."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        plan["norm"] = SequenceParallel(use_local_output=True)
    gated = model.spec.activation == "swiglu"
    for number in model.layers:
        plan |= {f"layers.{number}.{name}": style for name, style in _layer(between, sequence, gated).items()}
    parallelize_module(model, mesh, plan)
    tie(model)  # both were cut alike, but each for itself


def _layer(between: Shard | Replicate, sequence: bool, gated: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=between),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if gated:
        plan["mlp.gate"] = ColwiseParallel()
    if sequence:
        gathered = (Replicate(), None, None)
        plan |= {
            "attention_norm": SequenceParallel(use_local_output=True),
            "mlp_norm": SequenceParallel(use_local_output=True),
            "attention": PrepareModuleInput(input_layouts=(between, None, None), desired_input_layouts=gathered),
            "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        }
    return plan
