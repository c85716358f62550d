"""Whatever the bytes are, reading a spec ends in a Spec or a SpecError."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.specs.build import BASE

from dtrain.specs.errors import SpecError
from dtrain.specs.load import load_spec, spec_digest, spec_from_json, spec_to_json
from dtrain.specs.models import Spec
from dtrain.specs.units import parse_seconds

FAST = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

PIECES = st.sampled_from(
    [
        *BASE.splitlines(keepends=True),
        *("model:", "tiers:", "training.", "lr: ", "every: ", "- ", "  ", "\n", "\n  ", ": ", "? ", "{", "}", "[", "]"),
        *(",", "&a ", "*a", "<<: *a", "!!str ", "!x ", "'", '"', "|\n", ">-\n", "# ", "---\n", "...\n", "%YAML 1.2\n"),
        *(
            "~",
            "1e-3",
            ".nan",
            "010",
            "0x",
            "9" * 400,
            "${X}",
            "$",
            "\t",
            "\u00a0",
            "\x00",
            "\u2028",
            "\\",
            '"\\ud800"',
        ),
    ]
)


def outcome(path: Path, content: bytes, overrides: list[str] | None = None) -> Spec | SpecError:
    path.write_bytes(content)
    try:
        return load_spec(path, overrides or [])
    except SpecError as error:
        assert error.problems
        report = str(error)
        given_words = " ".join([content.decode("utf-8", "replace"), *(overrides or [])])
        for foreign in ("Traceback", "Input should"):  # the input may hold either: a report shows what was given
            assert foreign not in report or foreign in given_words
        report.encode()
        json.dumps(error.to_json())
        for problem in error.problems:
            assert problem.message
            assert (problem.line is None) == (problem.column is None)
            assert problem.line is None or (problem.line >= 1 and (problem.column or 0) >= 1)
        return error


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"


@FAST
@given(st.binary(max_size=200))
@example(b"\xff\xfe")
@example(b"\xef\xbb\xbf")
def test_random_bytes(file: Path, content: bytes) -> None:
    outcome(file, content)


@FAST
@given(st.text(max_size=120))
def test_random_text(file: Path, text: str) -> None:
    outcome(file, text.encode("utf-8", "surrogatepass"))


@settings(FAST, max_examples=300)
@given(st.lists(PIECES, max_size=25).map("".join))
def test_random_pieces_of_specs(file: Path, text: str) -> None:
    outcome(file, text.encode())


@settings(FAST, max_examples=300)
@given(st.integers(0, len(BASE)), st.integers(0, 12), st.one_of(PIECES, st.text(max_size=5)))
def test_a_right_spec_with_a_piece_replaced(file: Path, start: int, length: int, piece: str) -> None:
    text = BASE[:start] + piece + BASE[start + length :]
    result = outcome(file, text.encode("utf-8", "surrogatepass"))
    if isinstance(result, Spec):
        again = spec_from_json(json.loads(json.dumps(spec_to_json(result))))
        assert again == result
        assert spec_digest(again) == spec_digest(result)


KEYS = st.sampled_from(
    ["name", "tiers", "tiers[0]", "tiers[0].every", "model.type", "training", "training.optimizer.lr",
     "cluster.mtbf.node", "output_dir", "max_steps", "seed", "strategy.tp", "x.y.z", "tiers.9", "", "a..b"]
)  # fmt: skip


@settings(FAST, max_examples=200)
@given(KEYS, st.one_of(PIECES, st.text(max_size=20)))
@example("tiers", "Traceback")
def test_random_overrides(file: Path, key: str, value: str) -> None:
    outcome(file, BASE.encode(), [f"{key}={value}"])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PATHS = [
    ("name",), ("max_steps",), ("seed",), ("model",), ("model", "type"), ("model", "rope_theta"), ("dataset",),
    ("training",), ("training", "optimizer"), ("training", "optimizer", "lr"), ("training", "optimizer", "betas"),
    ("cluster",), ("cluster", "heartbeat_timeout"), ("cluster", "channels", "storage", "bandwidth"), ("tiers",),
    ("checkpoint", "max_overhead"), ("strategy",), ("strategy", "dp_replicate"), ("extra",),
]  # fmt: skip


@settings(FAST, max_examples=200)
@given(st.sampled_from(PATHS), VALUES)
def test_random_values_in_a_stored_copy(file: Path, path: tuple[str, ...], value: Any) -> None:
    file.write_text(BASE)
    data = spec_to_json(load_spec(file))
    block = data
    for key in path[:-1]:
        block = block[key]
    block[path[-1]] = value
    try:
        spec = spec_from_json(data)
    except SpecError as error:
        str(error).encode()
        json.dumps(error.to_json())
    else:
        assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


@FAST
@given(st.text(max_size=20) | st.floats() | st.integers())
def test_random_times(value: object) -> None:
    try:
        assert 0 < parse_seconds(value) < float("inf")
    except ValueError as error:
        assert str(error)
