"""People's own code: found, called, or refused with what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtrain.engine.entry import UserCodeError, UserCodeFailed, add_import_paths, call_entry

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module of one's own into a folder that is imported from."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name: str, text: str) -> None:
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    yield put
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_callable_gets_its_keywords(write: Write) -> None:
    write(
        "mine_a", "def make(a, b=2):\n    return a, b\n\nclass Thing:\n    def __init__(self, x):\n        self.x = x\n"
    )
    assert call_entry("mine_a:make", {"a": 1}, "model.entry") == (1, 2)
    assert call_entry("mine_a:Thing", {"x": [3]}, "model.entry").x == [3]


def test_modules_in_packages(write: Write) -> None:
    write("pack_a/__init__", "")
    write("pack_a/deep", "def make():\n    return 'deep'\n")
    assert call_entry("pack_a.deep:make", {}, "model.entry") == "deep"


@pytest.mark.parametrize("name", ["nowhere_a", "nowhere_a.deep", "pack_b.nowhere"])
def test_a_module_that_is_not_there_is_told_with_where_it_is_looked_for(write: Write, name: str) -> None:
    write("pack_b/__init__", "")
    with pytest.raises(UserCodeError, match=rf"dataset.entry: no module '{name}'; it is looked for in the working"):
        call_entry(f"{name}:make", {}, "dataset.entry")


@pytest.mark.parametrize(
    ("module", "missing"),
    [("mine_b", "some_package_not_installed"), ("frobnet_models", "frobnet"), ("frobnet2", "frobnet")],
)
def test_what_a_module_itself_misses_is_not_taken_for_the_module(write: Write, module: str, missing: str) -> None:
    write(module, f"import {missing}\n\ndef make():\n    return 1\n")
    with pytest.raises(
        UserCodeFailed, match=f"importing {module} failed: ModuleNotFoundError: No module named '{missing}'"
    ):
        call_entry(f"{module}:make", {}, "model.entry")


def test_a_name_that_is_not_there_is_told_with_those_that_are(write: Write) -> None:
    write("mine_c", "value = 3\n\ndef make():\n    pass\n\ndef _hidden():\n    pass\n\nclass Net:\n    pass\n")
    for name in ("mak", "value"):
        with pytest.raises(UserCodeError, match=f"model.entry: mine_c has no callable '{name}'; it has Net, make$"):
            call_entry(f"mine_c:{name}", {}, "model.entry")


def test_a_module_without_a_callable(write: Write) -> None:
    write("mine_d", "value = 3\n")
    with pytest.raises(UserCodeError, match="it has none"):
        call_entry("mine_d:make", {}, "model.entry")


@pytest.mark.parametrize(
    ("text", "first_line", "last_frame"),
    [
        (
            "raise ValueError('at import')",
            "importing mine_e failed: ValueError: at import",
            "raise ValueError('at import')",
        ),
        (
            "def make():\n    raise KeyError('in it')",
            "mine_e:make failed: KeyError: 'in it'",
            "raise KeyError('in it')",
        ),
        ("def make(a):\n    pass", r"mine_e:make failed: TypeError: make() missing 1 required", ""),
        ("def make(:", "importing mine_e failed: SyntaxError: invalid syntax", "def make(:"),
    ],
    ids=["import", "call", "arguments", "syntax"],
)
def test_what_the_code_raises_is_told_in_a_line_and_with_its_own_frames(
    write: Write, text: str, first_line: str, last_frame: str
) -> None:
    write("mine_e", text)
    with pytest.raises(UserCodeFailed) as caught:
        call_entry("mine_e:make", {}, "model.entry")
    first, *rest = str(caught.value).splitlines()
    assert first.startswith(f"model.entry: {first_line}")
    assert last_frame in "\n".join(rest)
    assert "dtrain/engine" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_what_is_no_error_of_the_code_is_let_through(write: Write) -> None:
    write("mine_f", "def make():\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        call_entry("mine_f:make", {}, "model.entry")


def test_folders_are_searched_in_their_order_and_added_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    for folder in ("first", "second"):
        write(f"{folder}/both_a", f"def make():\n    return {folder!r}\n")
    write("second/one_a", "def make():\n    return 'only'\n")
    length = len(sys.path)
    for _ in range(2):
        add_import_paths(str(tmp_path / "first"), str(tmp_path / "second"))
    assert sys.path[:2] == [str((tmp_path / name).resolve()) for name in ("first", "second")]
    assert len(sys.path) == length + 2
    assert call_entry("both_a:make", {}, "model.entry") == "first"
    assert call_entry("one_a:make", {}, "model.entry") == "only"
