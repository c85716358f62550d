"""Fixtures of the tests that start real workers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.job.dtrain import Job, cleaned


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These come last, after all the fast ones."""
    mine = [item for item in items if "tests/job/" in item.path.as_posix()]
    for item in mine:
        item.add_marker(pytest.mark.multiprocess)
    items[:] = [item for item in items if item not in mine] + mine


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path / "job")
    made.write_spec()
    with cleaned(made):
        yield made


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """The unbroken run."""
    made = Job(tmp_path_factory.mktemp("oracle") / "job")
    made.write_spec()
    with cleaned(made):
        ended = made.do("run", "spec.yaml")
        assert ended.code == 0, ended.said
        made.assert_nothing_left()
        yield made
