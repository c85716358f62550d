"""Fixtures of the spec tests."""

from pathlib import Path

import pytest
from tests.specs.build import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)
