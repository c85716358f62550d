"""The summary at the end of a run."""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from dtrain.cli.view import state as view_state
from dtrain.cli.view.panel import step_line
from dtrain.cli.view.state import RunState, Series
from dtrain.cli.view.summary import status_of, summary, to_json

PLAN: dict[str, Any] = {
    "model": {"state_bytes_per_rank": 10 * 2**20},
    "iteration": {"micro_batches": 4, "forward_s": 0.010, "backward_s": 0.020, "optimizer_s": 0.010},
    "expected": {"overhead": 0.001, "stall_s": 0.00013},
}


def step(number: int, attempt: int = 1, **changes: Any) -> dict[str, Any]:
    record: dict[str, Any] = {"step": number, "attempt": attempt, "loss": 3.0, "time": 1000.0 + number, "step_s": 0.2}
    record |= {"forward_s": 0.048, "backward_s": 0.12, "optimizer_s": 0.02, "stall_s": 0.001}
    return record | {"snapshot_bytes": 11 * 2**20} | changes


def finished_state(path: Path) -> RunState:
    state = RunState(path, max_steps=20)
    state.take_event({"event": "attempt", "attempt": 1, "world": 2, "nodes": 1})
    for number in (1, 2):
        state.take_step(step(number, step_s=9.0, forward_s=8.0, stall_s=5.0))
    for number in range(3, 11):
        state.take_step(step(number, snapshot_bytes=0 if number % 2 else 11 * 2**20))
    state.take_event({"event": "fault", "attempt": 1, "rank": 1, "kind": "exit", "detail": "1", "time": 1010.5})
    state.take_event({"event": "attempt", "attempt": 2, "world": 2, "nodes": 1})
    state.take_event({"event": "restored", "attempt": 2, "step": 9, "tier": "memory", "state_digest": "d9"})
    for number in range(10, 21):
        state.take_step(step(number, attempt=2, loss=2.5, time=1005.0 + number))
    state.take_event({"event": "committed", "attempt": 2, "step": 20, "tier": "memory"})
    state.take_event({"event": "committed", "attempt": 2, "step": 20, "tier": "disk"})
    state.take_event({"event": "finished", "attempt": 2, "step": 20, "state_digest": "d20", "seconds": 61.0})
    return state


def printed(
    state: RunState, plan: dict[str, Any], outcome: dict[str, Any], width: int = 80, is_terminal: bool = False
) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=is_terminal, no_color=True, _environ={})
    summary(console, state, plan, outcome)
    return file.getvalue()


def test_the_numbers(tmp_path: Path) -> None:
    document = to_json(finished_state(tmp_path), PLAN, {})
    json.loads(json.dumps(document, allow_nan=False))
    figures = document["figures"]
    assert figures["forward_s"] == pytest.approx({"predicted": 0.010, "measured": 0.012, "ratio": 1.2})
    assert figures["backward_s"] == pytest.approx({"predicted": 0.020, "measured": 0.030, "ratio": 1.5})
    assert figures["optimizer_s"] == pytest.approx({"predicted": 0.010, "measured": 0.020, "ratio": 2.0})
    assert figures["step_s"] == pytest.approx({"predicted": 0.13, "measured": 0.2, "ratio": 0.2 / 0.13})
    assert figures["stall"] == pytest.approx({"predicted": 0.001, "measured": 0.005, "ratio": 5.0})
    assert figures["overhead"] == {"predicted": 0.001, "measured": None, "ratio": None}
    assert figures["snapshot_bytes"] == {"predicted": 10 * 2**20, "measured": 11 * 2**20, "ratio": 1.1}
    assert (document["status"], document["step"], document["steps_run"]) == ("finished", 20, 21)
    assert (document["restarts"], document["repeated_steps"], document["seconds"]) == (1, 1, 61.0)
    assert document["lost_s"] == pytest.approx(0.2 + (1015 - 0.2 - 1010.5))
    assert (document["state_digest"], document["state_digest_step"]) == ("d20", 20)
    assert document["faults"] == ["rank 1 exited with code 1"]


