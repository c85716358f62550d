"""Numbers in words, for warnings and pages: sizes in powers of 1024, times, counts, shares."""

from __future__ import annotations

from collections.abc import Sequence

KIB, MIB, GIB = 2**10, 2**20, 2**30
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(bytes_: float) -> str:
    """Bytes in the largest unit that keeps the figure at 1 or more: `4.95 MiB`."""
    value = float(bytes_)
    for unit in UNITS:
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{three_digits(value)} {unit}"


def duration(seconds: float) -> str:
    """Seconds in a unit people read: `12.5 ms`, `1.31 s`, `4.5 min`, `18 h`, `40 d`."""
    if seconds == 0:
        return "0 s"
    for below, unit, length in (
        (1e-3, "µs", 1e-6),
        (1, "ms", 1e-3),
        (120, "s", 1),
        (7200, "min", 60),
        (172800, "h", 3600),
    ):
        if seconds < below:
            return f"{three_digits(seconds / length)} {unit}"
    return f"{three_digits(seconds / 86400)} d"


def count(number: int) -> str:
    """A count: exact below ten million, then `6.74 billion`."""
    for size_of, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= max(size_of, 10**7):
            return f"{three_digits(number / size_of)} {word}"
    return f"{number:,}"


def listed(items: Sequence[object], most: int) -> str:
    """`1, 2, 4`; of more than `most` the first, and the last: `1, 2, 3, … 128`."""
    shown = [str(item) for item in items]
    return ", ".join(shown if len(shown) <= most else [*shown[: most - 1], f"… {shown[-1]}"])


def share(fraction: float) -> str:
    """A fraction as a percentage: `0.13 %`, `12.5 %`; what is not quite 0 or 1 does not look like it."""
    percent = 100 * fraction
    if 0 < percent < 0.01:
        return "< 0.01 %"
    if 99.95 <= percent < 100:
        return f"{min(percent, 99.99):.2f} %"
    return f"{three_digits(percent)} %" if percent >= 10 else f"{percent:.2g} %"


def shares(one: float, other: float) -> tuple[str, str]:
    """Two fractions that are compared: with as many digits as it takes to tell them apart."""
    texts = share(one), share(other)
    digits = 3
    while texts[0] == texts[1] and one != other and digits <= 15:
        texts = f"{100 * one:.{digits}g} %", f"{100 * other:.{digits}g} %"
        digits += 1
    return texts


def plural(number: float, noun: str) -> str:
    """`1 step`, `4 steps`."""
    text = f"{number:,}" if isinstance(number, int) else three_digits(number)
    return f"{text} {noun}" if text == "1" else f"{text} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def three_digits(value: float) -> str:
    """A number with three significant digits and no trailing zeros; all digits left of the point stay."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.0e}" if "e" in text and abs(value) < 1e-6 else f"{float(text):g}"


def seers(world: int, data_parallel: int) -> str:
    """Who sees different samples: ranks, or groups of ranks that work on the same ones."""
    if data_parallel == world:
        return plural(world, "rank")
    return f"{plural(data_parallel, 'group')} of {plural(world // data_parallel, 'rank')}"
