from __future__ import annotations

import pytest

from dtrain.planners.words import count, duration, plural, share, shares, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (4096, "4 KiB"),
        (5_512_228, "5.26 MiB"),
        (150 * 2**30, "150 GiB"),
        (2**60, "1,024 PiB"),
    ],
)
def test_size(value: int, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (6.42e-4, "642 µs"),
        (0.2943, "294 ms"),
        (1.31, "1.31 s"),
        (90, "90 s"),
        (600, "10 min"),
        (86400, "24 h"),
        (30 * 86400, "30 d"),
    ],
)
def test_duration(value: float, text: str) -> None:
    assert duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(918_656, "918,656"), (67_108_864, "67.1 million"), (6_738_415_616, "6.74 billion"), (10**13, "10 trillion")],
)
def test_count(value: int, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 %"),
        (1e-6, "< 0.01 %"),
        (0.0056, "0.56 %"),
        (0.01, "1 %"),
        (0.993, "99.3 %"),
        (0.99999, "99.99 %"),
        (1, "100 %"),
        (1.9, "190 %"),
    ],
)
def test_share(value: float, text: str) -> None:
    assert share(value) == text


def test_plural() -> None:
    assert plural(1, "pass") == "1 pass"
    assert plural(4, "pass") == "4 passes"
    assert plural(2, "micro-batch") == "2 micro-batches"
    assert plural(1000, "step") == "1,000 steps"


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (0.0104, 0.01, ("1.04 %", "1 %")),
        (0.010001, 0.01, ("1.0001 %", "1 %")),
        (0.02, 0.01, ("2 %", "1 %")),
        (0.01, 0.01, ("1 %", "1 %")),
    ],
)
def test_shares_that_differ_look_different(one: float, other: float, texts: tuple[str, str]) -> None:
    assert shares(one, other) == texts
