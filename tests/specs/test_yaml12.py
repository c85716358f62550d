"""The text of a spec: YAML 1.2 values, and every known trap ends in one clear line with a position."""

import math
import resource
import time

import pytest
from tests.specs.build import BASE, Desk, changed

from dtrain.specs.errors import SpecError
from dtrain.specs.load import load_spec
from dtrain.specs.text.tree import plain
from dtrain.specs.text.yaml12 import MAX_BYTES, MAX_VALUES, parse, resolve


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-4", 1e-4), ("5E-4", 5e-4), ("1E-4", 1e-4), ("1e5", 1e5), ("1.0e4", 1e4), ("-2.5e+3", -2500.0)),
        *((".5", 0.5), ("5.", 5.0), ("3.10", 3.1), ("0.1", 0.1), ("+1.5", 1.5)),
        *(("0", 0), ("7", 7), ("-7", -7), ("+7", 7), ("010", 10), ("08", 8), ("0o10", 8), ("0x1F", 31)),
        *(("true", True), ("True", True), ("TRUE", True), ("false", False), ("False", False)),
        *(("null", None), ("~", None), ("", None), ("Null", None)),
        *((word, word) for word in ("yes", "no", "on", "off", "Yes", "NO", "On", "y", "n", "tRUE", "nULL")),
        *((word, word) for word in ("1_000", "1:30", "1:30:00", "2024-01-31", "2024-01-31 10:00:00", "0b11")),
        *((word, word) for word in ("1e", "e5", ".", "-", "+", "0x", "0o8", "1.2.3", "1,5", "10%", "10GiB/s", "=")),
        *((".inf", math.inf), ("-.INF", -math.inf)),
    ],
)
def test_plain_values_are_those_of_the_core_schema(text: str, value: object) -> None:
    got = resolve(text)
    assert got == value
    assert type(got) is type(value)


def test_nan_is_a_float() -> None:
    value = resolve(".nan")
    assert isinstance(value, float) and math.isnan(value)


@pytest.mark.parametrize("text", ["'1'", '"1e-3"', "'true'", '"null"', "''"])
def test_quoted_values_stay_text(text: str) -> None:
    node, problems = parse(f"a: {text}", "f")
    assert node is not None and not problems
    assert plain(node) == {"a": text[1:-1]}


def test_core_tags_are_read() -> None:
    node, problems = parse("a: !!str 10\nb: !!float 3\nc: !!int 4\nd: ! 5\ne: !!null ~", "f")
    assert node is not None and not problems
    assert plain(node) == {"a": "10", "b": 3.0, "c": 4, "d": "5", "e": None}


def test_aliases_are_read() -> None:
    node, problems = parse("a: &x {k: [1, 2]}\nb: *x\nc: [*x, *x]", "f")
    assert node is not None and not problems
    one = {"k": [1, 2]}
    assert plain(node) == {"a": one, "b": one, "c": [one, one]}


def test_pairs_of_json_escapes_are_one_character() -> None:
    node, problems = parse('{"a": "\\ud83d\\ude00"}', "f")
    assert node is not None and not problems
    assert plain(node) == {"a": "\U0001f600"}


def test_json_is_read() -> None:
    node, problems = parse('{"a":1e-05,"b":[true,null,"x\\n"],"c":{"d":-2.5}}', "f")
    assert node is not None and not problems
    assert plain(node) == {"a": 1e-05, "b": [True, None, "x\n"], "c": {"d": -2.5}}


BRACKETS = "[" * 3000
DEEP_BLOCKS = "\n".join(" " * level + "a:" for level in range(1000))

