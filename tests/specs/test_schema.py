"""The schema for editors, the shipped specs, and the tables that must keep up with the model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.specs.build import Desk

import dtrain.specs
from dtrain.specs.checks.outline import keys_of, places, wanted_at
from dtrain.specs.checks.wording import EXAMPLES
from dtrain.specs.load import load_spec
from dtrain.specs.models import GptModel, Spec
from dtrain.specs.places import MemoryTier
from dtrain.specs.schema import json_schema
from dtrain.specs.template import TEMPLATE
from dtrain.specs.text.yaml12 import parse

SPECS = Path(dtrain.specs.__file__).parent


def definitions() -> dict[str, dict[str, Any]]:
    schema = json_schema()
    return {"": schema, **schema["$defs"]}


def test_the_schema_is_closed_described_and_the_same_every_time() -> None:
    assert json.dumps(json_schema()) == json.dumps(json_schema())
    assert json_schema()["$schema"].startswith("https://json-schema.org/")
    assert "$id" not in json.dumps(json_schema())
    for name, definition in definitions().items():
        assert definition["additionalProperties"] is False, name
        assert definition["description"], name


def test_every_key_is_described() -> None:
    tags = {"type", "name"}
    for name, definition in definitions().items():
        for key, value in definition["properties"].items():
            assert key in tags or "$ref" in value or value.get("description"), f"{name}.{key}"


def test_units_may_be_written_in_an_editor() -> None:
    kinds = json_schema()["$defs"]["Cluster"]["properties"]["heartbeat_timeout"]
    assert {"number", "string"} == {option["type"] for option in kinds["anyOf"]}


def test_every_required_key_has_an_example_that_is_right() -> None:
    required = {
        (*place.names, key)
        for place in places().values()
        for model in place.variants.values()
        for key, info in model.model_fields.items()
        if info.is_required()
    }
    assert required == set(EXAMPLES)
    for names, line in EXAMPLES.items():
        root, problems = parse(line, "example")
        assert root is not None and not problems
        assert line.startswith(f"{names[-1]}: ")


def test_the_examples_of_blocks_make_a_spec(desk: Desk) -> None:
    text = "\n".join(EXAMPLES[(key,)] for key in ("output_dir", "max_steps", "model", "dataset", "training"))
    assert desk.load(text).world_size == 1


def test_every_key_of_the_model_has_words_for_its_kind() -> None:
    for place in places().values():
        for key in keys_of(place):
            assert "something else" not in wanted_at((*place.names, key))


@pytest.mark.parametrize("path", sorted((SPECS / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_the_shipped_examples_are_right(path: Path) -> None:
    assert isinstance(load_spec(path), Spec)


def test_the_small_example_is_small() -> None:
    spec = load_spec(SPECS / "examples" / "tiny-gpt.yaml")
    model = spec.model
    assert isinstance(model, GptModel)
    block = (
        2 * model.d_model**2 + 2 * model.d_model * model.kv_heads * model.head_dim + 3 * model.d_model * model.ff_dim
    )
    assert 1e6 < model.n_layers * block + 2 * model.vocab_size * model.d_model < 3e6
    assert (spec.world_size, spec.micro_batches, spec.cluster.device) == (2, 4, "cpu")
    assert spec.memory_tier == MemoryTier(type="memory", every=1)


def test_the_template_is_right_and_commented(desk: Desk) -> None:
    spec = desk.load(TEMPLATE)
    assert spec.world_size == 2
    assert TEMPLATE.count("#") > 15
    assert max(map(len, TEMPLATE.splitlines())) <= 110


def test_reading_specs_needs_no_torch_and_nothing_else_of_dtrain() -> None:
    code = (
        "import sys; import dtrain.specs.load, dtrain.specs.schema, dtrain.specs.template;"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('dtrain.')};"
        "assert rooms == {'specs'}, rooms;"
        "import dtrain.cli.validate;"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
