"""Tables that lose nothing on a narrow terminal."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

GAP = 2
"""Columns between two of a table, at most."""


def fitting(table: Table, width: int) -> RenderableType:
    """Return the table of texts, or its rows as lines `heading: value` where it is wider than `width` columns."""
    if sum(_least(column) for column in table.columns) + GAP * (len(table.columns) - 1) <= width:
        return table
    lines: list[RenderableType] = []
    headings = [str(column.header) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        name, *values = (str(cell) for cell in cells)
        lines.append(Text(name, style="bold"))
        lines += [Text(f"  {heading}: {value}") for heading, value in zip(headings[1:], values, strict=True) if value]
    return Group(*lines)


def _least(column: Column) -> int:
    """Return the columns without which it would be cut off."""
    texts = [str(cell) for cell in (column.header, *column.cells)]
    return max(cell_len(part) for text in texts for part in ([text] if column.no_wrap else text.split() or [""]))
