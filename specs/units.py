"""Quantities people write with a unit: sizes, bandwidths, rates of operations, times, fractions.

Each annotated type accepts a bare number in the base unit (bytes, bytes/s, seconds, a fraction of one) or
text with a unit, and always stores the base unit, so that a spec dumped to JSON reads back equal.
"""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator, Field

BYTES: dict[str, float] = {
    "B": 1,
    "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15,
    "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40, "PIB": 2.0**50,
}  # fmt: skip
BITS: dict[str, float] = {"BIT": 1 / 8, "KBIT": 1e3 / 8, "MBIT": 1e6 / 8, "GBIT": 1e9 / 8, "TBIT": 1e12 / 8}
FLOPS: dict[str, float] = {
    prefix + unit: factor
    for prefix, factor in (("", 1.0), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15))
    for unit in ("FLOP/S", "FLOPS")
}
SECONDS: dict[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}

LEAST_SECONDS, MOST_SECONDS = 1e-6, 9e9
"""A microsecond to 285 years: what clocks and waits of the standard library can take."""
LEAST_RATE, MOST_RATE = 1.0, 1e30
"""Per second. Outside of it there is no hardware, and durations would be no numbers."""

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z%/]*)\s*")


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"not a {what}; write it like {example}")
    return float(match[1]), match[2]


def _number(value: object, what: str, example: str) -> float | None:
    """Return a bare number, or None when `value` is text; anything else is refused."""
    if isinstance(value, str):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"not a {what}; write it like {example}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return _finite(number, what)


def _finite(number: float, what: str) -> float:
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"a {what} must be a finite number of at least 0")
    return number


def _within(number: float, least: float, most: float, what: str, unit: str) -> float:
    if not least <= number <= most:
        raise ValueError(f"a {what} must be from {least:g} to {most:g} {unit}")
    return number


def parse_bytes(value: object) -> int:
    """`10GiB`, `512 MB` or a number of bytes → bytes."""
    number = _number(value, "size", "10GiB")
    if number is None:
        amount, unit = _split(str(value), "size", "10GiB")
        if unit and unit.upper() not in BYTES:
            raise ValueError(f"unknown unit of size {unit!r}; use one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB")
        number = amount * BYTES[unit.upper() or "B"]
    return round(_finite(number, "size"))


def parse_bandwidth(value: object) -> float:
    """`10GiB/s`, `100Gbit/s` or a number → bytes per second, at least 1."""
    number = _number(value, "bandwidth", "10GiB/s")
    if number is None:
        amount, unit = _split(str(value), "bandwidth", "10GiB/s")
        base = unit.upper().removesuffix("/S")
        if not unit.upper().endswith("/S") or base not in BYTES | BITS:
            raise ValueError(f"unknown unit of bandwidth {unit!r}; write it like 10GiB/s or 100Gbit/s")
        number = amount * (BYTES | BITS)[base]
    return _within(number, LEAST_RATE, MOST_RATE, "bandwidth", "bytes/s")


def parse_seconds(value: object) -> float:
    """`30s`, `24h`, `500ms` or a number of seconds → seconds, from a microsecond to 285 years."""
    number = _number(value, "time", "30s")
    if number is None:
        amount, unit = _split(str(value), "time", "30s")
        if unit and unit not in SECONDS:
            raise ValueError(f"unknown unit of time {unit!r}; use one of us, ms, s, min, h, d")
        number = amount * SECONDS[unit or "s"]
    return _within(number, LEAST_SECONDS, MOST_SECONDS, "time", "s")


def parse_fraction(value: object) -> float:
    """`1%` or 0.01 → 0.01; must lie between 0 and 1."""
    number = _number(value, "fraction", "1%")
    if number is None:
        amount, unit = _split(str(value), "fraction", "1%")
        if unit not in ("%", ""):
            raise ValueError(f"unknown unit {unit!r}; write a fraction like 1% or 0.01")
        number = amount / 100 if unit == "%" else amount
    if number > 1:
        raise ValueError("a fraction must lie between 0 and 1 (write 1% or 0.01)")
    return number


def parse_flops(value: object) -> float:
    """`400TFLOP/s`, `400e12` or a number → floating point operations per second, at least 1."""
    number = _number(value, "rate of operations", "400TFLOP/s")
    if number is None:
        amount, unit = _split(str(value), "rate of operations", "400TFLOP/s")
        if unit and unit.upper() not in FLOPS:
            raise ValueError(f"unknown unit of operations {unit!r}; write it like 400TFLOP/s or 400e12")
        number = amount * FLOPS[unit.upper() or "FLOP/S"]
    return _within(number, LEAST_RATE, MOST_RATE, "rate of operations", "FLOP/s")


ByteSize = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str)]
Bandwidth = Annotated[float, BeforeValidator(parse_bandwidth, json_schema_input_type=float | str)]
Flops = Annotated[float, BeforeValidator(parse_flops, json_schema_input_type=float | str)]
Seconds = Annotated[float, BeforeValidator(parse_seconds, json_schema_input_type=float | str)]
Fraction = Annotated[float, BeforeValidator(parse_fraction, json_schema_input_type=float | str)]
PositiveInt = Annotated[int, Field(gt=0, lt=2**63)]
WholeNumber = Annotated[int, Field(ge=0, lt=2**63)]
