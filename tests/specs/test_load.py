"""From file to Spec: every fault at once, each at its place and in words; stored copies read back equal."""

import errno
import json
import math
import os
from pathlib import Path

import pytest
from tests.specs.build import BASE, Desk, changed

from dtrain.specs.datasets import TextDataset
from dtrain.specs.errors import Problem, SpecError
from dtrain.specs.load import load_spec, spec_digest, spec_from_json, spec_to_json
from dtrain.specs.models import AdamW, PythonModel, Sgd

PYTHON_MODEL = '{type: python, entry: "zoo:mlp", kwargs: KW}'


def kwargs_spec(kwargs: str) -> str:
    model = PYTHON_MODEL.replace("KW", kwargs)
    return changed(("{type: gpt, n_layers: 2, d_model: 64, n_heads: 4}", model))


def test_a_right_spec_is_read(desk: Desk) -> None:
    spec = desk.load()
    assert (spec.name, spec.max_steps, spec.world_size, spec.micro_batches) == ("t", 40, 4, 2)
    assert isinstance(spec.training.optimizer, AdamW)
    assert spec.training.optimizer.lr == 1e-3
    assert spec.disk_tier is not None and spec.disk_tier.keep == 3


EVERYTHING_WRONG = """\
name: [t]
max_steps: -1
model: {type: gpt, n_layers: 8.5, d_model: 100, n_heads: 8}
dataset: {type: parquet, path: x}
training:
  global_batch_size: 10
  micro_batch_size: 4
  learning_rate: 1e-3
  precision: bf16-mixd
  optimizer: {name: adamw, lr: .nan}
cluster: {nodes: '2', heartbeat_timeout: soon}
tiers:
  - {type: memory, every: 2}
  - {type: disk, every: 5, keep: true}
  - {type: disk}
chekpoint: {max_overhead: 1%}
"""


def test_all_faults_are_reported_at_once_each_at_its_place(desk: Desk) -> None:
    found = {problem.key: (problem.line, problem.column) for problem in desk.problems(EVERYTHING_WRONG)}
    assert found == {
        "name": (1, 7),
        "output_dir": (1, 1),
        "max_steps": (2, 12),
        "model.n_layers": (3, 30),
        "model.d_model": (3, 44),
        "dataset.type": (4, 17),
        "training.learning_rate": (8, 3),
        "training.precision": (9, 14),
        "training.optimizer.lr": (10, 32),
        "cluster.nodes": (11, 18),
        "cluster.heartbeat_timeout": (11, 42),
        "tiers[1].every": (14, 25),
        "tiers[1].keep": (14, 34),
        "tiers[2].type": (15, 12),
        "chekpoint": (16, 1),
    }


def test_problems_come_in_the_order_of_the_file(desk: Desk) -> None:
    places = [(problem.line or 0, problem.column or 0) for problem in desk.problems(EVERYTHING_WRONG)]
    assert places == sorted(places)


WHOLE = "must be a whole number of at least 1"

