"""Following a run: what is seen on a terminal and in a file, and what the state holds afterwards."""

import io
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from dtrain.cli.view import follow as view_module
from dtrain.cli.view.follow import RunView, in_order, line_interval
from dtrain.cli.view.panel import draw

PLAN = {"iteration": {"micro_batches": 4, "forward_s": 0.01, "backward_s": 0.02, "optimizer_s": 0.01}}
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Run:
    """A run folder with a writer for its two files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = 1_700_000_000.0

    def step(self, step: int, attempt: int = 1, **changes: Any) -> None:
        self.clock += 0.1
        record: dict[str, Any] = {"step": step, "loss": 5 - step / 100, "lr": 3e-4, "grad_norm": 1.02, "step_s": 0.1}
        record |= {"forward_s": 0.03, "backward_s": 0.06, "optimizer_s": 0.01, "stall_s": 1e-5}
        record |= {"snapshot_bytes": 1 << 20, "tokens": 4096, "tokens_seen": 4096 * step, "tokens_per_s": 12_345.0}
        self._append("metrics.jsonl", record | {"attempt": attempt, "time": self.clock} | changes)

    def event(self, event: str, attempt: int = 1, **more: Any) -> None:
        self.clock += 0.001
        self._append("events.jsonl", {"event": event, "attempt": attempt, "time": self.clock, **more})

    def _append(self, name: str, record: dict[str, Any]) -> None:
        self.raw(name, json.dumps(record) + "\n")

    def raw(self, name: str, text: str) -> None:
        with (self.path / name).open("a") as file:
            file.write(text)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "tiny").mkdir()
    return Run(tmp_path / "tiny")


def terminal(width: int = 80) -> Console:
    return Console(force_terminal=True, file=io.StringIO(), width=width, height=40, _environ={"TERM": "xterm"})


def plain(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def frames(console: Console) -> str:
    """Text of all frames drawn, without colours; going back to the first column begins a line here."""
    return ESCAPE.sub("", written(console)).replace("\r", "\n")


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.01)


def test_plain_lines_have_all_figures_and_no_escape_codes(run: Run) -> None:
    console = plain()
    with RunView(console, run.path, 200, PLAN) as view:
        run.event("attempt", world=2, nodes=1)
        for step in range(1, 201):
            run.step(step)
            run.event("committed", step=step - 1, tier="memory")
        run.event("committed", step=190, tier="disk")
    text = written(console)
    lines = text.splitlines()
    assert "\x1b" not in text
    assert lines[0].endswith("attempt 1: 2 workers on 1 node")
    figures = "lr 3.0e-04  grad 1.02  12.3k tok/s  0.100 s/step  stall 0.01 ms  ETA 0:19  memory 8"
    assert f"step   10/200  loss 4.9000  {figures}" in lines
    assert [line.split("/")[0] for line in lines[1:4]] == ["step    1", "step   10", "step   20"]
    assert lines[-1].startswith("step  200/200")
    assert 20 <= len(lines) <= 40
    assert view.errors == []


def test_state_after_a_recovery(run: Run) -> None:
    with RunView(plain(), run.path, 10, PLAN) as view:
        run.event("attempt", world=2, nodes=1)
        for step in range(1, 6):
            run.step(step)
            run.event("committed", step=step - 1, tier="memory")
        run.event("fault", rank=1, kind="signal", detail="SIGKILL", step=6)
        run.clock += 2
        run.event("attempt", attempt=2, world=2, nodes=1)
        run.event("restored", attempt=2, step=3, tier="memory", seconds=0.1, state_digest="d3", skipped=[])
        for step in range(4, 11):
            run.step(step, attempt=2, loss=1.0)
        run.event("committed", attempt=2, step=10, tier="disk")
        run.event("committed", attempt=1, step=99, tier="disk")  # an older attempt has no say any more
        run.event("finished", attempt=2, step=10, steps=10, state_digest="d10", seconds=3.0)
    state = view.state
    assert (state.step, state.loss, state.attempt, state.attempts, state.restarts) == (10, 1.0, 2, 2, 1)
    assert (state.count, state.repeated) == (12, 2)
    assert state.committed == {"memory": 4, "disk": 10}
    assert state.totals["step_s"] == pytest.approx(1.2)
    assert state.totals["stall_s"] == pytest.approx(12e-5)
    assert state.series["step_s"].count == 12 - 4  # two warm-up steps of each attempt
    assert state.repeated_s == pytest.approx(0.2)
    assert state.downtime_s == pytest.approx(2.0, abs=0.01)
    assert (state.state_digest, state.state_digest_step, state.phase) == ("d10", 10, "finished")


def test_faults_and_restores_are_said_in_plain_output(run: Run) -> None:
    (run.path / "spec.json").write_text('{"cluster": {"max_restarts": 3}}')
    console = plain()
    with RunView(console, run.path, 200, PLAN):
        run.step(119)
        run.event("fault", rank=1, kind="signal", detail="SIGKILL", step=120, log="logs/rank-00001.log")
        run.event("restored", attempt=2, step=119, tier="memory", seconds=0.4, skipped=[])
    text = written(console)
    assert (
        "rank 1 was killed by SIGKILL at step 120 — restarting (1 of 3) from the newest whole step "
        "(log: logs/rank-00001.log)\n"
    ) in text
    assert "resumed step 119 from memory in 0.4 s\n" in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_panel_never_overflows(run: Run, width: int) -> None:
    console = terminal(width)
    with RunView(console, run.path, 200_000, PLAN) as view:
        run.event("attempt", world=2, nodes=1)
        view.poll()
        for step in range(1, 40):
            run.step(123_400 + step, tokens_per_s=1.5e9, stall_s=0.09)
        for tier in ("memory", "peer", "disk", "object"):
            run.event("committed", step=123_439, tier=tier)
            run.event("skipped", step=123_439, tier=tier, reason="a long reason " * 12)
        run.event("fault", rank=1, kind="error", detail="E" * 250, step=7, log="/very/long" * 20)
        view.poll()
    assert view.errors == []
    lines = frames(console).splitlines()
    assert max(cell_len(line) for line in lines) <= width
    assert width < 80 or any("step 123439/200000" in line for line in lines)


def test_the_panel_at_80_columns_shows_everything(run: Run) -> None:
    console = terminal()
    with RunView(console, run.path, 200, PLAN) as view:
        run.event("attempt", world=2, nodes=1)
        for step in range(1, 121):
            run.step(step)
        run.event("committed", step=119, tier="memory")
        run.event("committed", step=110, tier="disk")
        view.poll()
        text = frames(console)
    for part in (
        "tiny · training",
        "step 120/200",
        "60 %  ETA 0:08",
        "3.8000  █",
        "3.00e-04",
        "1.020",
        "0.100 s · planned 0.130 s",
        "12.3k tok/s · 491.5k seen",
        "0.01 ms · 0.01 % of the step",
        "memory 119 · disk 110",
        "logs/attempt-0001",
        "attempt 1 · 0:0",
    ):
        assert part in text, part


def test_the_cursor_rests_below_the_panel_where_an_echo_does_no_harm(run: Run) -> None:
    console = terminal()
    view = RunView(console, run.path, 200, PLAN)
    console.print(draw(console, view.state, 0.0, 0.0), end="")
    assert written(console).endswith("╯\x1b[0m\n\n")


def test_notes_stay_above_the_panel(run: Run) -> None:
    console = terminal()
    with RunView(console, run.path, 200, PLAN) as view:
        run.event("attempt", world=2, nodes=1)
        run.event("fault", rank=1, kind="signal", detail="SIGKILL", step=120)
        run.event("restored", attempt=2, step=119, tier="memory", seconds=0.4)
        view.poll()
    text = frames(console)
    assert re.search(r"\d\d:\d\d:\d\d ✗ rank 1 was killed by SIGKILL at step 120 — restarting", text)
    assert re.search(r"\d\d:\d\d:\d\d ✓ resumed step 119 from memory in 0.4 s", text)


def test_data_without_tokens_is_counted_in_samples(run: Run) -> None:
    out, panel = plain(), terminal()
    with RunView(out, run.path, 200, PLAN), RunView(panel, run.path, 200, PLAN) as view:
        for step in (9, 10):
            run.step(step, tokens=None, tokens_per_s=None, tokens_seen=None, samples=32 * step)
        view.poll()
    assert "grad 1.02  320 samples/s  0.100 s/step" in written(out)
    assert "320.0 samples/s" in frames(panel)


def test_no_color_leaves_no_colours(run: Run) -> None:
    environ = {"NO_COLOR": "1", "TERM": "xterm"}
    console = Console(force_terminal=True, file=io.StringIO(), width=80, _environ=environ)
    with RunView(console, run.path, 200, PLAN) as view:
        run.step(1)
        run.event("fault", rank=1, kind="signal", detail="SIGKILL", step=2)
        view.poll()
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|38|9[0-7])[;m]", written(console))


def test_a_run_that_stands_still_is_said_to(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal()
    view = RunView(console, run.path, 200, PLAN)
    monkeypatch.setattr(view_module, "POLL_SECONDS", 60.0)
    with view:
        run.step(1)
        view.poll()
        view._last_step -= 75
        view.poll()
    assert "no step for 1:15" in frames(console)


def test_quiet_says_only_what_went_wrong(run: Run) -> None:
    console = terminal()
    with RunView(console, run.path, 200, PLAN, quiet=True) as view:
        run.event("attempt", world=2, nodes=1)
        run.step(1)
        run.event("restored", step=1, tier="disk", seconds=1)
        run.event("warning", detail="the clock moved")
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning: the clock moved\n", written(console))
    assert view.state.count == 1


def test_what_was_there_before_is_not_shown_but_counts_as_done(run: Run) -> None:
    for step in range(1, 11):
        run.step(step)
    run.event("fault", rank=0, kind="exit", detail="1", step=11)
    console = plain()
    with RunView(console, run.path, 200, PLAN) as view:
        run.event("attempt", attempt=2, world=2, nodes=1)
        for step in range(9, 13):
            run.step(step, attempt=2)
    assert "exited" not in written(console)
    assert (view.state.attempts, view.state.repeated, view.state.count) == (1, 2, 4)


def test_late_lines_of_an_older_attempt_change_nothing(run: Run) -> None:
    with RunView(plain(), run.path, 200, PLAN) as view:
        run.step(5, attempt=2)
        run.step(9, attempt=1)
    assert (view.state.step, view.state.count, view.state.attempt) == (5, 1, 2)


def test_junk_in_the_files_is_survived(run: Run) -> None:
    console = plain()
    with RunView(console, run.path, 200, PLAN) as view:
        run.raw(
            "metrics.jsonl", '{"step": "x"}\n{}\nnot json\n{"step": 1e400, "loss": []}\n{"step": 3, "attempt": 1}\n'
        )
        run.raw("events.jsonl", '{"event": "committed"}\n{"event": ["fault"]}\n{"event": "restored", "skipped": 7}\n')
        run.raw("metrics.jsonl", '{"step": 4, "attempt": 1, "step_s": 1' + "0" * 400 + "}\n")
        run.step(5, loss=float("nan"), step_s=None, tokens_per_s=float("inf"))
        run.raw("events.jsonl", '{"event": "fault", "ra')
    assert view.state.step == 5
    assert view.skipped_lines == 1
    assert view.state.loss is not None
    assert math.isnan(view.state.loss)


def test_the_thread_follows_by_itself_and_stop_can_be_called_twice(run: Run) -> None:
    view = RunView(plain(), run.path, 200, PLAN)
    assert view.start() is view.start()
    run.step(1)
    until(lambda: view.state.step == 1)
    run.step(2)
    view.stop()
    view.stop()
    assert view.state.step == 2
    assert not any(thread.name == "dtrain-view" and thread.is_alive() for thread in threading.enumerate())


def test_polling_from_two_threads_counts_each_step_once(run: Run) -> None:
    with RunView(plain(), run.path, 5000, PLAN) as view:

        def poll_often() -> None:
            for _ in range(50):
                view.poll()

        others = [threading.Thread(target=poll_often) for _ in range(3)]
        for thread in others:
            thread.start()
        for step in range(1, 501):
            run.step(step)
        for thread in others:
            thread.join()
    assert view.state.count == 500


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_that_is_gone_does_not_reach_the_run(run: Run, is_terminal: bool) -> None:
    console = Console(file=Gone(), force_terminal=is_terminal, width=80, _environ={"TERM": "xterm"})
    with RunView(console, run.path, 200, PLAN) as view:
        for step in range(1, 51):
            run.step(step)
        view.poll()
    assert view.state.step == 50
    assert view.errors


def test_a_panel_that_cannot_be_drawn_gives_way_to_lines(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise KeyError("no such figure")

    console = terminal()
    monkeypatch.setattr(view_module, "draw", broken)
    with RunView(console, run.path, 200, PLAN) as view:
        run.step(1)
    assert "step    1/200" in frames(console)
    assert [type(error) for error in view.errors] == [KeyError]


def test_an_ascii_terminal_gets_lines_it_can_write(run: Run) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with RunView(console, run.path, 200, PLAN) as view:
        run.event("fault", rank=1, kind="signal", detail="SIGKILL", step=120)
    file.flush()
    assert b"at step 120 - restarting" in raw.getvalue()
    assert view.errors == []


def test_the_standard_streams_are_left_alone(run: Run) -> None:
    before = (sys.stdout, sys.stderr)
    with RunView(terminal(), run.path, 200, PLAN):
        assert (sys.stdout, sys.stderr) == before
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize(
    ("steps", "interval"), [(0, 1), (1, 1), (39, 1), (40, 2), (100, 5), (200, 10), (999, 20), (100_000, 5000)]
)
def test_lines_come_at_round_steps(steps: int, interval: int) -> None:
    assert line_interval(steps) == interval
    assert steps // interval < 50


def test_two_files_are_merged_by_time_and_keep_their_own_order() -> None:
    steps = [{"n": 1, "time": 5}, {"n": 2, "time": 3}, {"n": 3, "time": 9}]
    events = [{"n": 4, "time": 1}, {"n": 5}, {"n": 6, "time": 7}]
    assert [record["n"] for _, record in in_order(steps, events)] == [4, 5, 1, 2, 6, 3]
