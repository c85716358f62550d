"""Everything that must survive a restart, by canonical name: weights, buffers, moments, random states."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from ...planners.sharding.mesh import ALONE, Mesh
from ...planners.sharding.shards import Held, TensorInfo
from ...tiers.format.digest import digest, state_digest
from ..layout import held_of, local_of
from ..parallel.ends import Ends

DTYPE_TAGS: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

_PYTHON = struct.Struct("<625IBd")
_NUMPY_WORDS = 624
_NUMPY_REST = struct.Struct("<iBd")


class StateError(Exception):
    """The state cannot be stored, or a checkpoint does not fit the model; the message says which tensors."""


class Buffers:
    """The buffers of a model, looked up at every snapshot by the training thread: its modules are walked once.

    They are walked again when one has another child than before. Neither needs a line of Python for each module.
    """

    def __init__(self, model: nn.Module) -> None:
        """Nothing is looked up yet."""
        self.model = model
        self._children: list[dict[str, nn.Module | None]] = []
        """Those of each module, by name, as the modules themselves keep them; nothing but identity is compared."""
        self._walked: list[dict[str, nn.Module | None]] = []
        """The same as they were when the modules were walked."""
        self._prefixes: list[str] = []
        self._buffers: list[dict[str, Tensor | None]] = []
        """Those of each module, as the modules themselves keep them."""

    def find(self) -> dict[str, Tensor]:
        """What `named_buffers` gives."""
        if not self._walked or self._walked != self._children:
            self._walk()
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        if not any(self._buffers):
            return found
        for prefix, buffers in zip(self._prefixes, self._buffers, strict=True):
            for name, buffer in buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    found[f"{prefix}.{name}" if prefix else name] = buffer
        return found

    def _walk(self) -> None:
        named = dict(self.model.named_modules())
        self._prefixes, self._children = list(named), [module._modules for module in named.values()]
        self._buffers, self._walked = [module._buffers for module in named.values()], list(map(dict, self._children))


@dataclass(frozen=True)
class TrainState:
    """The live model and optimizer, seen as named tensors."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    moving: frozenset[str] = frozenset()
    mesh: Mesh = ALONE
    rank: int = 0
    ends: Ends | None = None
    """What both ends of a pipeline hold, where there is such a thing."""

    @cached_property
    def buffers(self) -> Buffers:
        """The model's buffers."""
        return Buffers(self.model)

    def constant(self) -> dict[str, Tensor]:
        """Tensors that change only in the optimizer update: parameters, then what the optimizer keeps of each.

        Without the parameters in `moving`: those that the model itself changes in its forward pass (the teacher of a
        self-supervised model, say).
        """
        named = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        tensors = {name: tensor for name, tensor in named.items() if name not in self.moving}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    raise StateError(f"the optimizer keeps a {type(value).__name__} as {key!r} of {name}, not a tensor")
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def held(self) -> list[Held]:
        """What this rank holds of the constant tensors, in their order; nothing of one that is cut too small for it."""
        found, places = [], self.places()
        for name, tensor in self.constant().items():
            info = TensorInfo(name, tag_of(tensor, name), tuple(tensor.shape))
            shared = self.ends is not None and places[name][0] is self.ends.parameter
            box = held_of(info, tensor, self.mesh, self.rank, ends=shared)
            if box is not None:
                found.append(box)
        return found

    def places(self) -> dict[str, tuple[nn.Parameter, str | None]]:
        """Where each constant tensor is found: the parameter, and under which key the optimizer keeps it for that."""
        named = dict(self.model.named_parameters())
        places: dict[str, tuple[nn.Parameter, str | None]] = {f"model.{name}": (p, None) for name, p in named.items()}
        for name, parameter in named.items():
            places |= {f"optimizer.{name}.{key}": (parameter, key) for key in self.optimizer.state.get(parameter, {})}
        return places

    def changing(self) -> dict[str, Tensor]:
        """Tensors that may change in a forward pass: moving parameters and all buffers, kept in a state_dict or not."""
        moving: dict[str, Tensor] = {}
        if self.moving:  # a walk over the whole model, in the training thread, at every snapshot
            named = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
            moving = {name: tensor for name, tensor in named.items() if name in self.moving}
        return moving | {f"model.{name}": buffer for name, buffer in self.buffers.find().items()}

    def check_storable(self) -> None:
        """Raise StateError for a tensor that a checkpoint could not bring back."""
        for name, whole in (self.constant() | self.changing()).items():
            tensor = local_of(whole)
            if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                raise StateError(f"{name} is an expanded tensor, its elements share memory; clone() it in the model")

    def ties(self) -> dict[str, str]:
        """Further names of shared parameters → the name they are stored under."""
        first: dict[int, str] = {}
        aliases = {} if self.ends is None else self.ends.ties()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            kept = first.setdefault(id(parameter), f"model.{name}")
            if kept != f"model.{name}":
                aliases[f"model.{name}"] = kept
        return aliases

    def digest(self) -> str:
        """The state digest of a live state that is whole on this rank."""
        return state_digest(
            (name, tag_of(tensor, name), tuple(tensor.shape), digest(tensor_bytes(tensor)))
            for name, tensor in (self.constant() | self.changing()).items()
        )


