"""The evaluation block: what it may say, and what it is told when it makes no sense."""

from __future__ import annotations

import pytest
from tests.specs.build import Desk, changed

from dtrain.specs.load import spec_from_json, spec_to_json
from dtrain.specs.template import TEMPLATE

STDLIB = 'dataset: {type: text, path: "python:stdlib", seq_len: 32}'
MINE = "dataset: {type: python, entry: my_data:build}"


def with_block(block: str, dataset: str = STDLIB) -> str:
    return changed((STDLIB, f"{dataset}\nevaluation: {block}"))


@pytest.mark.parametrize(
    ("block", "held_out"),
    [
        ("{every: 10}", 0.01),
        ("{every: 10, fraction: 5%}", 0.05),
        ("{every: 10, batches: 3, dataset: {type: text, path: other.txt, seq_len: 64}}", 0.0),
        ("{every: 10, dataset: {type: python, entry: my_data:held_out}}", 0.0),
    ],
)
def test_what_is_held_out(desk: Desk, block: str, held_out: float) -> None:
    spec = desk.load(with_block(block))
    assert spec.evaluation is not None and spec.evaluation.held_out == held_out
    assert [step for step in range(1, 41) if spec.evaluates(step)] == [10, 20, 30, 40]
    assert spec_from_json(spec_to_json(spec)) == spec


def test_the_last_step_is_evaluated_and_without_the_block_none_is(desk: Desk) -> None:
    spec = desk.load(with_block("{every: 25}"))
    assert [step for step in range(1, 41) if spec.evaluates(step)] == [25, 40]
    assert not any(desk.load().evaluates(step) for step in range(1, 41))


WRONG: dict[str, tuple[str, str, str, str, str]] = {
    # block, dataset, key, message, hint
    "nothing to hold out of": (
        "{every: 10}", MINE, "evaluation", "nothing can be held out of a dataset of type `python`", "of its own",
    ),
    "both": (
        "{every: 10, fraction: 1%, dataset: {type: text, path: b, seq_len: 32}}", STDLIB, "evaluation.fraction",
        "nothing is held out", "remove one of the two",
    ),
    "the same text": (
        '{every: 10, dataset: {type: text, path: "python:stdlib", seq_len: 64}}', STDLIB, "evaluation.dataset",
        "this is the data that is trained on", "leave `dataset` out",
    ),
    "the same code": (
        "{every: 10, dataset: {type: python, entry: my_data:build, kwargs: {}}}", MINE, "evaluation.dataset",
        "this is the data that is trained on", "give other data",
    ),
    "nothing": ("{every: 10, fraction: 0}", STDLIB, "evaluation.fraction", "more than 0, less than 1", "like 1%"),
    "all": ("{every: 10, fraction: 100%}", STDLIB, "evaluation.fraction", "more than 0, less than 1", "like 1%"),
    "too much": ("{every: 10, fraction: 2}", STDLIB, "evaluation.fraction", "a fraction from 0 to 1", ""),
    "never": ("{every: 0}", STDLIB, "evaluation.every", "a whole number of at least 1", ""),
    "no interval": ("{batches: 3}", STDLIB, "evaluation.every", "missing", "every: 100"),
    "another tool's word": (
        "{eval_steps: 10, every: 10}", STDLIB, "evaluation.eval_steps", "unknown key", "evaluation.every",
    ),
    "a later type": (
        "{every: 10, dataset: {type: hf}}", STDLIB, "evaluation.dataset.type", "not yet supported", "",
    ),
    "not finite": (
        "{every: 10, dataset: {type: python, entry: a:b, kwargs: {x: .inf}}}", STDLIB, "evaluation.dataset.kwargs.x",
        "must be a finite number", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_refused_with_a_remedy(desk: Desk, name: str) -> None:
    block, dataset, key, message, hint = WRONG[name]
    found = next(problem for problem in desk.problems(with_block(block, dataset)) if problem.key == key)
    assert found.line == 6
    assert message in found.message
    assert hint in (found.hint or "")


@pytest.mark.parametrize(("key", "meant"), [("eval", "evaluation"), ("eval_interval", "evaluation.every")])
def test_other_tools_words_at_the_top(desk: Desk, key: str, meant: str) -> None:
    found = desk.problem(changed(("name: t", f"{key}: 100")))
    assert f"`{meant}`" in (found.hint or "")


def test_paths_expand_and_the_template_s_line_is_right(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/data")
    spec = desk.load(with_block('{every: 5, dataset: {type: text, path: "${DATA}/b", seq_len: 8}}'))
    assert spec.evaluation is not None and spec.evaluation.dataset is not None
    assert spec.evaluation.dataset.model_dump()["path"] == "/data/b"
    assert TEMPLATE.count("\n# evaluation:") == 1
    assert desk.load(TEMPLATE.replace("# evaluation:", "evaluation:")).evaluation is not None