MISFITS: list[tuple[str, str, str, str, str]] = [
    # replaced text, new text, key, message, value shown
    ("max_steps: 40", "max_steps: -1", "max_steps", WHOLE, "-1"),
    ("max_steps: 40", "max_steps: 0", "max_steps", WHOLE, "0"),
    ("max_steps: 40", "max_steps: true", "max_steps", WHOLE, "true"),
    ("max_steps: 40", "max_steps: 1e999", "max_steps", WHOLE, "1e999"),
    ("max_steps: 40", "max_steps: [40]", "max_steps", WHOLE, "[40]"),
    ("max_steps: 40", "max_steps: {a: 1}", "max_steps", WHOLE, "{a: 1}"),
    ("max_steps: 40", "max_steps:", "max_steps", f"has no value: it {WHOLE}", "nothing"),
    ("max_steps: 40", "max_steps: ~", "max_steps", f"has no value: it {WHOLE}", "~"),
    ("max_steps: 40", f"max_steps: {2**63}", "max_steps", f"{WHOLE}, below 2^63", str(2**63)),
    ("global_batch_size: 32", "global_batch_size: 8.5", "training.global_batch_size", WHOLE, "8.5"),
    ("keep: 3", "keep: true", "tiers[1].keep", WHOLE, "true"),
    ("keep: 3", "keep: 0", "tiers[1].keep", WHOLE, "0"),
    ("keep: 3", "keep: -1", "tiers[1].keep", WHOLE, "-1"),
    ("nodes: 2", "nodes: '2'", "cluster.nodes", WHOLE, "'2'"),
    ("lr: 1e-3", "lr: .nan", "training.optimizer.lr", "must be a number above 0", ".nan"),
    ("lr: 1e-3", "lr: .inf", "training.optimizer.lr", "must be a number above 0", ".inf"),
    ("lr: 1e-3", "lr: 1e999", "training.optimizer.lr", "must be a number above 0", "1e999"),
    ("lr: 1e-3", "lr: 0", "training.optimizer.lr", "must be a number above 0", "0"),
    ("lr: 1e-3", "lr: '1e-3'", "training.optimizer.lr", "must be a number above 0", "'1e-3'"),
    ("lr: 1e-3", "lr: 1e-3\n    betas: [0.9, 2]", "training.optimizer.betas[1]",
     "must be a number of at least 0 and below 1", "2"),
    ("lr: 1e-3", "lr: 1e-3\n    betas: [0.9]", "training.optimizer.betas", "must be a list of exactly 2", "[0.9]"),
    ("lr: 1e-3", "lr: 1e-3\n    betas: 0.9", "training.optimizer.betas", "must be a list of exactly 2", "0.9"),
    ("n_heads: 4", "n_heads: 4, dropout: 1", "model.dropout", "must be a number of at least 0 and below 1", "1"),
    ("n_heads: 4", "n_heads: 4, tie_embeddings: yes", "model.tie_embeddings", "must be true or false", "yes"),
    ("n_heads: 4", "n_heads: 4, tie_embeddings: 1", "model.tie_embeddings", "must be true or false", "1"),
    ("n_heads: 4", "n_heads: 4, d_ff: x", "model.d_ff", f"{WHOLE} or null", "x"),
    ("every: 1}", "every: 0}", "tiers[0].every", "must be `auto` or a whole number of at least 1", "0"),
    ("every: 1}", "every: often}", "tiers[0].every", "must be `auto` or a whole number of at least 1", "often"),
    ("device: cpu", "device: tpu", "cluster.device", "must be one of `auto`, `cpu`, `cuda`", "tpu"),
    ("device: cpu", "heartbeat_timeout: 1:30", "cluster.heartbeat_timeout", "must be a time above 0", "1:30"),
    ("device: cpu", "rendezvous: 'node0:0'", "cluster.rendezvous", "a port from 1 to 65535", "'node0:0'"),
    ("device: cpu", "rendezvous: node0:65536", "cluster.rendezvous", "a port from 1 to 65535", "node0:65536"),
    ("device: cpu", "heartbeat_timeout: 0", "cluster.heartbeat_timeout", "must be a time above 0", "0"),
    ("device: cpu", "heartbeat_timeout: .inf", "cluster.heartbeat_timeout", "must be a time above 0", ".inf"),
    ("device: cpu", "mtbf: {node: 1e300}", "cluster.mtbf.node", "must be a time above 0", "1e300"),
    ("device: cpu", "hardware: {disk_bandwidth: 1e-320}", "cluster.hardware.disk_bandwidth",
     "must be `auto` or a bandwidth like 10GiB/s", "1e-320"),
    ("n_layers: 2", "n_layers: 1000000000", "model.n_layers", "must be a whole number from 1 to 10000", "1000000000"),
    ("device: cpu", "mtbf: {node: 3 weeks}", "cluster.mtbf.node", "must be a time above 0", "3 weeks"),
    ("device: cpu", "channels: {storage: {bandwidth: 3 MB}}", "cluster.channels.storage.bandwidth",
     "must be `auto` or a bandwidth like 10GiB/s", "3 MB"),
    ("name: t", "checkpoint: {max_overhead: 2}", "checkpoint.max_overhead", "a fraction from 0 to 1", "2"),
    ("name: t", "seed: -1", "seed", "must be a whole number of at least 0", "-1"),
    ("name: t", "name: a b", "name", "must be 1 to 64 letters", "a b"),
    ("name: t", "name: ''", "name", "must be 1 to 64 letters", "''"),
    ("name: t", "name:", "name", "has no value", "nothing"),
    ("runs/t", "''", "output_dir", "must be text that is not empty", "''"),
    ("runs/t", "[a]", "output_dir", "must be text that is not empty", "[a]"),
    ("{type: text,", "{type: tex,", "dataset.type", "must be one of `text`, `jsonl`, `tokens`, `python`", "tex"),
    ("{type: text,", "{type: 3,", "dataset.type", "must be one of `text`, `jsonl`, `tokens`, `python`", "3"),
    ("{name: cosine, warmup_steps: 5}", "cosine", "training.scheduler", "must be a block of keys", "cosine"),
    ("{name: cosine, warmup_steps: 5}", "", "training.scheduler", "has no value: it must be a block", "nothing"),
    ("{name: cosine, warmup_steps: 5}", "[]", "training.scheduler", "must be a block of keys", "[]"),
    ("{type: memory, every: 1}", "memory", "tiers[0]", "must be a block of keys", "memory"),
    ("{type: gpt, n_layers: 2, d_model: 64, n_heads: 4}", '{type: python, entry: zoo}', "model.entry",
     "must be `module:callable`", "zoo"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "key", "message", "value"), MISFITS)
