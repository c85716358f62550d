"""Numbers that are not finite are seen, all others are let pass: every dtype, every bit pattern that matters."""

from __future__ import annotations

import ctypes

import pytest
import torch

from dtrain.engine.snapshot.finite import FLOATS
from dtrain.engine.snapshot.state import DTYPE_TAGS

DTYPES = {tag: dtype for dtype, tag in DTYPE_TAGS.items() if dtype.is_floating_point or dtype.is_complex}


def says(tag: str, data: bytes, shift: int = 0) -> bool:
    """The verdict on some bytes that lie `shift` bytes off a whole address."""
    memory = ctypes.create_string_buffer(b"\xff" * shift + data + b"\xff" * 8)
    return FLOATS[tag].all_finite(ctypes.addressof(memory) + shift, len(data))


def test_every_dtype_that_can_hold_nan_has_its_rule() -> None:
    assert FLOATS.keys() == DTYPES.keys()


@pytest.mark.parametrize("tag", ["BF16", "F16", "F8_E5M2", "F8_E4M3"])
def test_every_number_of_a_short_dtype_is_judged_as_torch_does(tag: str) -> None:
    width = FLOATS[tag].width
    patterns = [number.to_bytes(width, "little") for number in range(2 ** (8 * width))]
    values = torch.frombuffer(bytearray(b"".join(patterns)), dtype=DTYPES[tag])
    wanted = torch.isfinite(values.float()).tolist()
    assert [says(tag, pattern) for pattern in patterns] == wanted
    assert 0 < sum(wanted) < len(wanted)


@pytest.mark.parametrize("tag", ["F64", "F32", "C64"])
def test_edges_of_the_long_dtypes(tag: str) -> None:
    dtype = torch.float64 if tag == "F64" else torch.float32
    info = torch.finfo(dtype)
    for value in (0.0, -0.0, info.max, -info.max, info.tiny, -info.tiny, info.smallest_normal, 1.0, -1.0):
        assert says(tag, torch.tensor([value, value], dtype=dtype).numpy().tobytes()), value
    for value in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        assert not says(tag, torch.tensor([1.0, value], dtype=dtype).numpy().tobytes()), value
    width = torch.tensor(0, dtype=dtype).element_size()
    quiet, signalling = FLOATS[tag].infinity + 1, FLOATS[tag].infinity | 1 << 4
    for bits in (quiet, signalling, quiet | 1 << (8 * width - 1), signalling | 1 << (8 * width - 1)):
        assert not says(tag, bits.to_bytes(width, "little") * 2)


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_among_many_is_found_wherever_it_is(bad: float, shift: int) -> None:
    """Also where a tensor does not begin at a multiple of its own numbers' size, as shards have no gaps."""
    for count in (1, 2, 7, 64, 1000):
        values = torch.randn(count)
        assert says("F32", values.numpy().tobytes(), shift)
        for position in {0, count // 2, count - 1}:
            spoilt = values.clone()
            spoilt[position] = bad
            assert not says("F32", spoilt.numpy().tobytes(), shift)


@pytest.mark.parametrize("tag", FLOATS)
def test_no_numbers_are_all_finite(tag: str) -> None:
    assert says(tag, b"")
