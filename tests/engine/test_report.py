"""What rank 0 writes down."""

from __future__ import annotations

import time
from pathlib import Path

from dtrain.engine.restore.restore import Restored
from dtrain.engine.snapshot.decided import Offered, Refused
from dtrain.engine.training.report import Reporter
from dtrain.tiers.format.jsonfile import read_lines
from dtrain.tiers.format.layout import RunDir, Version
from dtrain.tiers.reading.recovery import Candidate
from dtrain.tiers.stores.store import Place

METRICS = {"step": 3, "loss": 0.5, "lr": 1e-3, "step_s": 0.25}
RESTORED = Restored(Candidate(Version(1, 3), Place("disk", "/d")), {}, 1.5, [{"step": 4, "reason": "damaged"}])


def said(run: RunDir, *, active: bool) -> None:
    reporter = Reporter(run, 2, active)
    reporter.step(METRICS, 1000, 96, 3000)
    reporter.step(METRICS, None, 96, None)
    reporter.committed(Version(2, 3), 4096, 0.125)
    reporter.committed(None, 4096, 0.125)
    reporter.restored(RESTORED, "ab", ({"step": 5, "reason": "cut"},))
    reporter.event("warning", None, detail="x")
    reporter.refused(Refused(Version(2, 4), "model.w"))
    reporter.offered(Offered(5, False))
    reporter.end_outage()


def test_rank_0_writes_a_line_for_each(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    said(run, active=True)
    first, second = read_lines(run.metrics)
    assert {key: first[key] for key in METRICS} == METRICS
    assert (first["tokens"], first["tokens_per_s"], first["samples"], first["attempt"]) == (1000, 4000.0, 96, 2)
    assert (second["tokens"], second["tokens_per_s"], second["tokens_seen"]) == (None, None, None)
    assert first["tokens_seen"] == 3000
    committed, restored, warning, *_ = read_lines(run.events)
    assert {**committed, "time": 0} == {
        "event": "committed", "step": 3, "attempt": 2, "tier": "memory", "bytes": 4096, "seconds": 0.125, "time": 0,
    }  # fmt: skip
    assert (restored["event"], restored["step"], restored["tier"], restored["state_digest"]) == (
        "restored",
        3,
        "disk",
        "ab",
    )
    assert [skip["step"] for skip in restored["skipped"]] == [5, 4]
    assert (warning["event"], warning["step"], warning["detail"]) == ("warning", None, "x")
    assert abs(warning["time"] - time.time()) < 60


def test_the_other_ranks_are_silent(tmp_path: Path) -> None:
    said(RunDir(tmp_path), active=False)
    assert list(tmp_path.iterdir()) == []


def told(run: RunDir, event: str) -> list[dict[str, object]]:
    return [line for line in read_lines(run.events) if line["event"] == event]


def test_checkpoints_left_out_for_a_slow_tier_are_told_once_per_outage(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    reporter = Reporter(run, 1, active=True, slow_tier="object")
    for offered in (None, Offered(2, True), None, Offered(4, False), None, Offered(6, False), None):
        reporter.offered(offered)
    assert told(run, "skipped") == [], "it is not over"
    reporter.offered(Offered(8, True))
    reporter.offered(Offered(10, True))
    reporter.offered(Offered(12, False))
    reporter.end_outage()
    reporter.end_outage()
    assert [(e["step"], e["tier"], e["reason"], e["left_out"]) for e in told(run, "skipped")] == [
        (6, "object", "the tier is slower than its interval", 2),
        (12, "object", "the tier is slower than its interval", 1),
    ]


def test_states_that_are_not_finite_are_told_when_it_begins_and_when_it_is_over(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    reporter = Reporter(run, 1, active=True)
    reporter.committed(Version(1, 1), 8, 0.1)
    for step in (2, 3, 4):
        reporter.refused(Refused(Version(1, step), "model.w"))
        reporter.committed(None, 8, 0.1)
    reporter.refused(None)
    assert [(e["step"], e["tier"], e["reason"], e["left_out"]) for e in told(run, "skipped")] == [
        (2, "memory", "model.w holds NaN or infinity", 1)
    ]
    reporter.committed(Version(1, 5), 8, 0.1)
    reporter.committed(Version(1, 6), 8, 0.1)
    assert [(e["step"], e["detail"]) for e in told(run, "warning")] == [
        (5, "the state is finite again; 3 snapshots were left out meanwhile")
    ]
    reporter.refused(Refused(Version(1, 7), "model.w"))
    assert len(told(run, "skipped")) == 2
