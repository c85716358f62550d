"""What launcher and workers tell each other comes back as it was said, or not at all."""

from pathlib import Path

import pytest

from dtrain.engine.job import (
    Job,
    Result,
    read_error,
    read_job,
    read_result,
    write_error,
    write_result,
)
from dtrain.specs.codes import Code
from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.format.layout import RunDir, Version
from dtrain.tiers.reading.recovery import Candidate
from dtrain.tiers.stores.store import Place


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run with ünusual name")
    made.root.mkdir()
    assert made.next_attempt() == 1
    return made


CANDIDATES = (
    Candidate(Version(3, 120), Place("memory", "/m")),
    Candidate(Version(1, 10**10), Place("object", "s3://b/d", {"region": "x"})),
)
SKIPPED = ({"tier": "disk", "step": 7, "attempt": 1, "reason": "damaged header (…)"},)


@pytest.mark.parametrize(
    ("candidates", "skipped", "paths"),
    [((), (), ()), (CANDIDATES, SKIPPED, ("/a", "/b c")), (CANDIDATES[:1], SKIPPED * 2, ())],
)
def test_a_job_comes_back(
    run: RunDir, candidates: tuple[Candidate, ...], skipped: tuple[dict[str, object], ...], paths: tuple[str, ...]
) -> None:
    job = Job(str(run.root), "/m", "feed", 1, paths, candidates, skipped)
    path = job.write()
    assert path == run.job(1)
    assert read_job(path) == job


def test_a_job_that_is_cut_is_not_read(run: RunDir) -> None:
    path = Job(str(run.root), "/m", "feed", 1, (), CANDIDATES).write()
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(Unreadable, match="not JSON"):
        read_job(path)
    with pytest.raises(Unreadable, match="No such file"):
        read_job(run.job(2))


def test_the_last_words_of_a_worker(run: RunDir) -> None:
    assert read_error(run, 1, 3) is None
    try:
        raise MemoryError("no room for 3 GiB — \udc80 \x1b[31m")
    except MemoryError as error:
        write_error(run, 1, 3, error, Code.FAILED, final=False)
    note = read_error(run, 1, 3)
    assert note is not None
    assert (note.rank, note.kind, note.exit_code, note.final) == (3, "MemoryError", 70, False)
    assert note.message == "no room for 3 GiB — \udc80 \x1b[31m"
    assert note.trace.startswith("Traceback")
    assert "raise MemoryError" in note.trace
    assert read_error(run, 1, 0) is None
    assert read_error(run, 2, 3) is None


def test_causes_of_causes_are_in_the_trace(run: RunDir) -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error
    except ValueError as error:
        write_error(run, 1, 0, error, Code.BAD_SPEC, final=True)
    note = read_error(run, 1, 0)
    assert note is not None
    assert note.final
    assert note.trace.index("KeyError: 'first'") < note.trace.index("ValueError: second")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"rank": 1}', b'{"rank":0,"surplus":1}'])
def test_a_note_that_is_cut_or_strange_is_no_note(run: RunDir, content: bytes) -> None:
    run.error(1, 0).write_bytes(content)
    assert read_error(run, 1, 0) is None
    (run.attempt(1) / "result.json").write_bytes(content)
    assert read_result(run, 1) is None


@pytest.mark.parametrize(
    "result", [Result(40, "ab" * 16, 0.1 + 0.2, False), Result(0, None, None, True), Result(7, None, 1e-300, True)]
)
def test_a_result_comes_back_to_the_last_bit(run: RunDir, result: Result) -> None:
    assert read_result(run, 1) is None
    write_result(run, 1, result)
    assert read_result(run, 1) == result
    write_result(run, 1, Result(9, None, None, False))
    assert read_result(run, 1) == Result(9, None, None, False), "the last word counts"
