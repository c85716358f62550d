"""The words for events."""

from pathlib import Path
from typing import Any

import pytest

from dtrain.cli.view.events import Narrator, describe_fault
from dtrain.cli.view.state import RunState


class Tell:
    """Takes an event in and returns what is said about it."""

    def __init__(self, path: Path) -> None:
        self.state = RunState(path, max_steps=200)
        self._narrator = Narrator(lambda: 3)

    def __call__(self, **event: Any) -> list[str]:
        self.state.take_event(event)
        return [note.text for note in self._narrator.notes(event, self.state)]


@pytest.fixture
def tell(tmp_path: Path) -> Tell:
    return Tell(tmp_path)


def test_a_restart_by_kill(tell: Tell) -> None:
    assert tell(event="fault", rank=1, kind="signal", detail="SIGKILL", step=120, attempt=1) == [
        "rank 1 was killed by SIGKILL at step 120 — restarting (1 of 3) from the newest whole step"
    ]


def test_a_second_fault_of_one_attempt_is_no_second_restart(tell: Tell) -> None:
    tell(event="fault", rank=1, kind="signal", detail="SIGKILL", step=120, attempt=1)
    assert tell(event="fault", rank=0, kind="exit", detail="1", step=120, attempt=1) == [
        "rank 0 exited with code 1 at step 120 (same attempt)"
    ]
    assert tell.state.restarts_in_row == 1


def test_restarts_in_a_row_run_out_and_a_finished_step_gives_them_back(tell: Tell) -> None:
    def fault(attempt: int) -> str:
        return tell(event="fault", rank=0, kind="exit", detail="1", step=5, attempt=attempt)[0]

    assert "(1 of 3)" in fault(1)
    assert "(2 of 3)" in fault(2)
    tell.state.take_step({"step": 6, "attempt": 3})
    assert "(1 of 3)" in fault(3)
    assert "(2 of 3)" in fault(4)
    assert "(3 of 3)" in fault(5)
    assert fault(6).endswith("— no restart left")


def test_the_launcher_s_own_word_on_restarting_counts(tell: Tell) -> None:
    event: dict[str, Any] = {"event": "fault", "rank": 0, "kind": "error", "detail": "loss is nan", "attempt": 1}
    assert tell(**event, restarting=False) == ["rank 0 failed: loss is nan — not restarting"]
    assert "(4 of 9)" in tell(**event | {"attempt": 2}, restart=4, max_restarts=9)[0]


def test_without_a_known_limit_none_is_named(tmp_path: Path) -> None:
    state = RunState(tmp_path, max_steps=10)
    event = {"event": "fault", "rank": 0, "kind": "exit", "detail": "1", "attempt": 1}
    state.take_event(event)
    assert "restarting (restart 1) from" in Narrator(lambda: None).notes(event, state)[0].text


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"rank": 1, "kind": "SIGKILL"}, "rank 1 was killed by SIGKILL"),
        ({"rank": 1, "kind": "signal", "detail": "9"}, "rank 1 was killed by SIGKILL"),
        ({"rank": 1, "kind": "exit", "detail": "-11"}, "rank 1 was killed by SIGSEGV"),
        ({"rank": 1, "kind": "signal", "detail": "SIGBUS (memory)"}, "rank 1 was killed by SIGBUS (memory)"),
        ({"rank": 1, "kind": "exit", "detail": "exit code 17"}, "rank 1 exited with code 17"),
        ({"rank": 1, "kind": "silent", "step": 7}, "rank 1 has been silent at step 7"),
        ({"rank": 1, "kind": "silent", "detail": "was silent for 10 s"}, "rank 1 was silent for 10 s"),
        ({"rank": 1, "kind": "killed", "detail": "rank 1 was killed by SIGKILL"}, "rank 1 was killed by SIGKILL"),
        (
            {"rank": 0, "kind": "hang", "step": 7, "detail": "rank 0 stood still for 10.2 s in step 7"},
            "rank 0 stood still for 10.2 s in step 7",
        ),
        (
            {"rank": 0, "kind": "exception", "step": 7, "detail": "rank 0: ValueError: boom\nsecond line"},
            "rank 0 failed at step 7: ValueError: boom",
        ),
        ({"rank": None, "kind": "drainer", "detail": "the drainer ended with -9"}, "the drainer ended with -9"),
        (
            {"rank": 2, "kind": "exception", "step": 3, "detail": "Traceback …\n  File x\nValueError: no\n"},
            "rank 2 failed at step 3: ValueError: no",
        ),
        ({"kind": "lost_node", "detail": "node b"}, "the run failed (lost node): node b"),
        ({"rank": 3, "node": "b", "kind": "x"}, "rank 3 on b failed (x)"),
        ({}, "the run failed"),
        ({"rank": 1, "kind": "error", "detail": "\x1b[31mred"}, "rank 1 failed:  [31mred"),
    ],
)
def test_faults_in_words(event: dict[str, Any], text: str) -> None:
    assert describe_fault(event) == text


