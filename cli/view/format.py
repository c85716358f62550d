"""How numbers, series and paths are written for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

NO_FIGURE = "n/a"
BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans({
    "—": "-", "·": "|", "µ": "u", "…": "~", "✓": "+", "✗": "x", "≥": ">=",
    **dict(zip(BLOCKS, "__..--^^", strict=True)),
})  # fmt: skip


def for_terminal(text: str, ascii_only: bool) -> str:
    """Write `text` with what the terminal's encoding has; the width stays nearly the same."""
    return text.translate(_ASCII).encode("ascii", "replace").decode() if ascii_only else text


def human_bytes(value: float | None) -> str:
    """`11534336` → `11.0 MiB`; whole bytes below 1 KiB."""
    if value is None or not math.isfinite(value):
        return NO_FIGURE
    if abs(value) < 1024:
        return f"{value:.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB", "PiB")
    for unit in units:
        value /= 1024
        if abs(value) < 999.95 or unit == units[-1]:
            break
    return f"{value:.1f} {unit}"


def human_seconds(value: float | None) -> str:
    """`0.0042` → `4.20 ms`, `12.3` → `12.3 s`, `4000` → `1 h 06 min`: three figures, two units at most."""
    if value is None or not math.isfinite(value):
        return NO_FIGURE
    if value <= 0:
        return "0 s" if value == 0 else f"-{human_seconds(-value)}"
    for limit, factor, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (59.95, 1.0, "s")):
        if value < limit:
            return f"{_three_figures(value * factor)} {unit}"
    seconds = round(value)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    minutes = round(value / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(value / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def human_count(value: float | None) -> str:
    """`12345` → `12.3k`; whole numbers below a thousand."""
    if value is None or not math.isfinite(value):
        return NO_FIGURE
    if abs(value) < 999.5:
        return f"{value:.0f}"
    suffixes = ("k", "M", "B", "T")
    for suffix in suffixes:
        value /= 1000
        if abs(value) < 999.95 or suffix == suffixes[-1]:
            break
    return f"{value:.1f}{suffix}"


def human_percent(fraction: float | None) -> str:
    """`0.0012` → `0.12 %`."""
    return NO_FIGURE if fraction is None or not math.isfinite(fraction) else f"{100 * fraction:.2f} %"


def human_ratio(ratio: float | None) -> str:
    """`1.08` → `1.08x`."""
    return NO_FIGURE if ratio is None or not math.isfinite(ratio) else f"{_three_figures(ratio)}x"


def human_clock(seconds: float) -> str:
    """`3725` → `1:02:05`: a running time that is watched."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def human_loss(value: float | None) -> str:
    """Four decimals, or the exponent form where those would say nothing."""
    if value is None:
        return NO_FIGURE
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value) else f"{value:.3e}"


def plural(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def sparkline(series: Iterable[float], cells: int) -> str:
    """Draw a series in at most `cells` blocks, each the mean of its share; what is not finite leaves a gap."""
    values = list(series)
    if not values or cells < 1:
        return ""
    count = min(cells, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [_mean(values[low:high]) for low, high in pairwise(edges)]
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return " " * count
    low, span = min(finite), max(finite) - min(finite)
    return "".join(" " if mean is None else _block((mean - low) / span if span else 0.0) for mean in means)


def shorten_left(text: str, width: int) -> str:
    """Cut a path at its beginning: its end tells more."""
    return text if len(text) <= width else "…" + text[len(text) - max(0, width - 1) :] if width > 1 else "…"


def near(path: Path) -> str:
    """A path as a person would type it here: relative where that is shorter."""
    try:
        relative = str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
    return relative


def _three_figures(value: float) -> str:
    if value == 0:
        return "0.00"
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}"


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _block(share: float) -> str:
    return BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))]
