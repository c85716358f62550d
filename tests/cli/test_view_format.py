"""How numbers, series and paths are written."""

import math
from pathlib import Path

import pytest

from dtrain.cli.view import format as form


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (math.nan, "n/a"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (11 * 2**20, "11.0 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (2.5 * 2**40, "2.5 TiB"),
        (5000 * 2**50, "5000.0 PiB"),
    ],
)
def test_bytes(value: float | None, text: str) -> None:
    assert form.human_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (math.inf, "n/a"),
        (0, "0 s"),
        (2.5e-6, "2.50 µs"),
        (0.0042, "4.20 ms"),
        (0.9999, "1.00 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (4000, "1 h 07 min"),
        (86399, "1 d 00 h"),
        (200_000, "2 d 08 h"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert form.human_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "n/a"), (0, "0"), (999, "999"), (999.9, "1.0k"), (12_345, "12.3k"), (999_960, "1.0M"), (7.24e9, "7.2B")],
)
def test_count(value: float | None, text: str) -> None:
    assert form.human_count(value) == text


def test_small_ones() -> None:
    assert form.human_percent(0.0012) == "0.12 %"
    assert form.human_ratio(1.084) == "1.08x"
    assert form.human_ratio(None) == "n/a"
    assert form.human_clock(3725) == "1:02:05"
    assert form.human_clock(65.4) == "1:05"
    assert form.human_loss(2.41871) == "2.4187"
    assert form.human_loss(1e-7) == "1.000e-07"
    assert form.human_loss(math.nan) == "nan"
    assert form.plural(1, "step") == "1 step"
    assert form.plural(2000, "step") == "2,000 steps"


def test_a_sparkline_shows_the_shape_and_leaves_gaps() -> None:
    assert form.sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert form.sparkline([1, math.nan, 2], 3) == "▁ █"
    assert form.sparkline([3, 3, 3], 10) == "▁▁▁"
    assert len(form.sparkline(range(1000), 20)) == 20
    assert form.sparkline([], 20) == ""
    assert form.sparkline([math.inf], 20) == " "


def test_a_path_is_cut_at_its_beginning() -> None:
    assert form.shorten_left("runs/tiny/logs", 40) == "runs/tiny/logs"
    assert form.shorten_left("runs/tiny/logs", 6) == "…/logs"
    assert form.shorten_left("runs/tiny/logs", 1) == "…"


def test_a_path_below_here_is_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert form.near(tmp_path / "runs" / "a") == "runs/a"
    assert form.near(tmp_path.parent / "b") == str(tmp_path.parent / "b")


def test_ascii_terminals_get_ascii() -> None:
    assert form.for_terminal("a — b · ✗ 中", ascii_only=True) == "a - b | x ?"
    assert form.for_terminal("a — b", ascii_only=False) == "a — b"
