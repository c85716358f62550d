from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.planners.build import MakeSpec

from dtrain.cli import machine
from dtrain.cli.plan.command import plan as plan_command
from dtrain.cli.plan.page import render
from dtrain.planners.elastic import elastic_plan
from dtrain.planners.machine import Machine
from dtrain.planners.plan import Plan, make_plan

TINY_80 = """\
tiny-gpt · 4 layers, 918,656 parameters, state 10.5 MiB
2 ranks on 1 node (cpu) · dp_replicate 2 · fp32 · adamw · 200 steps
batch 32 = 2 ranks x 4 samples x 4 passes; 4,096 tokens per step

One step, to scale
  passes    F────B─────────F─────B─────────F─────B─────────F────B──────────X─U─
  copy      █····█·········█·····█·········█·····█·························
  to disk                                        ▒▒▒▒▒▒▒▒
"""


def page(plan: Plan, width: int, **console: object) -> str:
    return render(plan, Console(width=width, file=io.StringIO(), markup=False, highlight=False, **console))  # type: ignore[arg-type]


def test_page_at_80_columns(make_spec: MakeSpec, laptop: Machine) -> None:
    text = page(make_plan(make_spec(), laptop), 80)
    assert text.startswith(TINY_80)
    for number in ("600 KiB", "1.17 MiB", "128 KiB", "5.26 MiB", "10.5 MiB", "40.3 ms", "31.5 MiB", "goodput 99.1 %"):
        assert number in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_cuts_nothing_off(make_spec: MakeSpec, laptop: Machine, width: int) -> None:
    plan = make_plan(make_spec(), laptop)
    narrow, wide = page(plan, width), page(plan, 200)
    assert "…" not in narrow
    missing = {word.strip(",;:()") for word in wide.split()} - {word.strip(",;:()") for word in narrow.split()}
    drawn = set("─█·▒")
    assert {word for word in missing if word[0].isalnum() and not set(word) & drawn} <= {"when"}, "it heads the names"


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("batch", [8, 32, 64, 4096])
def test_no_line_is_wider_than_the_terminal(make_spec: MakeSpec, laptop: Machine, width: int, batch: int) -> None:
    text = page(make_plan(make_spec(training={"global_batch_size": batch}), laptop), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert all(line == line.rstrip() for line in text.splitlines())


LARGE = {"type": "gpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 32000}
ALL_TIERS = [
    {"type": "memory"}, {"type": "peer", "replicas": 3}, {"type": "disk", "every": 2},
    {"type": "object", "url": "s3://bucket/folder", "keep_every": 1000},
]  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "small": {},
    "many nodes, all tiers, an evaluation": {
        "name": "a-rather-long-name-of-a-job-somewhere", "model": LARGE, "tiers": ALL_TIERS, "max_steps": 100_000,
        "cluster": {
            "nodes": "4:16", "workers_per_node": 8, "nodes_per_zone": 4, "hardware": {"network_bandwidth": 3e8},
        },
        "training": {"global_batch_size": 2048, "micro_batch_size": 1, "precision": "bf16-mixed"},
        "strategy": {"dp_shard": 8, "tp": 2}, "dataset": {"type": "text", "path": "x", "seq_len": 2048},
        "evaluation": {"every": 100, "batches": 7, "fraction": 0.01},
    },
    "what does not fit": {
        "model": LARGE, "tiers": [{"type": "memory", "every": "auto"}, *ALL_TIERS[1:]], "strategy": {"dp_shard": 16},
        "cluster": {"nodes": 4, "workers_per_node": 8},
        "training": {"global_batch_size": 32, "micro_batch_size": 1},
    },
    "a model that is not counted": {"model": {"type": "python", "entry": "module:function"}},
}  # fmt: skip
FIGURE = re.compile(r"\d[\d.,]* (?:[KMGT]iB(?:/s)?|TFLOP/s|ms|µs|s|min|h|d|%)(?![\w/])")


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("width", [80, 120])
def test_a_page_keeps_to_the_width_and_breaks_no_figure(
    make_spec: MakeSpec, dgx: Machine, name: str, width: int
) -> None:
    plan = elastic_plan(make_spec(**JOBS[name]), dgx)
    text, wide = page(plan, width), page(plan, 10_000)
    assert max(len(line) for line in text.splitlines()) <= width
    assert sorted(FIGURE.findall(text)) == sorted(FIGURE.findall(wide)), "a figure stays beside its unit"
    assert plan.changes or name != "what does not fit"


def test_a_table_of_usual_figures_needs_no_second_line_at_80_columns(make_spec: MakeSpec, dgx: Machine) -> None:
    text = page(elastic_plan(make_spec(**JOBS["many nodes, all tiers, an evaluation"]), dgx), 80)
    (heads,) = [line for line in text.splitlines() if line.lstrip().startswith("when ")]
    assert heads.split() == ["when", "once", "in", "lost", "work", "back", "after", "read", "from"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_page_can_be_written_in_whatever_the_terminal_reads(make_spec: MakeSpec, dgx: Machine, encoding: str) -> None:
    plan = elastic_plan(make_spec(**JOBS["many nodes, all tiers, an evaluation"]), dgx)
    text = render(plan, Console(width=80, file=io.TextIOWrapper(io.BytesIO(), encoding=encoding)))
    text.encode(encoding)
    assert "\x1b" not in text
    assert "?" not in text, "nothing is lost"
    assert ("F──B" in text) == (encoding == "utf-8")


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_wants_no_colour_gets_none(
    make_spec: MakeSpec, laptop: Machine, variables: dict[str, str]
) -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, _environ=variables)
    assert "\x1b[3" not in render(make_plan(make_spec(), laptop), console)


def test_many_micro_batches_are_elided_in_the_middle(make_spec: MakeSpec, laptop: Machine) -> None:
    text = page(make_plan(make_spec(training={"global_batch_size": 256}), laptop), 80)
    passes = next(line for line in text.splitlines() if line.startswith("  passes"))
    assert passes.count("F") == passes.count("B") == 5
    assert "…" in passes
    assert "27 micro-batches left out" in text


def test_a_stall_is_drawn(make_spec: MakeSpec, laptop: Machine) -> None:
    slow = {"workers_per_node": 2, "channels": {"storage": {"bandwidth": "10MB/s"}}}
    text = page(make_plan(make_spec(cluster=slow), laptop), 80)
    words = " ".join(text.split())
    assert "S stall" in text
    assert "the update waits" in words
    assert "of it fits" in words
    assert "Warnings" in text


def test_what_would_have_to_change_is_said_with_figures_that_are_enough(make_spec: MakeSpec, laptop: Machine) -> None:
    def made(batch: int = 32, bandwidth: str | float = "10MB/s", overhead: float = 0.01) -> Plan:
        cluster = {"workers_per_node": 2, "channels": {"storage": {"bandwidth": bandwidth}}}
        tiers = [{"type": "memory", "every": "auto"}]
        training, checkpoint = {"global_batch_size": batch}, {"max_overhead": overhead}
        return make_plan(make_spec(cluster=cluster, training=training, tiers=tiers, checkpoint=checkpoint), laptop)

    short = made()
    assert short.tiers[0].every > 1
    text = " ".join(page(short, 80).split())
    assert "To store more often" in text
    batch = int(found(r"training\.global_batch_size (\d+)", text))
    rate = float(found(r"a copy at ([\d.]+) MiB/s", text))
    percent = float(found(r"checkpoint\.max_overhead ([\d.]+)%", text))
    assert made(batch=batch).tiers[0].every == 1
    assert made(batch=batch - 8).tiers[0].every > 1
    assert made(bandwidth=rate * 2**20).tiers[0].every == 1
    assert made(bandwidth=rate * 0.98 * 2**20).tiers[0].every > 1
    assert made(overhead=percent / 100).tiers[0].every == 1
    assert made(overhead=percent / 101).tiers[0].every > 1
    assert not made(batch=batch).changes


def test_a_disk_that_would_be_fast_enough_is_named(make_spec: MakeSpec, dgx: Machine) -> None:
    def every(bandwidth: str | float) -> Plan:
        cluster = {"workers_per_node": 2, "hardware": {"disk_bandwidth": bandwidth, "flops": "1TFLOP/s"}}
        tiers = [{"type": "memory"}, {"type": "disk"}]
        return make_plan(make_spec(cluster=cluster, tiers=tiers, training={"global_batch_size": 2048}), dgx)

    slow = every("1MB/s")
    assert slow.tiers[1].every > 1
    rate = float(found(r"needs ([\d.]+) MiB/s per node", " ".join(slow.changes)))
    assert every(rate * 2**20).tiers[1].every == 1
    assert every(rate * 0.98 * 2**20).tiers[1].every > 1


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]


