"""Reads a spec file: text → tree → overrides → paths expanded → checked → `Spec`, or every fault at once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from .checks.semantics import contradictions, not_finite
from .checks.support import planned
from .checks.wording import check
from .errors import Problem, SpecError
from .models import Spec
from .overrides import applied, split
from .overrides import label as name
from .text.interpolate import expanded
from .text.syntax import UNSPACED
from .text.tree import Finding, Items, Keys, Node, Scalar, dotted, find, from_values, located, plain
from .text.yaml12 import MAX_BYTES, decode, parse

MAX_PROBLEMS = 100
"""Most problems of one report."""


def load_spec(path: str | Path, overrides: Sequence[str] = (), fallbacks: Sequence[str] = ()) -> Spec:
    """Read and check a spec file; `overrides` are texts like `training.optimizer.lr=1e-3`.

    `fallbacks` are such texts too, for keys that neither the file nor an override has.
    Raises SpecError with all problems, each with its line and what to do about it.
    """
    label = os.fspath(path).encode("utf-8", "backslashreplace").decode()
    text = decode(_read(path, label), label)
    if isinstance(text, Problem):
        raise SpecError([text])
    root, problems = parse(text, label)
    if root is None and problems:
        raise SpecError(problems)
    sources = [label, *(name(override) for override in (*overrides, *fallbacks))]
    root, broken = _top_level(root, label)
    problems += broken
    root, refused = applied(root, list(overrides))
    root, unfit = applied(root, [text for text in fallbacks if root is None or find(root, split(text)[0]) is None])
    problems += [*refused, *unfit]
    if broken or root is None:
        raise _all(problems, sources)
    stored = label if label.endswith(".json") else None
    return _checked(root, problems, sources, expand=True, stored=stored)


def spec_from_json(data: Any, label: str = "spec.json") -> Spec:
    """Check a spec that was stored by `spec_to_json`; paths are taken as they are."""
    root, problems = from_values(data, label)
    root_or_none, broken = _top_level(root, label)
    if broken or root_or_none is None:
        raise _all([*problems, *broken], [label])
    return _checked(root_or_none, problems, [label], expand=False)


def spec_to_json(spec: Spec) -> dict[str, Any]:
    """Return a spec as plain JSON values, defaults included; `spec_from_json` gives an equal one."""
    return spec.model_dump(mode="json")


def spec_digest(spec: Spec) -> str:
    """Return the SHA-256 of a spec, the same for equal specs however they were written."""
    text = json.dumps(spec_to_json(spec), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _checked(root: Node, problems: list[Problem], sources: list[str], expand: bool, stored: str | None = None) -> Spec:
    """Check a tree from all sides and give all problems together, in the order of the file."""
    findings: list[Finding] = []
    if expand:
        root, findings = expanded(root, os.environ, stored)
    findings += planned(root)
    values = plain(root)
    spec, misfits = check(root, values)
    # What was refused as it stands need not be refused again for its kind.
    known = {dotted(finding.path) for finding in findings} | {problem.key for problem in problems}
    findings += [finding for finding in misfits if dotted(finding.path) not in known]
    findings += not_finite(root)
    findings += contradictions(values, [finding.path for finding in (*findings, *misfits)])
    problems = problems + [located(root, finding) for finding in findings]
    if spec is None or problems:
        raise _all(problems, sources)
    return spec


def _all(problems: list[Problem], sources: list[str]) -> SpecError:
    """Put problems in the order of the sources and lines; what is more than a person reads is counted."""
    ordered = sorted(problems, key=lambda found: (sources.index(found.file), found.line or 0, found.column or 0))
    left = len(ordered) - MAX_PROBLEMS
    if left > 0:
        ordered[MAX_PROBLEMS:] = [Problem(sources[0], None, None, "", None, f"{left} more problems")]
    return SpecError(ordered)


def _top_level(root: Node | None, label: str) -> tuple[Node | None, list[Problem]]:
    """Refuse what is not a block of keys."""
    if isinstance(root, Keys):
        return root, []
    hint: str | None = "`dtrain init` writes one to start from"
    if root is None or (isinstance(root, Scalar) and root.value is None):
        message = "the spec is empty"
    elif isinstance(root, Items):
        message, hint = "a spec is a block of keys, not a list", "remove the dash or bracket before the first key"
    else:
        message = "a spec is a block of keys, not a single value"
        match = UNSPACED.match(root.text)
        if match:
            hint = f"a space belongs after the colon: `{match[0]} {root.text[match.end() :][:40]}`"
    line = root.mark.line if root is not None else None
    column = root.mark.column if root is not None else None
    return root, [Problem(label, line, column, "", None, message, hint)]


def _read(path: str | Path, label: str) -> bytes:
    if not label:
        _refuse_path("''", "the path of the spec is empty", "is a variable of the shell not set?")
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        from_pipe = "a spec from a pipe is read from /dev/stdin" if label == "-" else None
        _refuse_path(label, "no such file", from_pipe or _nearby(Path(path)))
    except IsADirectoryError:
        found = [str(entry) for entry in _specs_in(Path(path))]
        _refuse_path(label, "this is a directory, not a spec", f"in it: {', '.join(found)}" if found else None)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        _refuse_path(label, f"cannot be read: {reason}", None)


def _refuse_path(label: str, message: str, hint: str | None) -> NoReturn:
    raise SpecError([Problem(label, None, None, "", None, message, hint)])


def _specs_in(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml"))[:5]
    except OSError:
        return []


def _nearby(path: Path) -> str | None:
    """Name the spec files that may be meant by a path that is not there."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    specs = {entry.name: entry for entry in _specs_in(folder)}
    close = get_close_matches(path.name, specs, 1, 0.5) or get_close_matches(path.name + ".yaml", specs, 1, 0.6)
    if close:
        return f"did you mean {specs[close[0]]}?"
    return f"specs there: {', '.join(specs)}" if specs else "`dtrain init` writes a spec to start from"
