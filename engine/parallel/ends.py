"""A tied embedding over a pipeline: the first stage has it as embedding, the last one as head.

Each of the two ranks at the same place of these stages holds a copy. Their gradients are added up before the update, so
that both make the same one (Megatron-LM does so, too: Narayanan et al. 2021, arXiv:2104.04473, section 5). Both have
the embedding's name, so the matrix is stored once, divided among all who hold it, and read by both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from ...planners.sharding.layout import EMBEDDING
from ...planners.sharding.mesh import WITHIN_STAGE, Mesh
from ..models.gpt import GptPart
from ..optim.optimizers import settled

HEAD = "head.weight"


@dataclass(frozen=True)
class Ends:
    """What this rank has to do with it; nothing on the stages between."""

    parameter: nn.Parameter | None
    group: dist.ProcessGroup | None
    """This rank and the one at the other end."""

    @classmethod
    def of(cls, model: GptPart, mesh: Mesh, rank: int) -> Ends:
        """Of a decoder that was cut; makes process groups, so that every rank must call it at the same place."""
        parameter: nn.Parameter | None = None
        mine: dist.ProcessGroup | None = None
        for other in mesh.alike(0, WITHIN_STAGE):
            pair = [other, mesh.at_stage(other, mesh.pp - 1)]
            group = dist.new_group(pair)
            if rank in pair:
                assert model.embedding is not None
                assert isinstance(model.embedding.weight, nn.Parameter)
                parameter, mine = model.embedding.weight, group
        return cls(parameter, mine)

    def add_up(self) -> None:
        """Add the other end's gradient to this one's."""
        if self.parameter is None:
            return
        gradient = settled(self.parameter)
        assert gradient is not None
        if gradient.numel():
            dist.all_reduce(gradient, group=self.group)

    @staticmethod
    def ties() -> dict[str, str]:
        """The head's name in the state → that of the embedding; the same on every rank."""
        return {f"model.{HEAD}": f"model.{EMBEDDING}"}