def test_colour_and_ascii(make_spec: MakeSpec, laptop: Machine) -> None:
    plan = make_plan(make_spec(), laptop)
    assert "\x1b[" in page(plan, 80, force_terminal=True, color_system="standard")
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    text = render(plan, Console(width=80, file=ascii_file))
    text.encode("ascii")
    assert "F----B" in text


def test_an_uncounted_model_and_no_tiers_have_a_page(make_spec: MakeSpec, laptop: Machine) -> None:
    unknown = page(make_plan(make_spec(model={"type": "python", "entry": "m:f"}), laptop), 80)
    assert "? parameters" in unknown
    assert "--profile" in unknown
    without = page(make_plan(make_spec(tiers=[]), laptop), 80)
    assert "none: a fault starts the run again" in without


def test_every_tier_has_its_figures_on_the_page(make_spec: MakeSpec, laptop: Machine) -> None:
    disk, bucket = {"type": "disk", "every": 10, "keep_every": 100}, {"type": "object", "url": "s3://b", "keep": 2}
    text = page(make_plan(make_spec(tiers=[{"type": "memory"}, disk, bucket]), laptop), 120)
    assert "▒ write to disk behind it, 40.3 ms, every 10 steps\n" in text
    assert "    upload to the object store behind it, 610 ms, every 20 steps\n" in text
    assert "disk keeps the newest 3 and one every 100 steps, at most 63.1 MiB in 24 files and folders\n" in text
    assert "object keeps the newest 2, at most 31.5 MiB in 9 objects\n" in text
    assert re.search(r"\n  object  20 steps \(auto\) +10.5 MiB +610 ms +2 +31.5 MiB +process, node, cluster\n", text)


