"""The way from a device to page-locked memory. Skipped where there is no GPU: none was at hand when it was written."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from dtrain.engine.copier import Copier, CudaMover, Item
from dtrain.engine.state import tensor_bytes
from dtrain.tiers.digest import digest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def copied(tensors: list[torch.Tensor], between: int = 0) -> tuple[bytes, list[str]]:
    """Copy tensors from the device, with so many kernels still queued before their last update."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    target = mmap.mmap(-1, max(1, sum(sizes)))
    anchor = ctypes.c_char.from_buffer(target)
    base = ctypes.addressof(anchor)
    assert int(torch.cuda.cudart().cudaHostRegister(base, len(target), 0)) == 0
    told: list[list[str]] = []
    copier = Copier(CudaMover(torch.device("cuda", 0)), 1024)
    try:
        busy = torch.randn(2048, 2048, device="cuda")
        for _ in range(between):
            busy = busy @ busy
        for tensor in tensors:
            tensor.add_(1)  # the update: still in the queue when the copy is begun
        items = [
            Item(tensor, 0, size, sum(sizes[:n])) for n, (tensor, size) in enumerate(zip(tensors, sizes, strict=True))
        ]
        copier.begin(1, items, base, told.append)
        copier.finish()
    finally:
        copier.stop()
        torch.cuda.cudart().cudaHostUnregister(base)
    return bytes(target[: sum(sizes)]), told[0]


@pytest.mark.parametrize("between", [0, 50])
def test_what_is_copied_is_the_state_after_the_update(between: int) -> None:
    tensors = [
        torch.randn(5000, device="cuda"), torch.randn(30, 70, device="cuda").t(), torch.tensor(3.0, device="cuda"),
        torch.randn(64, device="cuda").bfloat16(),
    ]  # fmt: skip
    wanted = [bytes(tensor_bytes(tensor.detach().clone().add_(1))) for tensor in tensors]
    data, digests = copied(tensors, between)
    assert data == b"".join(wanted)
    assert digests == [digest(one) for one in wanted]
