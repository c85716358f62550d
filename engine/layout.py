"""Which box of a tensor a rank holds, and who holds the same one."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..planners.sharding.mesh import WITHIN_STAGE, Mesh
from ..planners.sharding.shards import Held, TensorInfo


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, as the same object at every call."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def cut_dims(tensor: Tensor) -> tuple[str, ...]:
    """The dimensions of the mesh over which a tensor is cut."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(
        name for name, placed in zip(names, tensor.placements, strict=True) if not isinstance(placed, Replicate)
    )


def held_of(info: TensorInfo, tensor: Tensor, mesh: Mesh, rank: int, *, ends: bool = False) -> Held | None:
    """What `rank`, this one, holds of a tensor; None: nothing, for there are fewer rows than ranks.

    `ends`: the first and the last stage of the pipeline both hold the tensor.
    """
    cut = cut_dims(tensor)
    others = tuple(dim for dim in WITHIN_STAGE if dim not in cut)
    holders = tuple((mesh.at_ends if ends else mesh.alike)(rank, others))
    if not isinstance(tensor, DTensor):
        return Held(info, (0,) * len(info.shape), info.shape, holders)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if 0 in shape and 0 not in info.shape:
        return None
    return Held(info, tuple(offset), tuple(shape), holders)