TRAPS: dict[str, tuple[str | bytes, int | None, int | None, str, str]] = {
    # what is wrong: text, line, column, part of the message, part of the hint
    "tab": ("max_steps: 4\ntraining:\n\tlr: 4\n", 3, 1, "a tab is used for indentation", "spaces"),
    "tab below a value": ("training:\n  a: 1\n\tb: 2\n", 3, 1, "a tab is used for indentation", "spaces"),
    "tab after spaces": ("training:\n  a: 1\n  \tb: 2\n", 3, 3, "a tab is used for indentation", "spaces"),
    "tab after a colon": ("name:\tx\n", 1, 6, "a tab stands where only spaces may", "replace the tab"),
    "utf-16": (BASE.encode("utf-16"), 1, 1, "UTF-16", "save the file as UTF-8"),
    "latin-1": (b"seed: 1\nname: caf\xe9\n", 2, 10, "byte 0xe9 is not UTF-8", "save the file as UTF-8"),
    "control character": ("seed: 1\nname: \x07\n", 2, 7, "U+0007 cannot stand in YAML", "remove it"),
    "nul": (b"\x00", 1, 1, "U+0000 cannot stand in YAML", "remove it"),
    "empty": ("", None, None, "the spec is empty", "dtrain init"),
    "only a comment": ("# nothing\n", None, None, "the spec is empty", "dtrain init"),
    "only null": ("~\n", 1, 1, "the spec is empty", "dtrain init"),
    "list": ("- name: x\n", 1, 1, "a block of keys, not a list", "remove the dash"),
    "flow list": ("[1]", 1, 1, "a block of keys, not a list", "bracket"),
    "scalar": ("hello\n", 1, 1, "a block of keys, not a single value", "dtrain init"),
    "no space": ("name:x\n", 1, 1, "not a single value", "`name: x`"),
    "no space, more below": ("name:x\noutput_dir: y\n", 1, 1, "no space after the colon of `name:`", "`name: x`"),
    "no space in between": ("seed: 1\nname:x\nmax_steps: 2\n", 2, 1, "no space after the colon", "`name: x`"),
    "no space, indented": ("training:\n  a: 1\n  lr:1e-3\n", 3, 3, "no space after the colon", "`lr: 1e-3`"),
    "two documents": (BASE + "---\nname: u\n", 17, 1, "a second document", "remove this `---`"),
    "text behind the end": (BASE + "...\nname: u\n", 18, 1, "text before or after the document", "remove this"),
    "no-break space in front": (BASE + "\u00a0seed: 1\n", 17, 1, "a no-break space (U+00A0)", "normal space"),
    "no-break space behind": ("name:\u00a0x\nseed: 1\n", 1, 6, "a no-break space (U+00A0)", "(U+0020)"),
    "zero-width space": (BASE + "seed: 1\u200b\n", 17, 7, "a zero-width space", "normal space"),
    "brackets": (BRACKETS, 1, 52, "nested deeper than 50 levels", "closed"),
    "brackets, closed": (BRACKETS + "]" * 3000, 1, 52, "nested deeper than 50 levels", "closed"),
    "braces": ("{a: " * 3000, 1, 202, "nested deeper than 50 levels", "closed"),
    "dashes": ("- " * 3000, 1, 103, "nested deeper than 50 levels", "closed"),
    "question marks": ("? " * 3000, 1, 103, "nested deeper than 50 levels", "closed"),
    "blocks": (DEEP_BLOCKS, 51, 51, "nested deeper than 50 levels", "closed"),
    "alias of itself": ("a: &a [*a]\n", 1, 8, "stands inside its own anchor", "remove the alias"),
    "alias of nothing": ("a: *b\n", 1, 4, "alias `*b` has no anchor", "&b"),
    "star": ("name: *\n", 1, 8, "`*` starts an alias", "quotes"),
    "anchor twice": ("a: &x 1\nb: &x 2\n", 2, 4, "anchor `&x` is given twice", "rename"),
    "unknown tag handle": ("name: !e!x y\n", 1, 7, "tag handle", ""),
    "open bracket": ("a: [1,\nb: 2\n", 3, 1, "a comma or a closing bracket is missing (the bracket of line 1)", "`[`"),
    "open brace": ("a: {b: 1\nc: {}\n", 2, 2, "a comma or a closing bracket is missing", "`{`"),
    "variable in a flow block": (
        "d: {path: ${X}/t}\n",
        1,
        12,
        "a closing bracket is missing",
        "put text that holds `${` in",
    ),
    "open quote": ('a: "x\nb: 3\n', 1, 4, "this quote is not closed", "close it"),
    "colon in a value": ("name: a: b\n", 1, 8, "a second `: ` in one line", "quotes"),
    "indentation": ("training:\n    a: 1\n  b: 2\n", 3, 3, "the indentation fits no block", "one column"),
    "backslash": ('a: "C:\\runs\\new"\nb: "\\q"\n', 2, 6, "an unknown escape", "single quotes"),
    "escape beyond Unicode": ('a: 1\nb: "\\UFFFFFFFF"\n', 2, 5, "no such character", "escapes"),
    "starts with @": ("name: @x\n", 1, 7, "unquoted text cannot start with this", "single quotes"),
    "starts with a backtick": ("name: `x`\n", 1, 7, "unquoted text cannot start with this", "single quotes"),
    "no key": ("a: {: 1}\n", 1, 5, "a key or a value is missing", ""),
    "YAML 2": ("%YAML 2.0\n---\na: 1\n", 1, 1, "incompatible", ""),
}


@pytest.mark.parametrize("name", TRAPS)
def test_row_113_a_trap_of_the_text_is_one_clear_problem(desk: Desk, name: str) -> None:
    text, line, column, message, hint = TRAPS[name]
    problem = desk.problem(text)
    assert (problem.line, problem.column) == (line, column)
    assert message in problem.message
    assert hint in (problem.hint or "")
    assert problem.file == str(desk.path)


