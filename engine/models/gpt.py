"""A llama-style decoder: RMSNorm, rotary positions, SwiGLU or GELU, grouped-query attention, no biases.

Sources: RMSNorm arXiv:1910.07467, rotary positions arXiv:2104.09864, SwiGLU arXiv:2002.05202, grouped-query attention
arXiv:2305.13245. Shapes in comments: B batch, T tokens, D d_model, H heads, K key-value heads, h head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...planners.sharding.mesh import ALONE, Mesh
from ...planners.sharding.shards import TensorInfo
from ...specs.models import GptModel
from ..layout import held_of, local_of
from .draw import normal

INIT_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, spec: GptModel) -> None:
        """Make the four projections."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.n_heads, spec.kv_heads, spec.head_dim
        self.dropout = spec.dropout
        self.wq = nn.Linear(spec.d_model, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(spec.d_model, self.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(spec.d_model, self.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.heads * self.head_dim, spec.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, -1, self.head_dim).transpose(1, 2)  # [B, H, T, h]; H/tp of them here
        k = self.wk(x).view(batch, length, -1, self.head_dim).transpose(1, 2)  # [B, K, T, h]
        v = self.wv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        output: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))
        return output


class Mlp(nn.Module):
    """SwiGLU or GELU feed-forward."""

    def __init__(self, spec: GptModel) -> None:
        """Make the projections; SwiGLU has a gate beside them."""
        super().__init__()
        if spec.activation == "swiglu":
            self.gate = nn.Linear(spec.d_model, spec.ff_dim, bias=False)
        self.up = nn.Linear(spec.d_model, spec.ff_dim, bias=False)
        self.down = nn.Linear(spec.ff_dim, spec.d_model, bias=False)
        self.gated = spec.activation == "swiglu"

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        hidden = F.silu(self.gate(x)) * self.up(x) if self.gated else F.gelu(self.up(x))
        output: Tensor = self.down(hidden)
        return output


class Block(nn.Module):
    """One transformer block, normalised before each part."""

    def __init__(self, spec: GptModel) -> None:
        """Make norms, attention and MLP."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.d_model)
        self.attention = Attention(spec)
        self.mlp_norm = nn.RMSNorm(spec.d_model)
        self.mlp = Mlp(spec)
        self.drop = nn.Dropout(spec.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        x = x + self.drop(self.attention(self.attention_norm(x), cos, sin))
        output: Tensor = x + self.drop(self.mlp(self.mlp_norm(x)))
        return output


class GptPart(nn.Module):
    """Some layers of the decoder in a row; the first part has the embedding, the last one final norm and head.

    Its parameters are named as in the whole decoder.
    """

    embedding: nn.Embedding | None
    norm: nn.RMSNorm | None
    head: nn.Linear | None

    def __init__(self, spec: GptModel) -> None:
        """Nothing is in it yet."""
        super().__init__()
        self.spec = spec
        self.register_module("embedding", None)  # their order is that of the parameters
        self.layers = nn.ModuleDict()
        self.register_module("norm", None)
        self.register_module("head", None)
        self.length: int | None = None
        """T, where the input may be cut along the sequence."""
        self._rotary: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def _positions(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, h/2] of every position and frequency."""
        key = (length, device)
        if key not in self._rotary:
            half = self.spec.head_dim // 2
            frequency = self.spec.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
            angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
            self._rotary[key] = (angle.cos(), angle.sin())
        return self._rotary[key]

    def through(self, x: Tensor, length: int) -> Tensor:
        """What the first part gets is token ids [B, T], the last one gives logits [B, T, vocab], else it is [B, T, D].

        `length` is T, of which `x` may hold a part only.
        """
        cos, sin = self._positions(length, x.device)
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        """As `through`."""
        return self.through(x, self.length or x.shape[1])


class Gpt(GptPart):
    """The decoder; `forward` takes token ids [B, T+1] and returns the mean loss of predicting the last T."""

    def __init__(self, spec: GptModel) -> None:
        """Make the layers; weights that have memory are drawn, by a seed from the global generator."""
        super().__init__(spec)
        self.embedding = nn.Embedding(spec.vocab_size, spec.d_model)
        self.layers = nn.ModuleDict({str(number): Block(spec) for number in range(spec.n_layers)})
        self.norm = nn.RMSNorm(spec.d_model)
        self.head = nn.Linear(spec.d_model, spec.vocab_size, bias=False)
        tie(self)
        if not self.embedding.weight.is_meta:
            draw_weights(self, int(torch.randint(2**62, ())))

    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → logits [B, T, vocab]."""
        return self.through(tokens, tokens.shape[1])

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T+1] → mean cross-entropy of the next token."""
        return next_token_loss(self.logits(tokens[:, :-1]), tokens[:, 1:])


def tie(model: Gpt) -> None:
    """Make head and embedding one parameter, where the spec wants that."""
    if model.spec.tie_embeddings and model.head is not None and model.embedding is not None:
        model.head.weight = model.embedding.weight


def draw_weights(part: GptPart, seed: int, mesh: Mesh = ALONE, rank: int = 0) -> None:
    """Give every parameter of a decoder, or of what this rank holds of one, its first value.

    Normal weights; what writes into the residual stream is scaled by its depth (GPT-2, section 2.3); norms begin as 1.
    """
    for name, parameter in part.named_parameters():
        local, shape = local_of(parameter), tuple(parameter.shape)
        with torch.no_grad():
            if len(shape) < 2:
                local.fill_(1.0)
                continue
            box = held_of(TensorInfo(name, "F32", shape), parameter, mesh, rank)
            if box is not None:
                residual = name.endswith(("attention.wo.weight", "mlp.down.weight"))
                std = INIT_STD / math.sqrt(2 * part.spec.n_layers) if residual else INIT_STD
                begin, left = box.offset[0], box.offset[1]
                drawn = normal(name, shape, std, seed, begin, begin + box.shape[0])
                local.copy_(drawn[:, left : left + box.shape[1]])


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits [B, T, vocab] for token ids [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of each head [B, H, T, h] by the position's angles."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)