def test_row_114_a_value_of_the_wrong_kind_is_said_in_words(
    desk: Desk, old: str, new: str, key: str, message: str, value: str
) -> None:
    problem = desk.problem(changed((old, new)))
    assert problem.key == key
    assert message in problem.message
    assert (problem.value or "nothing") == value
    assert f"(got {value})" in str(problem)
    for foreign in ("Input should", "valid", "None", "dict", "str "):
        assert foreign not in problem.message


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("lr: 1e-3", "lr: '1e-3'", "remove the quotes"),
        ("max_steps: 40", "max_steps: 1_000", "`1000`"),
        ("max_steps: 40", "max_steps: 1,000", "`1000`"),
        ("max_steps: 40", "max_steps: 1e5", "`100000`"),
        ("max_steps: 40", "max_steps: 40.0", "`40`"),
        ("max_steps: 40", "max_steps: [40]", "one value, not a list"),
        ("n_heads: 4", "n_heads: 4, tie_embeddings: on", "`true`"),
        ("n_heads: 4", "n_heads: 4, tie_embeddings: 'False'", "`false`"),
        ("device: cpu", "heartbeat_timeout: 1:30", "90s"),
        ("device: cpu", "mtbf: {node: 1e300}", "from 1e-06 to 9e+09 s"),
        ("device: cpu", "mtbf: {node: 3 weeks}", "unknown unit of time 'weeks'"),
        ("{name: cosine, warmup_steps: 5}", "\n    name:cosine", "`name: cosine`"),
        ("{name: cosine, warmup_steps: 5}", "cosine", "on the lines below"),
        ("tiers:\n  - {type: memory, every: 1}\n  - ", "tiers: ", "`- `"),
    ],
)
def test_a_remedy_is_given_where_the_meaning_is_plain(desk: Desk, old: str, new: str, hint: str) -> None:
    assert hint in (desk.problem(changed((old, new))).hint or "")


@pytest.mark.parametrize("written", ["no", "010", "3.10", "1e5", "true", "0x1F", "1_000", "2024-01-31", "off"])
def test_row_111_text_keys_take_the_text_as_it_is_written(desk: Desk, written: str) -> None:
    text = changed(("name: t", f"name: {written}"), ("runs/t", written))
    spec = desk.load(text)
    assert (spec.name, spec.output_dir) == (written, written)


@pytest.mark.parametrize("written", ["1e-4", "5E-4", "1E-4", "1e5", "1.0e4", "1", ".5", "0.00001", "010"])
def test_row_107_number_keys_take_every_spelling_of_a_number(desk: Desk, written: str) -> None:
    optimizer = desk.load(changed(("lr: 1e-3", f"lr: {written}"))).training.optimizer
    assert optimizer.lr == float(written)
    assert type(optimizer.lr) is float


def test_whole_numbers_are_decimal_unless_marked(desk: Desk) -> None:
    assert desk.load(changed(("max_steps: 40", "max_steps: 010"))).max_steps == 10
    assert desk.load(changed(("max_steps: 40", "max_steps: 0o10"))).max_steps == 8
    assert desk.load(changed(("max_steps: 40", "max_steps: 0x1F"))).max_steps == 31


def test_free_form_blocks_get_yaml_1_2_values(desk: Desk) -> None:
    spec = desk.load(kwargs_spec("{a: 1e-4, b: no, c: 010, d: 1:30, e: 1_000, f: [true, ~], g: {h: 2024-01-31}}"))
    assert isinstance(spec.model, PythonModel)
    assert spec.model.kwargs == {
        "a": 1e-4, "b": "no", "c": 10, "d": "1:30", "e": "1_000", "f": [True, None], "g": {"h": "2024-01-31"},
    }  # fmt: skip


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf", "1e999"])
def test_free_form_blocks_hold_finite_numbers_only(desk: Desk, number: str) -> None:
    problem = desk.problem(kwargs_spec(f"{{a: [1, {{b: {number}}}]}}"))
    assert (problem.key, problem.value) == ("model.kwargs.a[1].b", number)
    assert "finite" in problem.message


