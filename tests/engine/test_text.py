"""Text as samples: files, folders, the standard library, mapped parts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dtrain.engine.data import text
from dtrain.engine.data.text import STDLIB, DataError, TextData, text_files


def folder(root: Path, *contents: bytes) -> Path:
    root.mkdir()
    for number, content in enumerate(contents):
        (root / f"{number:02d}.txt").write_bytes(content)
    return root


def joined(data: TextData) -> bytes:
    """The text as the samples tell it."""
    return bytes(t for i in range(len(data)) for t in data[i][:-1].tolist()) + bytes([int(data[len(data) - 1][-1])])


def test_a_file_is_cut_into_samples_that_share_one_token(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abcdefghij")
    data = TextData(str(path), 3)
    assert len(data) == 3
    assert [bytes(data[i].tolist()) for i in range(3)] == [b"abcd", b"defg", b"ghij"]
    assert data[0].dtype == torch.int64


@pytest.mark.parametrize(("size", "samples"), [(4, 1), (6, 1), (7, 2), (9, 2), (10, 3)])
def test_a_rest_that_fills_no_sample_is_left_out(tmp_path: Path, size: int, samples: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(size)))
    data = TextData(str(path), 3)
    assert len(data) == samples
    assert all(data[i].tolist() == list(range(3 * i, 3 * i + 4)) for i in range(samples))


def test_a_folder_is_read_in_the_order_of_names_without_hidden_files(tmp_path: Path) -> None:
    root = folder(tmp_path / "d", b"first ", b"second ")
    (root / "01").mkdir()
    (root / "01" / "below.txt").write_bytes(b"between ")
    (root / ".hidden").write_bytes(b"not this")
    (root / "broken").symlink_to(root / "gone")
    assert [file.name for file in text_files(str(root))] == ["00.txt", "below.txt", "01.txt"]
    assert joined(TextData(str(root), 1)) == b"first between second "


def test_files_in_hidden_folders_are_no_text(tmp_path: Path) -> None:
    root = folder(tmp_path / "d", b"text")
    (root / ".git" / "objects").mkdir(parents=True)
    (root / ".git" / "objects" / "pack").write_bytes(b"\x00\xff")
    assert [file.name for file in text_files(str(root))] == ["00.txt"]


def test_the_standard_library_is_a_corpus() -> None:
    data = TextData(STDLIB, 128)
    assert data.tokens > 2**20
    assert b"import" in bytes(torch.cat([data[i] for i in range(100)]).tolist())


def test_of_the_standard_library_only_its_own_source_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ["a.py", "json/__init__.py", "json/tool.py", "z.py"]
    left_out = ["site-packages/x.py", "dist-packages/x.py", "test/x.py", "json/tests/x.py", "__pycache__/a.py", "a.txt"]
    for name in kept + left_out:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [file.relative_to(tmp_path).as_posix() for file in text_files(STDLIB)] == kept


@pytest.mark.parametrize("mapped_from", [1, 8, 30, 2**20])
def test_samples_across_parts_are_the_joined_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped_from: int
) -> None:
    """Large files are parts of their own; where they begin must not be seen."""
    contents = [bytes(np.random.bytes(size)) for size in (5, 40, 3, 7, 64, 1, 30, 2)]
    monkeypatch.setattr(text, "MAPPED_FROM", mapped_from)
    data = TextData(str(folder(tmp_path / "d", *contents)), 1)
    mapped = sum(len(content) >= mapped_from for content in contents)
    assert sum(isinstance(part, np.memmap) for part in data.parts) == mapped
    assert joined(data) == b"".join(contents)
    wide = TextData(str(tmp_path / "d"), 19)
    whole = b"".join(contents)
    assert [bytes(wide[i].tolist()) for i in range(len(wide))] == [
        whole[19 * i : 19 * i + 20] for i in range((len(whole) - 1) // 19)
    ]


def test_empty_files_beside_others_do_not_matter(tmp_path: Path) -> None:
    assert joined(TextData(str(folder(tmp_path / "d", b"", b"ab", b"", b"cd", b"")), 1)) == b"abcd"


@pytest.mark.parametrize("position", [0, 5, 9])
def test_the_fingerprint_follows_the_text(tmp_path: Path, position: int) -> None:
    root = folder(tmp_path / "d", b"0123456789")
    before = TextData(str(root), 2).fingerprint()
    assert TextData(str(root), 3).fingerprint() == before
    changed = bytearray(b"0123456789")
    changed[position] = 0
    (root / "00.txt").write_bytes(changed)
    assert TextData(str(root), 2).fingerprint() != before


def test_the_fingerprint_sees_both_ends_and_the_length_of_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "EDGE", 4)
    found = set()
    for content in (b"a" * 20, b"b" + b"a" * 19, b"a" * 19 + b"b", b"a" * 21):
        (tmp_path / "a").write_bytes(content)
        found.add(TextData(str(tmp_path / "a"), 2).fingerprint())
    assert len(found) == 4


def test_a_path_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none'.*no such file or folder.*relative paths"):
        TextData(str(tmp_path / "none"), 4)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".hidden").write_bytes(b"a lot of text")
    with pytest.raises(DataError, match="no files in it"):
        TextData(str(tmp_path / "d"), 4)


@pytest.mark.parametrize("contents", [[b""], [b"", b""]])
def test_files_without_a_byte_are_refused_in_words(tmp_path: Path, contents: list[bytes]) -> None:
    with pytest.raises(DataError):
        TextData(str(folder(tmp_path / "d", *contents)), 4)


@pytest.mark.parametrize("size", [1, 4])
def test_text_shorter_than_a_sample_is_refused_with_figures(tmp_path: Path, size: int) -> None:
    with pytest.raises(DataError, match=rf"{size} tokens are fewer than one sample of 5"):
        TextData(str(folder(tmp_path / "d", b"a" * size)), 4)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    root = folder(tmp_path / "d", b"text")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"00\.txt: Permission denied"):
        TextData(str(root), 2)