def test_a_backward_pass_is_measured_with_its_part_of_the_exchange_and_predicted_so(tmp_path: Path) -> None:
    plan = PLAN | {"iteration": {**PLAN["iteration"], "exchange_s": 0.04}}
    assert to_json(finished_state(tmp_path), plan, {})["figures"]["backward_s"] == pytest.approx(
        {"predicted": 0.020 + 0.04 / 4, "measured": 0.030, "ratio": 1.0}
    )


def test_the_text_has_the_same_numbers(tmp_path: Path) -> None:
    text = printed(finished_state(tmp_path), PLAN, {})
    assert "finished      20 steps in 1 min 01 s, loss 2.5000\n" in text
    assert "lost work     1 restart, 1 step repeated (200 ms), 4.30 s between fault and next step\n" in text
    assert "state digest  d20  (step 20)\n" in text
    for label, cells in {
        "forward, per pass": ("10.0 ms", "12.0 ms", "1.20x"),
        "backward, per pass": ("20.0 ms", "30.0 ms", "1.50x"),
        "optimizer update": ("10.0 ms", "20.0 ms", "2.00x"),
        "step": ("130 ms", "200 ms", "1.54x"),
        "stall, share of the step": ("0.10 %", "0.50 %", "5.00x"),
        "snapshot, per rank": ("10.0 MiB", "11.0 MiB", "1.10x"),
    }.items():
        row = next(line for line in text.splitlines() if line.startswith(f"{label} "))
        assert all(cell in row for cell in cells), row
    assert "\x1b" not in text
    assert "medians over 17 steps" in text


def test_memory_is_held_against_the_plan_once_the_run_has_told_it(tmp_path: Path) -> None:
    state, plan = finished_state(tmp_path), PLAN | {"memory": {"device_bytes_per_rank": 100 * 2**20}}
    assert "device_bytes" not in to_json(state, plan, {})["figures"]
    state.take_event({"event": "finished", "attempt": 2, "step": 20, "device_bytes_per_rank": 110 * 2**20})
    told = to_json(state, plan, {})["figures"]["device_bytes"]
    assert told == pytest.approx({"predicted": 100 * 2**20, "measured": 110 * 2**20, "ratio": 1.1})
    row = next(line for line in printed(state, plan, {}).splitlines() if line.startswith("memory of a rank, peak "))
    assert all(cell in row for cell in ("100.0 MiB", "110.0 MiB", "1.10x")), row
    assert "MALLOC_MMAP_THRESHOLD_" not in printed(state, plan, {}), "as planned"
    state.take_event({"event": "finished", "attempt": 2, "step": 20, "device_bytes_per_rank": 210 * 2**20})
    assert "MALLOC_MMAP_THRESHOLD_" in printed(state, plan, {}), "why so much, and what helps"
    plan["memory"]["device_limit_bytes"] = 2**30
    assert "MALLOC_MMAP_THRESHOLD_" not in printed(state, plan, {}), "a GPU has no C library"


@pytest.mark.parametrize("plan", [{}, {"iteration": None, "expected": {"overhead": None}}, {"model": 3}])
def test_what_the_plan_does_not_say_is_not_made_up(tmp_path: Path, plan: dict[str, Any]) -> None:
    state = finished_state(tmp_path)
    figures = to_json(state, plan, {})["figures"]
    assert {figure["predicted"] for figure in figures.values()} == {None}
    assert {figure["ratio"] for figure in figures.values()} == {None}
    assert figures["forward_s"]["measured"] is None  # the number of passes is the plan's
    assert figures["step_s"]["measured"] == pytest.approx(0.2)
    assert printed(state, plan, {}).count("n/a") >= 12


def test_a_plan_with_holes_keeps_what_it_has(tmp_path: Path) -> None:
    plan = {"iteration": {"micro_batches": 4, "forward_s": 0.01, "backward_s": None, "optimizer_s": math.nan}}
    figures = to_json(finished_state(tmp_path), plan, {})["figures"]
    assert figures["forward_s"]["ratio"] == pytest.approx(1.2)
    assert figures["backward_s"]["predicted"] is figures["step_s"]["predicted"] is None
    assert figures["optimizer_s"]["predicted"] is None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("preempted", "preempted     stopped when asked to, after step 10 of 20"),
        ("interrupted", "interrupted   after step 10 of 20"),
        ("failed", "failed        after step 10 of 20"),
    ],
)
def test_the_other_ends_say_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    state = RunState(tmp_path / "runs" / "tiny", max_steps=20)
    state.take_step(step(10))
    state.take_event({"event": "committed", "attempt": 1, "step": 9, "tier": "disk"})
    state.take_event({"event": "fault", "attempt": 1, "rank": 1, "kind": "exit", "detail": "1", "step": 11})
    text = printed(state, PLAN, {"status": status, "seconds": 3.0})
    assert f"{words} in 3.00 s, loss 3.0000\n" in text
    assert "go on with    dtrain resume --from latest runs/tiny\n" in text
    assert "log           runs/tiny/logs/attempt-0001\n" in text
    assert ("rank 1 exited with code 1 at step 11" in text) == (status == "failed")