def test_without_a_step_of_its_own_a_fault_is_after_the_last_one(tell: Tell) -> None:
    tell.state.take_step({"step": 119, "attempt": 1})
    event = {"event": "fault", "rank": 1, "step": None, "attempt": 1, "kind": "killed"}
    assert tell(**event, detail="rank 1 was killed by SIGKILL") == [
        "rank 1 was killed by SIGKILL after step 119 — restarting (1 of 3) from the newest whole step"
    ]
    assert tell(event="attempt", attempt=2) == ["attempt 2"]


def test_after_an_error_of_the_job_only_the_next_attempt_tells_of_a_restart(tell: Tell) -> None:
    event = {"event": "fault", "rank": 1, "step": None, "kind": "exception", "detail": "rank 1: ValueError: boom"}
    assert tell(**event, attempt=1) == ["rank 1 failed: ValueError: boom"]
    assert tell(event="attempt", attempt=2, world=2) == [
        "restarting (1 of 3) from the newest whole step, attempt 2: 2 workers"
    ]


def test_a_drainer_that_died_is_no_restart(tell: Tell) -> None:
    tell.state.take_step({"step": 119, "attempt": 1})
    detail = "the drainer ended with -9; started again"
    assert tell(event="fault", rank=None, attempt=1, kind="drainer", detail=detail) == [detail]
    assert (tell.state.restarts_in_row, tell.state.phase) == (0, "training")


def test_restoring_says_what_was_passed_over_once(tell: Tell) -> None:
    event = {
        "event": "restored",
        "step": 119,
        "attempt": 2,
        "tier": "memory",
        "seconds": 0.42,
        "skipped": [{"tier": "disk", "step": 120, "reason": "no manifest"}, "junk"],
    }
    assert tell(**event) == ["passed over step 120 in disk: no manifest", "resumed step 119 from memory in 0.4 s"]
    assert tell(**event) == []
    assert tell(event="restored", step=119, attempt=3, tier="disk") == ["resumed step 119 from disk"]


def test_attempts_and_their_workers(tell: Tell) -> None:
    assert tell(event="attempt", attempt=1, world=2, nodes=1) == ["attempt 1: 2 workers on 1 node"]
    assert tell(event="attempt", attempt=1, world=2, nodes=1) == []
    assert tell(event="attempt", attempt=2, world=4, nodes=["a", "b"]) == ["attempt 2: 4 workers on 2 nodes"]
    assert tell(event="attempt", attempt=3) == ["attempt 3: 4 workers on 2 nodes"]


def test_alike_notes_are_said_a_few_times_only(tell: Tell) -> None:
    said = [tell(event="skipped", tier="disk", step=n, reason=f"step {n - 1} not done") for n in range(1, 8)]
    assert said[0] == ["disk left out step 1: step 0 not done"]
    assert said[2] == ["disk left out step 3: step 2 not done (more like this go to events.jsonl only)"]
    assert said[3:] == [[], [], [], []]
    assert tell.state.skipped == {"disk": 7}
    assert tell(event="warning", detail="clock moved") == ["warning: clock moved"]


def test_a_stop_on_request(tell: Tell) -> None:
    assert tell(event="preempted", step=57, tier="disk") == ["asked to stop: step 57 is the last one, safe in disk"]


@pytest.mark.parametrize("name", ["planned", "committed", "finished", "new kind", None, 3])
def test_other_events_are_silent(tell: Tell, name: object) -> None:
    assert tell(event=name, step="x", tier=None, attempt="1", time="now") == []


def test_other_intervals_are_told_with_their_reason_and_another_pace_is_not(tell: Tell) -> None:
    every = {"memory": {"from": 1, "to": 4}, "disk": {"from": 10, "to": 12}}
    assert tell(event="adjusted", step=18, every=every, reason="a snapshot costs 9 ms") == [
        "memory every 4 steps (was 1), disk every 12 steps (was 10): a snapshot costs 9 ms"
    ]
    assert tell(event="adjusted", step=18, pace={"from": {}, "to": {}}, reason="as measured") == []
    assert tell(event="adjusted", step=18, every={"memory": None}, reason=None) == []


def test_an_evaluation_is_told_with_what_it_found(tell: Tell) -> None:
    found = {"event": "evaluated", "step": 100, "attempt": 1, "samples": 80, "seconds": 0.5}
    words = "evaluated step 100: loss 2.3100, perplexity 10.07 over 80 samples held out, in 0.5 s"
    assert tell(**found, loss=2.31, perplexity=10.074) == [words]
    assert tell(**found, loss=None, perplexity=None) == ["the loss of held-out data at step 100 is not finite"]
    assert tell.state.evaluated is not None
