"""`dtrain validate`: one line or one document on stdout, the report on stderr, 78 for a bad spec."""

import json

import pytest
from tests.specs.build import BASE, Desk, changed

from dtrain.cli.validate import validate
from dtrain.specs.load import spec_from_json


def test_a_right_spec_is_one_line(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(str(desk.write(BASE)), ["max_steps=50"], as_json=False) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == (
        f"{desk.path}: valid — t, gpt (2 layers, d_model 64), world size 4, "
        "2 micro-batches per step, tiers: memory every 1 + disk every 5\n"
    )


def test_your_own_model_and_no_tiers_are_named(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    text = changed(("{type: gpt, n_layers: 2, d_model: 64, n_heads: 4}", '{type: python, entry: "zoo:mlp"}'))
    assert validate(str(desk.write(text)), ["tiers=[]", "training.global_batch_size=16"], as_json=False) == 0
    assert "model zoo:mlp, world size 4, 1 micro-batch per step, tiers: none\n" in capsys.readouterr().out


def test_a_right_spec_is_one_document(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(str(desk.write(BASE)), [], as_json=True) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (document["valid"], err) == (True, "")
    assert spec_from_json(document["spec"]) == desk.load(BASE)


def test_a_wrong_spec_is_a_report(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    text = changed(("name: t", "name: '[red]x[/red] " + "y" * 80 + "'"), ("keep: 3", "keep: 0"))
    assert validate(str(desk.write(text)), ["seed=:smile:"], as_json=False) == 78
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith(f"{desk.path}:1:7  name: must be 1 to 64 letters")
    assert "[red]" in lines[0]
    assert lines[1] == f"{desk.path}:16:34  tiers[1].keep: must be a whole number of at least 1 (got 0)"
    assert lines[2].startswith("override seed=:smile:  seed:")
    assert "\x1b" not in err


def test_a_wrong_spec_is_one_document(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(str(desk.write(changed(("keep: 3", "keep: 0")))), [], as_json=True) == 78
    document = json.loads(capsys.readouterr().out)
    assert document["valid"] is False
    (problem,) = document["problems"]
    assert problem == {
        "file": str(desk.path), "line": 16, "column": 34, "key": "tiers[1].keep", "value": "0",
        "message": "must be a whole number of at least 1", "hint": None,
    }  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True])
def test_a_missing_file_is_a_bad_spec(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    assert validate("nowhere.yaml", [], as_json) == 78
    assert "no such file" in capsys.readouterr().err