def test_a_run_without_a_step_has_no_table(tmp_path: Path) -> None:
    text = printed(RunState(tmp_path, max_steps=20), PLAN, {"status": "failed", "message": "no worker came up"})
    assert "no worker came up" in text
    assert "predicted" not in text
    assert "go on with" not in text


def test_a_failure_of_the_job_s_code_shows_its_traceback_and_log(tmp_path: Path) -> None:
    outcome = {"status": "failed", "message": "rank 0: ValueError: boom (a restart would end the same way)"}
    more = {"trace": "Traceback:\n  File x\nValueError: boom\n", "log": "/logs/rank-00000.log", "code": 70}
    text = printed(RunState(tmp_path, max_steps=20), PLAN, {**outcome, **more})
    assert f"{'':<14}{outcome['message']}\n" in text
    assert f"{'':<14}  File x\n{'':<14}ValueError: boom\n" in text
    assert "log           /logs/rank-00000.log\n" in text
    assert to_json(RunState(tmp_path, max_steps=20), PLAN, {**outcome, **more})["exit_code"] == 70


def test_a_plan_that_names_the_step_s_time_is_taken_at_its_word(tmp_path: Path) -> None:
    plan = {"iteration": {"micro_batches": 4, "forward_s": 0.01, "backward_s": 0.02, "step_s": 0.25}}
    assert to_json(finished_state(tmp_path), plan, {})["figures"]["step_s"]["predicted"] == 0.25


def test_paths_of_checkpoints(tmp_path: Path) -> None:
    state = finished_state(tmp_path)
    assert to_json(state, PLAN, {})["checkpoints"]["disk"]["path"] is None
    folder = tmp_path / "elsewhere" / "step-0000000020.a0002"
    for rate in (2**30, 3 * 2**30, 2**31):
        event = {"event": "committed", "attempt": 2, "step": 20, "tier": "disk", "path": str(folder)}
        state.take_event(event | {"bytes_per_s": rate})
    nothing: dict[str, Any] = {"left_out": 0, "left_out_reason": None}
    assert to_json(state, PLAN, {})["checkpoints"] == {
        "memory": {"step": 20, "newest": False, "path": None, "kept": False, "bytes_per_s": None, **nothing},
        "disk": {"step": 20, "newest": True, "path": str(folder), "kept": True, "bytes_per_s": 2**31, **nothing},
    }
    text = printed(state, PLAN, {})
    assert "checkpoints   memory  step 20 (given back)\n" in text
    assert f"              disk    step 20  2.0 GiB/s  {folder}\n" in text
    told = to_json(state, PLAN, {"paths": {"disk": "/elsewhere"}})
    assert told["checkpoints"]["disk"]["path"] == "/elsewhere"


def test_numbers_that_are_none_stay_valid_json(tmp_path: Path) -> None:
    state = RunState(tmp_path, max_steps=20)
    for number in range(1, 6):
        state.take_step(step(number, loss=math.nan, step_s=math.inf, stall_s=None))
    document = to_json(state, PLAN, {"status": "failed", "seconds": math.nan})
    json.dumps(document, allow_nan=False)
    assert document["loss"] is document["seconds"] is document["figures"]["overhead"]["measured"] is None
    printed(state, PLAN, {})


def test_the_status_without_a_caller_s_word(tmp_path: Path) -> None:
    state = RunState(tmp_path, max_steps=20)
    assert status_of(state, {}) == "failed"
    state.take_event({"event": "preempted", "step": 3, "tier": "disk"})
    assert status_of(state, {}) == "preempted"


