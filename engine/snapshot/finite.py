"""Whether stored numbers are all finite, judged by their bits: as exact as isfinite, for the cost of a maximum.

A floating number that is NaN or infinite has all bits of its exponent set. Read as unsigned integers, the negative
ones among these are the largest numbers there are; read as signed integers, the positive ones are. So two maxima
decide, and often one. numpy takes them with vector instructions, on the calling thread alone, without Python's lock
and without a temporary array.
"""

from __future__ import annotations

import ctypes

import numpy as np


class Floats:
    """How the numbers of one dtype lie in memory."""

    def __init__(self, width: int, infinity: int) -> None:
        """Numbers of `width` bytes; `infinity`: the smallest bits, sign bit clear, that stand for no finite number."""
        self.width, self.infinity = width, infinity
        self._minus_infinity = infinity + (1 << (8 * width - 1))
        self._unsigned, self._signed = np.dtype(f"u{width}"), np.dtype(f"i{width}")

    def all_finite(self, address: int, nbytes: int) -> bool:
        """Tell whether the numbers in `nbytes` bytes from `address` on, a whole number of them, are all finite."""
        if nbytes == 0:
            return True
        return self.all_in(memoryview((ctypes.c_char * nbytes).from_address(address)))

    def finite_until(self, address: int, begin: int, end: int) -> int | None:
        """How far, up to byte `end`, whole numbers from byte `begin` on are finite; None: one of them is not.

        `address` is that of byte 0. What ends inside a number leaves that one for the next call.
        """
        end -= end % self.width
        return end if self.all_finite(address + begin, end - begin) else None

    def all_in(self, memory: memoryview) -> bool:
        """The same for numbers in a buffer."""
        numbers = np.frombuffer(memory, self._unsigned)
        if not numbers.size:
            return True
        largest = np.maximum.reduce(numbers)
        if largest < self.infinity:
            return True
        return bool(largest < self._minus_infinity and np.maximum.reduce(numbers.view(self._signed)) < self.infinity)


_F32 = Floats(4, 0x7F800000)
FLOATS = {
    "F64": Floats(8, 0x7FF0000000000000),
    "F32": _F32,
    "C64": _F32,
    "BF16": Floats(2, 0x7F80),
    "F16": Floats(2, 0x7C00),
    "F8_E5M2": Floats(1, 0x7C),
    "F8_E4M3": Floats(1, 0x7F),
}
"""By safetensors tag; a dtype that is not here has only finite numbers."""