@pytest.mark.parametrize(
    ("old", "key", "block", "example"),
    [
        ("output_dir: runs/t\n", "output_dir", "at the top level", "output_dir: runs/my-run"),
        ("max_steps: 40\n", "max_steps", "at the top level", "max_steps: 200"),
        ("n_layers: 2, ", "model.n_layers", "in `model`", "n_layers: 4"),
        (", seq_len: 32", "dataset.seq_len", "in `dataset`", "seq_len: 128"),
        ("  micro_batch_size: 4\n", "training.micro_batch_size", "in `training`", "micro_batch_size: 4"),
        ("    lr: 1e-3\n", "training.optimizer.lr", "in `training.optimizer`", "lr: 3e-4"),
        ("    name: adamw\n", "training.optimizer.name", "in `training.optimizer`", "name: adamw"),
        ("type: gpt, ", "model.type", "in `model`", "type: gpt"),
        ("type: memory, ", "tiers[0].type", "in `tiers`", "type: memory"),
    ],
)
def test_a_missing_key_is_asked_for_with_an_example(desk: Desk, old: str, key: str, block: str, example: str) -> None:
    problem = desk.problem(changed((old, "")))
    assert problem.key == key
    assert f"required {block}" in problem.message
    assert problem.hint is not None and example in problem.hint
    assert problem.value is None


def test_a_missing_key_is_placed_at_its_block(desk: Desk) -> None:
    problem = desk.problem(changed(("    lr: 1e-3\n", "")))
    assert (problem.line, problem.column) == (9, 3)


def test_a_fault_in_aliased_values_points_to_where_they_are_written(desk: Desk) -> None:
    text = changed(("nodes: 2", "nodes: &n 1.5"), ("max_steps: 40", "max_steps: 40"))
    text = text.replace("every: 5", "every: *n")
    found = {problem.key: problem.line for problem in desk.problems(text)}
    assert found == {"cluster.nodes": 13, "tiers[1].every": 13}


def test_the_report_is_readable(desk: Desk) -> None:
    with pytest.raises(SpecError) as caught:
        desk.load(changed(("    lr: 1e-3", "    learning_rate: 3e-4"), ("keep: 3", "keep: 0")))
    assert str(caught.value) == "\n".join(
        [
            f"{desk.path}:9:3  training.optimizer.lr: missing: this key is required in `training.optimizer`",
            "    add it there, like `lr: 3e-4`",
            f"{desk.path}:11:5  training.optimizer.learning_rate: unknown key (got 3e-4)",
            "    dtrain calls it `training.optimizer.lr`",
            f"{desk.path}:16:34  tiers[1].keep: must be a whole number of at least 1 (got 0)",
        ]
    )
    assert caught.value.exit_code == 78
    first = caught.value.to_json()[1]
    assert first["key"] == "training.optimizer.learning_rate"
    assert (first["line"], first["column"], first["value"]) == (11, 5, "3e-4")
    json.dumps(caught.value.to_json())


def test_a_report_holds_no_characters_that_act_on_a_terminal(desk: Desk) -> None:
    report = "\n".join(map(str, desk.problems(BASE + '"\\e[31mred\\n": "\\x07bell"\n')))
    assert all(char == "\n" or char.isprintable() for char in report)
    assert len(report.splitlines()) == 2


def test_long_values_are_shortened(desk: Desk) -> None:
    problem = desk.problem(changed(("max_steps: 40", f"max_steps: {'x' * 500}")))
    assert problem.value is not None and len(problem.value) == 60 and problem.value.endswith("…")


def test_a_missing_file_brings_the_nearest_name(desk: Desk) -> None:
    desk.write(BASE)
    with pytest.raises(SpecError, match=r"no such file\n.*did you mean .*job\.yaml"):
        load_spec(desk.path.with_name("jbo.yaml"))
    with pytest.raises(SpecError, match=r"did you mean .*job\.yaml"):
        load_spec(desk.path.with_suffix(""))
    with pytest.raises(SpecError, match=r"specs there: job\.yaml"):
        load_spec(desk.path.with_name("something-else-altogether"))
    with pytest.raises(SpecError, match=r"there is no folder"):
        load_spec(desk.path.parent / "nowhere" / "job.yaml")
    with pytest.raises(SpecError, match=r"path of the spec is empty\n.*is a variable of the shell not set"):
        load_spec("")
    with pytest.raises(SpecError, match=r"no such file\n.*/dev/stdin"):
        load_spec("-")


