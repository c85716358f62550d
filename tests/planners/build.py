"""The spec that the planner's tests vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtrain.specs.models import Spec

MakeSpec = Callable[..., Spec]


def tiny(**changes: Any) -> Spec:
    """The small job of the README, with some top-level keys replaced; `training` is merged."""
    values: dict[str, Any] = {
        "name": "tiny-gpt",
        "output_dir": "runs/tiny-gpt",
        "max_steps": 200,
        "model": {"type": "gpt", "n_layers": 4, "d_model": 128, "n_heads": 4, "vocab_size": 256},
        "dataset": {"type": "text", "path": "python:stdlib", "seq_len": 128},
        "training": {
            "global_batch_size": 32,
            "micro_batch_size": 4,
            "optimizer": {"name": "adamw", "lr": 3e-4},
        },
        "cluster": {"workers_per_node": 2, "device": "cpu"},
    }
    values["training"] |= changes.pop("training", {})
    return Spec.model_validate(values | changes)
