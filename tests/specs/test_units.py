"""Quantities with units."""

from collections.abc import Callable

import pytest

from dtrain.specs.units import parse_bandwidth, parse_bytes, parse_flops, parse_fraction, parse_seconds


@pytest.mark.parametrize(
    ("parse", "value", "base"),
    [
        (parse_bytes, "10GiB", 10 * 2**30),
        (parse_bytes, "1.5 kB", 1500),
        (parse_bytes, 12, 12),
        (parse_bytes, "12", 12),
        (parse_bandwidth, "10GiB/s", 10 * 2.0**30),
        (parse_bandwidth, "100Gbit/s", 12.5e9),
        (parse_bandwidth, 5e9, 5e9),
        (parse_flops, "400TFLOP/s", 4e14),
        (parse_flops, "1.5 PFLOPS", 1.5e15),
        (parse_flops, "4e14", 4e14),
        (parse_flops, 4e14, 4e14),
        (parse_seconds, "30s", 30),
        (parse_seconds, "500ms", 0.5),
        (parse_seconds, "24h", 86400),
        (parse_seconds, "2 min", 120),
        (parse_seconds, 10, 10),
        (parse_seconds, "1e-3", 1e-3),
        (parse_fraction, "1%", 0.01),
        (parse_fraction, 0.01, 0.01),
        (parse_fraction, "0.5", 0.5),
        (parse_fraction, 0, 0),
        (parse_fraction, "100%", 1),
    ],
)
def test_units_become_the_base_unit(parse: Callable[[object], float], value: object, base: float) -> None:
    assert parse(value) == pytest.approx(base)


HUGE = 10**400


NO_SIZES: list[object] = ["10 cows", "", "-1", -1, True, None, [], HUGE, "1e400", "1e300PB", ".5GB"]
NO_BANDWIDTHS: list[object] = ["10GiB", "3 MB", 0, 0.5, "1e-320B/s", "0B/s", HUGE, "1e400B/s", "1e308TB/s", "fast"]
NO_TIMES: list[object] = ["1:30", "soon", 0, -3, 1e-300, 1e10, "3 weeks", HUGE, float("nan"), float("inf")]
NO_RATES: list[object] = [0, -1, 0.5, 1e31, "1e-300", "400GB/s"]
NO_FRACTIONS: list[object] = [2, "101%", "1 s", -0.1, HUGE, "half", False]


@pytest.mark.parametrize(
    ("parse", "value"),
    [
        *((parse_bytes, value) for value in NO_SIZES),
        *((parse_bandwidth, value) for value in NO_BANDWIDTHS),
        *((parse_seconds, value) for value in NO_TIMES),
        *((parse_flops, value) for value in NO_RATES),
        *((parse_fraction, value) for value in NO_FRACTIONS),
    ],
)
def test_what_is_no_quantity_is_refused(parse: Callable[[object], float], value: object) -> None:
    with pytest.raises(ValueError, match=r"write it like|must be|must lie|unknown unit"):
        parse(value)
