"""One spec for one node and for many: on one node there is nobody to keep copies, so the peer tier is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.planners.build import MakeSpec

from dtrain.cli.validate import validate
from dtrain.planners.machine import Machine
from dtrain.planners.plan import make_plan
from dtrain.specs.errors import SpecError
from dtrain.specs.load import load_spec, spec_from_json, spec_to_json

EVERY_KEY = """\
name: tiny-gpt
output_dir: runs/tiny-gpt
seed: 7
max_steps: 200
model:                       # type: gpt | hf | python
  {type: gpt, n_layers: 4, d_model: 128, n_heads: 4, vocab_size: 256}
dataset:                     # type: text | jsonl | tokens | python | hf
  {type: text, path: "python:stdlib", tokenizer: bytes, seq_len: 128}
training:
  global_batch_size: 32      # samples per step, over all ranks
  micro_batch_size: 4        # samples per rank and pass; accumulation is derived
  max_grad_norm: 1.0
  precision: fp32            # fp32 | bf16-mixed | bf16 | fp16-mixed
  optimizer: {name: adamw, lr: 3e-4, weight_decay: 0.1}
  scheduler: {name: cosine, warmup_steps: 20}
strategy:                    # degrees; their product is the world size
  {dp_replicate: 2, dp_shard: 1, tp: 1, pp: 1}
cluster:
  nodes: 1                   # or "2:4" (elastic)
  workers_per_node: 2
  device: auto               # auto | cpu | cuda
  rendezvous: auto           # auto | host:port | slurm
  max_restarts: 3
  heartbeat_timeout: 10s
  mtbf: {process: 24h, node: 720h}
  channels:
    compute: {interface: auto}
    storage: {interface: auto, bandwidth: auto}
tiers:                       # fastest first; `every` in steps or auto
  - {type: memory, every: 1}
  - {type: peer, replicas: 1}
  - {type: disk, path: checkpoints, every: auto, keep: 3}
  - {type: object, url: "s3://bucket/run", every: auto, keep: 2}
checkpoint:
  max_overhead: 1%           # of step time; the run keeps this budget
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(EVERY_KEY, encoding="utf-8")
    return path


def test_the_spec_with_every_key_is_valid_and_what_is_left_out_is_told(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate(str(path), [], as_json=False) == 0
    said = capsys.readouterr().out
    assert "tiers: memory every 1 + disk every auto + object every auto\n" in said
    assert "warning: the peer tier is left out: with cluster.nodes 1 there is no other node to keep copies" in said


def test_its_plan_rests_on_no_peer_and_warns(path: Path, laptop: Machine) -> None:
    spec = load_spec(path)
    plan = make_plan(spec, laptop)
    assert [tier.type for tier in plan.tiers] == ["memory", "disk", "object"]
    assert [words for words in plan.warnings if "the peer tier is left out" in words]
    without = make_plan(
        load_spec(path, ["tiers=[{type: memory}, {type: disk}, {type: object, url: 's3://b'}]"]), laptop
    )
    assert (plan.memory, plan.forward, plan.backward) == (without.memory, without.forward, without.backward)
    assert not [words for words in without.warnings if "peer" in words]


def test_it_is_kept_in_the_spec_and_used_from_two_nodes_on(path: Path, laptop: Machine) -> None:
    kept = spec_from_json(spec_to_json(load_spec(path)))
    assert [tier.type for tier in kept.tiers] == ["memory", "peer", "disk", "object"]
    spec = load_spec(path, ["cluster.nodes=2", "strategy.dp_replicate=4"])
    plan = make_plan(spec, laptop)
    assert spec.peer_tier is not None
    assert [tier.type for tier in plan.tiers] == ["memory", "peer", "disk", "object"]
    assert not [words for words in plan.warnings if "left out" in words]


def test_more_copies_than_one_name_nodes_that_must_be_there(path: Path) -> None:
    with pytest.raises(SpecError, match="2 other nodes are to get a copy, and the job has 1 node"):
        load_spec(path, ["tiers[1].replicas=2"])


def test_a_faster_tier_is_still_needed_below_it(make_spec: MakeSpec, path: Path) -> None:
    with pytest.raises(SpecError, match="there is no `memory` tier"):
        load_spec(path, ["tiers=[{type: peer}, {type: disk}]"])
    assert make_spec(tiers=[{"type": "memory"}, {"type": "peer"}]).peer_tier is None
