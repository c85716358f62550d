"""`key.path=value` on the command line: read like the file, applied before all checks, named when wrong."""

import pytest
from tests.specs.build import BASE, Desk, changed

from dtrain.specs.models import AdamW, PythonModel, Sgd
from dtrain.specs.overrides import split
from dtrain.specs.places import DiskTier, MemoryTier


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("max_steps=3", ("max_steps",), "3"),
        ("training.optimizer.lr=1e-3", ("training", "optimizer", "lr"), "1e-3"),
        ("tiers.0.every=5", ("tiers", 0, "every"), "5"),
        ("tiers[0].every=5", ("tiers", 0, "every"), "5"),
        ("training.optimizer.betas[1]=0.9", ("training", "optimizer", "betas", 1), "0.9"),
        ("a=b=c", ("a",), "b=c"),
        ("a=", ("a",), ""),
        ("model.kwargs.some-key=1", ("model", "kwargs", "some-key"), "1"),
    ],
)
def test_an_override_is_split_at_its_first_sign(override: str, path: tuple[str | int, ...], value: str) -> None:
    assert split(override) == (path, value)


def test_overrides_replace_values(desk: Desk) -> None:
    spec = desk.load(
        BASE, "max_steps=80", "training.optimizer.lr=5e-4", "name=no", "tiers[1].every=10", "tiers.1.keep=1"
    )
    assert (spec.max_steps, spec.name) == (80, "no")
    assert spec.training.optimizer == AdamW(name="adamw", lr=5e-4)
    assert spec.tiers == [MemoryTier(type="memory"), DiskTier(type="disk", every=10, keep=1)]


def test_the_last_override_of_a_key_counts(desk: Desk) -> None:
    assert desk.load(BASE, "max_steps=80", "max_steps=90").max_steps == 90


def test_whole_blocks_and_lists_can_be_given(desk: Desk) -> None:
    spec = desk.load(BASE, "tiers=[]", "training.optimizer={name: sgd, lr: 1}", "cluster.mtbf={node: 1h}")
    assert spec.tiers == []
    assert spec.training.optimizer == Sgd(name="sgd", lr=1)
    assert spec.cluster.mtbf.node == 3600
    assert desk.load(BASE, "tiers=[{type: memory, every: 2}]").tiers == [MemoryTier(type="memory", every=2)]


def test_blocks_on_the_way_are_made(desk: Desk) -> None:
    spec = desk.load(BASE, "checkpoint.max_overhead=2%", "cluster.channels.storage.bandwidth=1GiB/s", "strategy.tp=1")
    assert spec.checkpoint.max_overhead == 0.02
    assert spec.cluster.channels.storage.bandwidth == 2**30
    assert desk.load(changed(("{name: cosine, warmup_steps: 5}", "")), "training.scheduler.warmup_steps=3")


def test_an_item_of_a_default_list_can_be_changed(desk: Desk) -> None:
    text = BASE[: BASE.index("tiers:")]
    assert desk.load(text, "tiers[1].every=7").tiers == [MemoryTier(type="memory"), DiskTier(type="disk", every=7)]


def test_an_empty_value_is_null(desk: Desk) -> None:
    assert desk.load(changed(("training:\n", "training:\n  max_grad_norm: 1\n")), "training.max_grad_norm=").training
    assert "has no value" in desk.problem(BASE, "max_steps=").message


def test_free_form_keys_can_be_set(desk: Desk) -> None:
    model = "{type: gpt, n_layers: 2, d_model: 64, n_heads: 4}"
    text = changed((model, '{type: python, entry: "zoo:mlp"}'))
    spec = desk.load(text, "model.kwargs.depth=3", "model.kwargs.rates=[1e-3]", "model.kwargs.rates[0]=2")
    assert isinstance(spec.model, PythonModel)
    assert spec.model.kwargs == {"depth": 3, "rates": [2]}


def test_one_of_two_aliases_can_be_changed(desk: Desk) -> None:
    text = changed(("nodes: 2, workers_per_node: 2", "nodes: 2, workers_per_node: 2, mtbf: &m {node: 1h}"))
    spec = desk.load(text, "cluster.mtbf.node=2h")
    assert spec.cluster.mtbf.node == 7200


WRONG: dict[str, tuple[str, str, str, str]] = {
    # override: key, part of the message, part of the hint
    "no sign": ("max_steps", "", "with an `=`", ""),
    "no key": ("=3", "", "the key is empty", ""),
    "blank key": (" =3", "", "the key is empty", ""),
    "dots only": ("..=3", "", "`..` is not a key path", ""),
    "open bracket": ("tiers[0=3", "", "is not a key path", ""),
    "wrong kind": ("max_steps=many", "max_steps", "must be a whole number of at least 1", ""),
    "wrong number": ("tiers[1].keep=0", "tiers[1].keep", "must be a whole number of at least 1", ""),
    "unknown key": ("training.learning_rate=1", "training.learning_rate", "unknown key", "`training.optimizer.lr`"),
    "unknown block": ("optimizer.lr=1", "optimizer", "unknown key", "block `training`"),
    "near miss": ("max_step=3", "max_step", "unknown key", "did you mean `max_steps`"),
    "not supported": ("strategy.cp=2", "strategy.cp", "not yet supported", ""),
    "too many peers": (
        "tiers=[{type: memory}, {type: peer, replicas: 2}]",
        "tiers[1].replicas",
        "1 other",
        "more nodes",
    ),
    "index too high": ("tiers[2].every=1", "tiers[2]", "`tiers` has items 0 to 1", "whole list"),
    "index of a block": ("training[0]=1", "training[0]", "`training` is not a list", ""),
    "key of a list": ("tiers.every=1", "tiers.every", "`tiers` is a list", "`tiers[0].every=…`"),
    "key of a value": ("max_steps.x=1", "max_steps.x", "`max_steps` is a single value", ""),
    "broken value": ("name=[1", "name", "a closing bracket is missing", ""),
    "value with a colon": ("name=a: b: c", "name", "a second `: `", "quotes"),
    "key twice in the value": ("strategy={tp: 1, tp: 1}", "strategy.tp", "given twice", ""),
    "two documents": ("name=a\n---\nb", "", "a second document", ""),
    "odd character": ("name=\x07", "name", "U+0007 cannot stand in YAML", ""),
    "not of this world": ("name=\udcff", "name", "U+DCFF cannot stand in YAML", ""),
    "alias of the file": ("name=*x", "name", "has no anchor", ""),
    "contradiction": (
        "training.global_batch_size=33",
        "training.global_batch_size",
        "33 is not a multiple",
        "32 or 48",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_override_is_named_instead_of_a_line(desk: Desk, name: str) -> None:
    override, key, message, hint = WRONG[name]
    problem = desk.problem(BASE, override)
    assert problem.file.startswith("override ")
    assert problem.file.removeprefix("override ").startswith(override[:4].rstrip("\x07\udcff"))
    assert (problem.line, problem.column, problem.key) == (None, None, key)
    assert message in problem.message
    assert hint in (problem.hint or "")
    str(problem).encode()


def test_wrong_overrides_stand_behind_what_is_wrong_in_the_file(desk: Desk) -> None:
    problems = desk.problems(changed(("keep: 3", "keep: 0")), "max_steps=-1", "seed=x", "nonsense")
    assert [problem.key for problem in problems] == ["tiers[1].keep", "max_steps", "seed", ""]
    assert problems[0].line == 16


def test_an_override_can_put_the_file_right(desk: Desk) -> None:
    assert desk.load(changed(("max_steps: 40", "max_steps: many")), "max_steps=7").max_steps == 7
