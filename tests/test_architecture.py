"""The house: arrows only go down, torch stays in its room, no pickle anywhere, the package is one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "specs": set[str](),
    "tiers": {"specs"},
    "planners": {"specs"},
    "engine": {"specs", "planners", "tiers"},
    "cli": {"specs", "planners", "tiers", "engine"},
}
FORBIDDEN_CALLS = {("pickle", "*"), ("torch", "load"), ("torch", "save"), ("yaml", "load"), ("marshal", "*")}
RIVAL = ("rivals.py", ("torch", "save"))
"""What `dtrain bench` measures; written into a folder that it removes, and never read."""


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Absolute names of everything a file imports, and whether that happens when the file itself is imported."""
    tree = ast.parse(path.read_text())
    package = ["dtrain", *path.relative_to(ROOT).parent.parts]
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module, id(node) in top
            yield from ((f"{module}.{alias.name}", id(node) in top) for alias in node.names)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_arrows_only_go_down(room: str) -> None:
    for path in files(room):
        for name, _ in imports(path):
            parts = name.split(".")
            if parts[0] == "dtrain" and len(parts) > 1 and parts[1] in MAY_IMPORT and parts[1] != room:
                assert parts[1] in MAY_IMPORT[room], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_the_folders_of_a_room_do_not_need_each_other_in_circles(room: str) -> None:
    """Files that lie above the folders put them together, so these may need any of them."""
    needs: dict[str, set[str]] = {}
    for path in files(room):
        folder, *inside = path.relative_to(ROOT / room).parts
        if inside:
            named = (name.split(".")[2] for name, _ in imports(path) if name.startswith(f"dtrain.{room}."))
            needs.setdefault(folder, set()).update(other for other in named if (ROOT / room / other).is_dir())
    for folder, others in needs.items():
        others.discard(folder)
    assert list(TopologicalSorter(needs).static_order())


@pytest.mark.parametrize("room", ["specs", "tiers", "planners"])
def test_torch_lives_in_the_engine(room: str) -> None:
    for path in files(room):
        assert not any(name.split(".")[0] == "torch" for name, _ in imports(path)), path


def test_the_cli_imports_the_engine_only_inside_commands() -> None:
    for path in files("cli"):
        at_import = [name for name, top in imports(path) if top]
        assert not any(name.startswith(("dtrain.engine", "torch")) for name in at_import), path


def test_planners_do_no_input_or_output() -> None:
    outside = {"os", "pathlib", "time", "subprocess", "socket", "shutil", "io", "random"}
    for path in files("planners"):
        used = {name.split(".")[0] for name, _ in imports(path)}
        assert not used & outside, f"{path.relative_to(ROOT)} imports {used & outside}"


def test_no_pickle_and_no_unsafe_loader() -> None:
    for room in MAY_IMPORT:
        for path in files(room):
            for name, _ in imports(path):
                assert name.split(".")[0] not in ("pickle", "marshal", "shelve", "dill", "cloudpickle"), path
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    called = (node.value.id, node.attr)
                    assert called not in FORBIDDEN_CALLS or (path.name, called) == RIVAL, f"{path}:{node.lineno}"
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in ("eval", "exec", "print"), f"{path}:{node.lineno}"


def without_torch(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that says afterwards whether torch came in."""
    code = (
        "import sys\nfrom dtrain.cli.main import main\n"
        f"sys.argv = ['dtrain', *{list(words)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        "sys.stderr.write('TORCH' if 'torch' in sys.modules else 'CLEAN')\nsys.exit(code)"
    )
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=60
    )


EXAMPLE = str(ROOT / "specs/examples/tiny-gpt.yaml")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--help",), 0),
        (("--version",), 0),
        (("run", "--help"), 0),
        (("validate", EXAMPLE), 0),
        (("validate", EXAMPLE, "max_steps=-1"), 78),
        (("plan", EXAMPLE), 0),
        (("plan", EXAMPLE, "--json"), 0),
        (("schema",), 0),
        (("ls", "nowhere"), 2),
        (("inspect", "nowhere"), 2),
        (("verify", "nowhere"), 2),
        (("prune", "nowhere"), 2),
        (("export", "nowhere", "out"), 2),
        (("run", "nowhere.yaml"), 78),
        (("bench", "nowhere.yaml"), 78),
        (("bench", EXAMPLE, "--methods", "pickle"), 2),
        (("resume", "nowhere"), 78),
    ],
)
def test_commands_without_torch(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    ended = without_torch(*words, cwd=tmp_path)
    assert ended.stderr.endswith("CLEAN"), ended.stderr
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr


def test_init_writes_a_spec_that_is_valid(tmp_path: Path) -> None:
    assert without_torch("init", cwd=tmp_path).returncode == 0
    assert without_torch("validate", "spec.yaml", cwd=tmp_path).returncode == 0
    again = without_torch("init", cwd=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_every_example_is_valid_and_plans(tmp_path: Path) -> None:
    for example in sorted((ROOT / "specs/examples").glob("*.yaml")):
        ended = without_torch("plan", str(example), cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