@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_is_never_overflowed(tmp_path: Path, width: int) -> None:
    state = finished_state(tmp_path)
    outcome = {"status": "failed", "message": "X" * 300, "state_digest": "d" * 128, "paths": {"disk": "/p" * 90}}
    text = printed(state, PLAN, outcome, width, is_terminal=True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert max(cell_len(line) for line in lines) <= width
    assert "".join(line.strip() for line in lines).count("X") == 300


def test_a_series_stays_small_and_keeps_its_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_state, "SERIES_LIMIT", 64)
    series = Series()
    for value in range(10_000):
        series.add(float(value))
    assert (series.count, series.total) == (10_000, sum(range(10_000)))
    assert series.median == pytest.approx(5000, rel=0.03)
    assert len(series._kept) <= 64


def test_what_the_workers_measured_stands_beside_what_was_predicted(tmp_path: Path) -> None:
    told = {"storage": {"bytes_per_s": 4e9}, "measured": {"copy_bytes_per_s": 2e9, "overhead": 0.004}}
    figures = to_json(finished_state(tmp_path), PLAN | told, {})["figures"]
    assert figures["copy_bytes_per_s"] == {"predicted": 4e9, "measured": 2e9, "ratio": 0.5}
    assert figures["overhead"] == pytest.approx({"predicted": 0.001, "measured": 0.004, "ratio": 4.0})
    for nothing in ({}, {"measured": None}, {"measured": "?"}):
        assert to_json(finished_state(tmp_path), PLAN | nothing, {})["figures"]["overhead"]["measured"] is None


def test_what_an_earlier_start_has_done_is_told_apart_and_the_pace_is_there(tmp_path: Path) -> None:
    state = RunState(tmp_path, max_steps=200)
    state.take_history([{"step": 190}])
    for number in range(191, 201):
        state.take_step(step(number, tokens_per_s=1000.0 * number))
    state.take_event({"event": "finished", "step": 200, "seconds": 3.0})
    assert "finished      200 steps, 10 of them now in 3.00 s, loss 3.0000, 196.5k tok/s\n" in printed(state, PLAN, {})
    assert to_json(state, PLAN, {})["tokens_per_s"] == 196_500.0
    samples = PLAN | {"training": {"global_batch_size": 32}}
    assert "loss 2.5000, 160.0 samples/s\n" in printed(finished_state(tmp_path), samples, {})


def test_what_was_seen_counts_from_the_first_step_on(tmp_path: Path) -> None:
    state = RunState(tmp_path, max_steps=20)
    state.take_history([{"step": 18, "samples": 576, "tokens_seen": 576 * 128}])
    assert "seen          576 samples, 73.7k tokens\n" in printed(state, PLAN, {})
    state.take_step(step(19, samples=608, tokens_seen=608 * 128))
    state.take_step(step(20, attempt=2, samples=640, tokens_seen=640 * 128))
    assert "seen          640 samples, 81.9k tokens\n" in printed(state, PLAN, {})
    document = to_json(state, PLAN, {})
    assert (document["samples"], document["tokens_seen"]) == (640, 81_920)


def test_data_without_tokens_are_counted_in_samples(tmp_path: Path) -> None:
    state = RunState(tmp_path, max_steps=20)
    state.take_step(step(20, samples=640, tokens_seen=None))
    assert "seen          640 samples\n" in printed(state, PLAN, {})
    assert to_json(state, PLAN, {})["tokens_seen"] is None


def test_the_last_evaluation_is_told_and_its_line_counts_no_step_twice(tmp_path: Path) -> None:
    state = finished_state(tmp_path)
    assert to_json(state, PLAN, {})["evaluation"] is None
    count, repeated = state.count, state.repeated
    assert not state.take_step(step(20, attempt=2, eval_loss=2.75, eval_s=0.5))
    found = {"step": 20, "loss": 2.75, "perplexity": None, "samples": 80, "seconds": 0.5}
    state.take_event({"event": "evaluated", "attempt": 2, **found})
    assert (state.count, state.repeated) == (count, repeated)
    assert to_json(state, PLAN, {})["evaluation"] == found
    assert "evaluated     step 20: loss 2.7500 over 80 samples held out\n" in printed(state, PLAN, {})
    assert "held out 2.7500 at 20" in step_line(state)