def test_without_a_disk_the_upload_is_drawn(make_spec: MakeSpec, laptop: Machine) -> None:
    bucket = {"type": "object", "url": "s3://b"}
    text = page(make_plan(make_spec(tiers=[{"type": "memory"}, bucket]), laptop), 80)
    assert "\n  to object " in text
    assert "▒ upload to the object store behind it" in text
    assert "to disk" not in text


def write_spec(folder: Path) -> str:
    path = folder / "spec.yaml"
    path.write_text(
        "output_dir: out\nmax_steps: 20\n"
        "model: {type: gpt, n_layers: 2, d_model: 64, n_heads: 2}\n"
        "dataset: {type: text, path: 'python:stdlib', seq_len: 32}\n"
        "training: {global_batch_size: 8, micro_batch_size: 2, optimizer: {name: adamw, lr: 1e-3}}\n"
        "cluster: {device: cpu}\n",
        encoding="utf-8",
    )
    return str(path)


def test_command_prints_one_json_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(write_spec(tmp_path), ["max_steps=7"], as_json=True, profile=False) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["training"]["max_steps"] == 7
    assert captured.err == ""


def test_command_prints_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(write_spec(tmp_path), [], as_json=False, profile=False) == 0
    assert "Storage parameters" in capsys.readouterr().out


def test_command_refuses_a_bad_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(write_spec(tmp_path), ["max_step=7"], as_json=True, profile=False) == 78
    captured = capsys.readouterr()
    assert json.loads(captured.out)["exit_code"] == 78
    assert "max_step" in captured.err


def test_profile_needs_the_gpu_that_the_spec_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "nvidia_gpus", list)
    monkeypatch.setattr(machine, "AMD_DEVICE", tmp_path / "none")
    assert plan_command(write_spec(tmp_path), ["cluster.device=cuda"], as_json=False, profile=True) == 69
    assert "no GPU" in capsys.readouterr().err
