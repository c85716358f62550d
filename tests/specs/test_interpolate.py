"""`~` and `${VAR}` expand in paths, on the parsed values, and nowhere else."""

import json
import re
from pathlib import Path

import pytest
from tests.specs.build import BASE, Desk, changed

from dtrain.specs.datasets import TextDataset
from dtrain.specs.load import load_spec, spec_from_json, spec_to_json
from dtrain.specs.text.interpolate import expand

ENVIRONMENT = {"SCRATCH": "/scratch", "USER": "ada", "EMPTY": "", "TRICK": "${USER}: {a: 1}"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("runs/x", "runs/x"),
        ("${SCRATCH}/runs", "/scratch/runs"),
        ("${SCRATCH}/${USER}", "/scratch/ada"),
        ("a${USER}b", "aadab"),
        ("${NOPE:-/tmp}/x", "/tmp/x"),
        ("${NOPE:-}x", "x"),
        ("${EMPTY:-y}", "y"),
        ("${USER:-y}", "ada"),
        ("$$HOME", "$HOME"),
        ("$${USER}", "${USER}"),
        ("a$$$$b", "a$$b"),
        ("${TRICK}", "${USER}: {a: 1}"),
        ("a~b", "a~b"),
        ("./~/x", "./~/x"),
        ("python:stdlib", "python:stdlib"),
    ],
)
def test_variables_expand_once(text: str, value: str) -> None:
    assert expand(text, ENVIRONMENT) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${NOPE}/x", "the environment variable NOPE is not set"),
        ("${EMPTY}/x", "the environment variable EMPTY is empty"),
        ("$HOME/x", "`$H` means nothing here"),
        ("a$", "means nothing here"),
        ("${}", "means nothing here"),
        ("${1A}", "means nothing here"),
        ("${A:-${B}}", "means nothing here"),
        ("${A", "means nothing here"),
        ("${A:=x}", "means nothing here"),
        ("~nobody-of-this-name/x", "`~nobody-of-this-name` names no home directory"),
        ("a\x00b", "control characters"),
        ("a\nb", "control characters"),
    ],
)
def test_what_cannot_be_expanded_is_said(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        expand(text, ENVIRONMENT)


def test_paths_of_a_spec_expand(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("BIG", "/big")
    text = changed(("runs/t", "~/${RUN:-one}"), ('"python:stdlib"', '"${BIG}/text"'), ("keep: 3", 'path: "${BIG}/ck"'))
    spec = desk.load(text)
    assert isinstance(spec.dataset, TextDataset)
    assert (spec.output_dir, spec.dataset.path) == ("/home/ada/one", "/big/text")
    assert spec.disk_tier is not None and spec.disk_tier.path == "/big/ck"
    assert desk.load(BASE, "output_dir=${BIG}/o").output_dir == "/big/o"


def test_a_lone_tilde_is_null_in_yaml(desk: Desk) -> None:
    assert "has no value" in desk.problem(changed(("runs/t", "~"))).message


def test_other_keys_do_not_expand(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N", "t")
    assert desk.problem(changed(("name: t", "name: ${N}"))).key == "name"


def test_an_unset_variable_is_placed_and_named(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOPE", raising=False)
    problem = desk.problem(changed(("runs/t", "${NOPE}/t")))
    assert (problem.line, problem.column, problem.key) == (2, 13, "output_dir")
    assert "NOPE is not set" in problem.message
    assert problem.value == "${NOPE}/t"


def test_values_of_variables_are_not_shown(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2\x01")
    assert "hunter2" not in str(desk.problem(changed(("runs/t", "${SECRET}"))))


def test_an_empty_expansion_is_refused(desk: Desk) -> None:
    assert "not empty" in desk.problem(changed(("runs/t", "${NOPE_AT_ALL:-}"))).message


def test_a_stored_copy_is_not_expanded_again(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B", "/b")
    spec = desk.load(changed(("runs/t", "runs/$$x$${B}")))
    assert spec.output_dir == "runs/$x${B}"
    assert spec_from_json(spec_to_json(spec)) == spec
    copy = tmp_path / "spec.json"
    copy.write_text(json.dumps(spec_to_json(spec)))
    assert load_spec(copy) == spec
    assert load_spec(copy, ["output_dir=${B}/y"]).output_dir == "/b/y"