ONE_FAULT: dict[str, tuple[str, int, int, str, str]] = {
    # the rest of the spec is right: text, line, column, key, part of the message
    "key twice": (BASE + "seed: 1\nseed: 2\n", 18, 1, "seed", "given twice, on line 17 and on line 18"),
    "key twice in a flow block": (
        changed(("keep: 3}", "keep: 3, every: 10}")), 16, 37, "tiers[1].every",
        "given twice on line 16, in columns 18 and 37",
    ),
    "key twice deep below": (
        changed(("    lr: 1e-3\n", "    lr: 1e-3\n    lr: 3e-4\n")), 12, 5, "training.optimizer.lr",
        "given twice, on line 11 and on line 12",
    ),
    "block twice": (
        BASE + "cluster: {nodes: 2, workers_per_node: 2}\n", 17, 1, "cluster", "on line 13 and on line 17",
    ),
    "merge key": (
        changed(("cluster:", "cluster: &c"), ("tiers:", "strategy: {<<: *c}\ntiers:")), 14, 12, "strategy.<<",
        "a merge key would mix in the block of line 13",
    ),
    "number as a key": (BASE + "1: x\n", 17, 1, "", "a key must be text, not 1"),
    "true as a key": (BASE + "true: x\n", 17, 1, "", "a key must be text, not true"),
    "null as a key": (BASE + "~: x\n", 17, 1, "", "a key must be text, not ~"),
    "nothing as a key": (BASE + "strategy: {? , tp: 1}\n", 17, 13, "strategy", "a key must be text, not nothing"),
    "list as a key": (BASE + "? [a]\n: 1\n", 17, 3, "", "a key must be text, not a block or a list"),
    "python tag": (
        changed(("path: \"python:stdlib\"", "path: !!python/object/apply:os.getcwd []")), 5, 29, "dataset.path",
        "the tag `!!python/object/apply:os.getcwd` is refused",
    ),
    "tag of your own": (changed(("name: t", "name: !mine t")), 1, 7, "name", "the tag `!mine` is refused"),
    "binary": (changed(("name: t", "name: !!binary aGk=")), 1, 7, "name", "the tag `!!binary` is refused"),
    "tag that does not fit": (BASE + "seed: !!int x\n", 17, 7, "seed", "the tag `!!int` is refused"),
    "set": (BASE + "strategy: !!set {}\n", 17, 11, "strategy", "the tag `!!set` is refused"),
    "half a character": (changed(("runs/t", '"\\ud800"')), 2, 13, "output_dir", "half of a surrogate pair"),
    "no space in a flow block": (
        changed(("warmup_steps: 5", "warmup_steps:5")), 12, 29, "training.scheduler", "no space after the colon",
    ),
    "five thousand digits": (BASE + f"seed: {'9' * 5000}\n", 17, 7, "seed", "more than 1000 digits"),
    "five thousand hex digits": (BASE + f"seed: 0x{'f' * 5000}\n", 17, 7, "seed", "more than 1000 digits"),
    "tab in a value": (changed(("name: t", "name: t\n  \tu")), 2, 3, "", "a tab is used for indentation"),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_FAULT)
def test_rows_109_and_113_a_fault_in_an_otherwise_right_spec_stands_alone(desk: Desk, name: str) -> None:
    text, line, column, key, message = ONE_FAULT[name]
    problem = desk.problem(text)
    assert (problem.line, problem.column, problem.key) == (line, column, key)
    assert message in problem.message


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + BASE,
        BASE.replace("\n", "\r\n"),
        "---\n" + BASE,
        BASE + "...\n",
        "%YAML 1.2\n---\n" + BASE,
        "# caf\u00e9 \u00a0 \U0001f600\n" + BASE,
        BASE + "\n\n# end",
    ],
)
def test_harmless_things_are_read(desk: Desk, text: str) -> None:
    assert desk.load(text) == desk.load(BASE)


def alias_bomb(width: int = 10, levels: int = 12) -> str:
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


ALIAS_CHAIN = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 3000))])
MANY_ITEMS = "a: [" + "1," * 400_000 + "]"


def most_memory() -> int:
    """Return the most bytes that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (alias_bomb(), f"more than {MAX_VALUES} values"),
        (alias_bomb(2, 40), f"more than {MAX_VALUES} values"),
        (ALIAS_CHAIN, "nested deeper than 50 levels"),
        (BRACKETS, "nested deeper than 50 levels"),
        (MANY_ITEMS, f"more than {MAX_VALUES} values"),
        ("#" * (MAX_BYTES + 1), "larger than 1 MiB"),
    ],
)
def test_row_113_bombs_are_refused_fast_and_in_little_memory(desk: Desk, text: str, message: str) -> None:
    before, start = most_memory(), time.process_time()
    assert message in desk.problem(text).message
    assert time.process_time() - start < 1
    assert most_memory() - before < 100e6


def test_a_flood_of_faults_is_counted_not_printed(desk: Desk) -> None:
    start = time.process_time()
    problems = desk.problems(BASE + "".join(f"key{number}: 1\n" for number in range(3000)))
    assert time.process_time() - start < 3
    assert 50 < len(problems) < 300
    assert "more problems" in problems[-1].message


def test_an_endless_file_is_not_read_to_its_end(desk: Desk) -> None:
    with pytest.raises(SpecError, match="larger than 1 MiB"):
        load_spec("/dev/zero")
