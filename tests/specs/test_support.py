"""What is planned and not built is refused by name, with what works today; never as an unknown value."""

import pytest
from tests.specs.build import Desk, changed

from dtrain.specs.checks.support import planned
from dtrain.specs.text.yaml12 import parse

PLANNED: dict[str, tuple[str, str, str, str]] = {
    # replaced text, new text, key, what works today
    "hf model": ("{type: gpt, n_layers: 2, d_model: 64, n_heads: 4}", "{type: hf, path: x}", "model.type", "`gpt`"),
    "hf data": ("{type: text,", "{type: hf,", "dataset.type", "`text`, `jsonl`, `tokens` and `python`"),
    "parquet": ("{type: text,", "{type: parquet,", "dataset.type", "`text`, `jsonl`, `tokens` and `python`"),
    "fp8": ("training:\n", "training:\n  precision: fp8\n", "training.precision", "`bf16`"),
    "fp16": ("training:\n", "training:\n  precision: fp16\n", "training.precision", "`fp16-mixed`"),
    "16": ("training:\n", "training:\n  precision: 16\n", "training.precision", "`fp16-mixed`"),
    "cp": ("name: t", "strategy: {cp: 2}", "strategy.cp", "`dp_replicate`"),
    "ep": ("name: t", "strategy: {ep: 1}", "strategy.ep", "`dp_replicate`"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANNED)
def test_what_is_planned_is_refused_by_name(desk: Desk, name: str) -> None:
    old, new, key, works = PLANNED[name]
    problem = desk.problem(changed((old, new)))
    assert problem.key == key
    assert "not yet supported" in problem.message
    assert works in problem.message and "today" in problem.message
    assert "unknown" not in str(problem)
    assert problem.line is not None and problem.value is not None


def test_planned_words_are_refused_together(desk: Desk) -> None:
    changes = [(old, new) for name, (old, new, _, _) in PLANNED.items() if name in ("hf data", "fp8")]
    problems = desk.problems(changed(*changes))
    assert [problem.key for problem in problems] == [
        "dataset.type",
        "training.precision",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "strategy: {tp: 1, pp: 1, dp_shard: 1}",
        "strategy: {tp: true, pp: [2], dp_shard: two}",
        "strategy: [tp]",
        "cluster: {nodes: 2, rendezvous: auto, channels: {compute: {interface: eth0}}}",
        'cluster: {rendezvous: "node0:29500"}',
        "tiers: peer",
        "training: {precision: ~}",
        "model: hf",
    ],
)
def test_other_faults_are_left_to_others(text: str) -> None:
    root, _ = parse(text, "f")
    assert root is not None
    assert planned(root) == []