def test_a_directory_is_no_spec(desk: Desk) -> None:
    desk.write(BASE)
    with pytest.raises(SpecError, match=r"this is a directory, not a spec\n.*job\.yaml"):
        load_spec(desk.path.parent)


def test_an_unreadable_file_is_named(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SpecError, match="cannot be read: Permission denied"):
        load_spec(desk.path)


def test_a_path_that_cannot_be_one_is_named() -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec("a\x00b")
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec("a" * 5000)
    with pytest.raises(SpecError, match="no such file"):
        load_spec("caf\udce9.yaml")


@pytest.mark.parametrize("lr", ["0.00001", "1e-05", "3e-4", "1", "123456789.125"])
def test_row_108_a_stored_copy_reads_back_equal(desk: Desk, lr: str, tmp_path: Path) -> None:
    text = changed(("lr: 1e-3", f"lr: {lr}"), ("device: cpu", "heartbeat_timeout: 500ms, mtbf: {node: 30d}"))
    spec = desk.load(text)
    stored = json.dumps(spec_to_json(spec))
    again = spec_from_json(json.loads(stored))
    assert again == spec
    assert spec_digest(again) == spec_digest(spec)
    copy = tmp_path / "spec.json"
    copy.write_text(stored)
    assert load_spec(copy) == spec


def test_free_form_values_survive_the_stored_copy(desk: Desk) -> None:
    spec = desk.load(
        kwargs_spec('{a: 1e-05, b: 1, c: 1.0, d: "é\U0001f600", e: [~, {f: false}], g: 0x1fffffffffffffffff}')
    )
    again = spec_from_json(json.loads(json.dumps(spec_to_json(spec))))
    assert again == spec
    assert isinstance(again.model, PythonModel)
    assert type(again.model.kwargs["b"]) is int
    assert type(again.model.kwargs["c"]) is float


def test_the_digest_tells_specs_apart_and_nothing_else(desk: Desk) -> None:
    one = spec_digest(desk.load())
    assert len(one) == 64 and int(one, 16)
    assert spec_digest(desk.load("# a comment\nseed: 0\n" + changed(("lr: 1e-3", "lr: 0.001")))) == one
    assert spec_digest(desk.load(BASE, "max_steps=41")) != one
    assert spec_digest(desk.load(BASE, "tiers[1].keep=4")) != one


def test_a_damaged_stored_copy_is_refused_with_its_label(desk: Desk) -> None:
    data = spec_to_json(desk.load())
    data["max_steps"] = "many"
    data["training"]["optimizer"]["lr"] = math.nan
    data["extra"] = 1
    with pytest.raises(SpecError) as caught:
        spec_from_json(data, label="run/spec.json")
    assert {problem.key for problem in caught.value.problems} == {"max_steps", "training.optimizer.lr", "extra"}
    assert {(problem.file, problem.line) for problem in caught.value.problems} == {("run/spec.json", None)}


@pytest.mark.parametrize("data", [None, [], "x", 3, {}, {1: 2}, {"tiers": {"a": object()}}])
def test_a_stored_copy_of_anything_else_is_refused(data: object) -> None:
    with pytest.raises(SpecError):
        spec_from_json(data)


def test_a_stored_copy_nested_without_end_is_refused(desk: Desk) -> None:
    data = spec_to_json(desk.load(kwargs_spec("{}")))
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    data["model"]["kwargs"] = {"a": deep}
    with pytest.raises(SpecError, match="nested deeper"):
        spec_from_json(data)


def test_the_semantics_of_a_stored_copy_are_checked(desk: Desk) -> None:
    data = spec_to_json(desk.load())
    data["training"]["global_batch_size"] = 33
    with pytest.raises(SpecError, match="33 is not a multiple"):
        spec_from_json(data)


def test_no_code_is_imported_or_run_by_reading(desk: Desk) -> None:
    spec = desk.load(kwargs_spec("{}"))
    assert isinstance(spec.model, PythonModel)
    assert isinstance(spec.dataset, TextDataset)
    with pytest.raises(SpecError):
        desk.load(changed(("name: t", "name: !!python/object/apply:os.abort []")))


def test_a_problem_without_key_or_value_is_one_line() -> None:
    assert str(Problem("f", None, None, "", None, "broken")) == "f  broken"
    assert str(Problem("f", 1, 2, "a.b", "", "broken", "mend it")) == "f:1:2  a.b: broken (got nothing)\n    mend it"


def test_sgd_is_read(desk: Desk) -> None:
    optimizer = desk.load(changed(("name: adamw", "name: sgd\n    momentum: 0.9"))).training.optimizer
    assert optimizer == Sgd(name="sgd", lr=1e-3, momentum=0.9)
