"""Every row of the list of public faults is tried: the number of a row stands in the name of a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
ROWS = {
    "half-written, damaged or wrongly chosen checkpoints": {1, 3, 4, 5, 6, 8, 10, 11, 12, 13, 14},
    "retention": {16, 17, 18, 20, 22, 23},
    "disks and file systems": {25, 26, 28, 29, 31, 32, 33, 34, 35, 37, 38, 39},
    "copies in the background, in memory, at peers and in stores": {41, 42, 43, 44, 46, 47, 49, 50, 51, 52, 54, 55},
    "model and optimizer": {56, 57, 59, 60, 61, 62, 64, 65, 66, 67, 68, 70, 71, 72, 73, 75, 76},
    "position in the data": {78, 79, 80, 82, 83, 85, 87},
    "launch, hangs, restarts, signals": {88, 89, 91, 92, 93, 94, 96, 97, 99, 100, 102, 103, 104, 106},
    "specs and paths": {107, 108, 109, 110, 111, 113, 114},
}
"""By section; a row keeps its number for good, so numbers that are not here were never given or were given up."""
NAME = re.compile(r"(?:^test|^)_?rows?_(\d+(?:_(?:and_|row_)?\d+)*)(?:_|$)")


def names(path: Path) -> Iterator[str]:
    """Of tests, and of the cases that a test is given by name."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name
        elif isinstance(node, ast.keyword) and node.arg == "id" and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def test_every_row_is_tried_and_no_other_number_is_used() -> None:
    tried = {
        int(number)
        for path in TESTS.rglob("test_*.py")
        for name in names(path)
        for found in NAME.findall(name)
        for number in re.findall(r"\d+", found)
    }
    assert tried == set().union(*ROWS.values())
