"""A small right spec, and ways to make it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.specs.errors import Problem, SpecError
from dtrain.specs.load import load_spec
from dtrain.specs.models import Spec

BASE = """\
name: t
output_dir: runs/t
max_steps: 40
model: {type: gpt, n_layers: 2, d_model: 64, n_heads: 4}
dataset: {type: text, path: "python:stdlib", seq_len: 32}
training:
  global_batch_size: 32
  micro_batch_size: 4
  optimizer:
    name: adamw
    lr: 1e-3
  scheduler: {name: cosine, warmup_steps: 5}
cluster: {nodes: 2, workers_per_node: 2, device: cpu}
tiers:
  - {type: memory, every: 1}
  - {type: disk, every: 5, keep: 3}
"""


def changed(*changes: tuple[str, str]) -> str:
    """Return the right spec with pieces of its text replaced."""
    text = BASE
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} must stand in the spec once"
        text = text.replace(old, new)
    return text


class Desk:
    """Writes specs to one file and reads them back."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "job.yaml"

    def write(self, text: str | bytes) -> Path:
        self.path.write_bytes(text.encode() if isinstance(text, str) else text)
        return self.path

    def load(self, text: str | bytes = BASE, *overrides: str) -> Spec:
        return load_spec(self.write(text), overrides)

    def problems(self, text: str | bytes = BASE, *overrides: str) -> tuple[Problem, ...]:
        with pytest.raises(SpecError) as caught:
            self.load(text, *overrides)
        return caught.value.problems

    def problem(self, text: str | bytes = BASE, *overrides: str) -> Problem:
        """Return the only problem of a spec."""
        problems = self.problems(text, *overrides)
        assert len(problems) == 1, "\n".join(map(str, problems))
        return problems[0]
