"""A BERT-like encoder in plain torch, for `encoder.yaml`: a model of one's own that `model.like` describes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Encoder(nn.Module):
    """Fills in masked tokens; its output matrix is its embedding's."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.norm(functional.gelu(self.dense(self.layers(x))))
        return functional.cross_entropy((x @ self.tokens.weight.T + self.bias).flatten(0, 1), targets.flatten())


class Masked:
    """Sample i is a row of numbers that follow each other, a seventh of them masked by 0."""

    def __init__(self, seq_len: int, vocabulary: int) -> None:
        self.seq_len, self.vocabulary = seq_len, vocabulary

    def __len__(self) -> int:
        return 65536

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(index, index + self.seq_len) % (self.vocabulary - 1) + 1
        return row.where(row % 7 != 0, 0), row
