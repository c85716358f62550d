"""A model of thousands of small tensors, for `memory_tier --spec tests/benchmarks/many.yaml`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Many(nn.Module):
    """`count` vectors of `width` numbers, beside two layers that take the time of a step."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(width) * 0.1) for _ in range(count))
        self.layers = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256))

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.layers(x).square().mean() + torch.cat(list(self.vectors)).square().mean()
        return mean


class Waves:
    """Sample i is a wave of its own."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        return torch.sin(torch.arange(256.0) * (index + 1))