def tag_of(tensor: Tensor, name: str) -> str:
    """The safetensors tag of a tensor's dtype; raises StateError for one that has none."""
    try:
        return DTYPE_TAGS[tensor.dtype]
    except KeyError:
        raise StateError(f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold") from None


def infos(tensors: Mapping[str, Tensor]) -> list[TensorInfo]:
    """Names, dtypes and shapes, for the division among ranks."""
    return [TensorInfo(name, tag_of(tensor, name), tuple(tensor.shape)) for name, tensor in tensors.items()]


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Bit for bit equality, also of NaN and of signed zeros."""
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and digest(tensor_bytes(first)) == digest(tensor_bytes(second))
    )


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The row-major bytes of a tensor, without a copy where the tensor already lies so in host memory."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _get_python() -> bytes:
    _, internal, gauss = random.getstate()
    return _PYTHON.pack(*internal, gauss is not None, gauss or 0.0)


def _set_python(data: bytes) -> None:
    *internal, has_gauss, gauss = _PYTHON.unpack(data)
    random.setstate((3, tuple(internal), gauss if has_gauss else None))


def _get_numpy() -> bytes:
    state = np.random.get_state(legacy=False)
    inner = state["state"]
    rest = _NUMPY_REST.pack(inner["pos"], state["has_gauss"], state["gauss"])
    return inner["key"].astype("<u4", copy=False).tobytes() + rest  # type: ignore[no-any-return]


def _set_numpy(data: bytes) -> None:
    keys = np.frombuffer(data, "<u4", _NUMPY_WORDS)
    position, has_gauss, gauss = _NUMPY_REST.unpack_from(data, keys.nbytes)
    np.random.set_state(("MT19937", keys, position, has_gauss, gauss))


def _get_torch() -> bytes:
    return bytes(tensor_bytes(torch.get_rng_state()))


def _set_torch(data: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _get_cuda() -> bytes:
    return bytes(tensor_bytes(torch.cuda.get_rng_state()))


def _set_cuda(data: bytes) -> None:
    torch.cuda.set_rng_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))


_GENERATORS: dict[str, tuple[Callable[[], bytes], Callable[[bytes], None]]] = {
    "rng.python": (_get_python, _set_python),
    "rng.numpy": (_get_numpy, _set_numpy),
    "rng.torch": (_get_torch, _set_torch),
    "rng.cuda": (_get_cuda, _set_cuda),
}


def random_states(device: torch.device) -> dict[str, bytes]:
    """The state of every global generator of this process, each of a fixed size."""
    names = [name for name in _GENERATORS if name != "rng.cuda" or device.type == "cuda"]
    return {name: _GENERATORS[name][0]() for name in names}


def set_random_state(name: str, data: bytes) -> None:
    """Put one generator back."""
    _GENERATORS[name][1](data)


def seed_everything(seed: int, rank: int | None = None) -> None:
    """Seed all generators; with a rank, each rank draws differently."""
    mixed = (seed if rank is None else seed * 1_000_003 + rank + 1) % 2**63
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)


def unexpected(stored: Mapping[str, TensorInfo], live: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Differences between a checkpoint's tensors and the model's, a line each."""
    for name in live.keys() - stored.keys():
        yield f"missing in the checkpoint: {name} {live[name].dtype} {list(live[name].shape)}"
    for name in stored.keys() - live.keys():
        yield f"not in the model: {name} {stored[name].dtype} {list(stored[name].shape)}"
    for name in stored.keys() & live.keys():
        if stored[name] != live[name]:
            yield (
                f"different: {name} is {stored[name].dtype} {list(stored[name].shape)} in the checkpoint, "
                f"{live[name].dtype} {list(live[name].shape)} in the model"
            )
