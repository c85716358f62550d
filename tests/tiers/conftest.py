"""Fixtures of the storage tests."""

from pathlib import Path

import pytest
from tests.tiers.build import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
