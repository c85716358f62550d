"""Following a file of JSON lines."""

from pathlib import Path

import pytest

from dtrain.cli.view import tail
from dtrain.cli.view.tail import JsonLines, last_lines


def append(path: Path, text: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)


def test_new_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path)
    assert lines.poll() == []
    append(path, '{"a": 1}\n{"a": 2}\n')
    assert lines.poll() == [{"a": 1}, {"a": 2}]
    assert lines.poll() == []
    append(path, '{"a": 3}\n')
    assert lines.poll() == [{"a": 3}]


def test_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append(path, '{"a": 1}\n')
    lines = JsonLines(path, from_end=True)
    append(path, '{"a": 2}\n')
    assert lines.poll() == [{"a": 2}]


def test_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path)
    whole = '{"text": "größer"}\n'.encode()
    for index in range(len(whole) - 1):
        append(path, whole[index : index + 1])
        assert lines.poll() == []
    append(path, b"\n")
    assert lines.poll() == [{"text": "größer"}]
    assert lines.skipped == 0


def test_junk_is_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append(path, b'\xff\xfe\n[1, 2]\n7\nnull\nhello\n\n{"a": 1}\n' + b"[" * 100_000 + b"\n")
    lines = JsonLines(path)
    assert lines.poll() == [{"a": 1}]
    assert lines.skipped == 6


def test_a_line_written_behind_a_torn_one_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append(path, '{"a": 1, "b": {"c": 2}, "t{"a": 5, "b": {"c": 6}}\n')
    lines = JsonLines(path)
    assert lines.poll() == [{"a": 5, "b": {"c": 6}}]
    assert lines.skipped == 1


def test_a_shorter_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path)
    append(path, '{"a": 1}\n{"a": 2}\n{"a"')
    assert len(lines.poll()) == 2
    path.write_text('{"b": 1}\n')
    assert lines.poll() == [{"b": 1}]


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MAX_LINE_BYTES", 64)
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path)
    for _ in range(3):
        append(path, "x" * 50)
        assert lines.poll() == []
    append(path, '"}\n{"a": 1}\n')
    assert lines.poll() == [{"a": 1}]
    assert lines.skipped == 1


def test_the_last_lines_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "LAST_BYTES", 30)
    path = tmp_path / "a.jsonl"
    assert last_lines(path) == []
    append(path, "".join(f'{{"step": {n}}}\n' for n in range(9)) + '{"st')
    assert last_lines(path) == [{"step": 7}, {"step": 8}]
