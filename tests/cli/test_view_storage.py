"""What a person sees of slower tiers: outages, tiers that are late, and at the end what is where, and what is not."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.tiers.build import RUN_ID, Place, snapshot

from dtrain.cli.view.events import ALIKE_AGAIN_S, MAX_ALIKE, Narrator
from dtrain.cli.view.panel import draw, step_line
from dtrain.cli.view.state import RunState, is_late, recovery_of
from dtrain.cli.view.summary import summary, to_json
from dtrain.tiers import faults
from dtrain.tiers.drain.follower import Follower
from dtrain.tiers.drain.writer import TierFailed, TierJob, Writer
from dtrain.tiers.format.jsonfile import read_lines
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.stores.store import Place as Where
from dtrain.tiers.together import Group

FULL = "No space left on device; needed 11,024,028 bytes, free there 4,096 bytes and 12 files"
LATE = "the tier is slower than its interval"
OVERTAKEN = "the tier is slower than its interval: a newer checkpoint goes first"
FINITE = "the state is finite again; 4 snapshots were left out meanwhile"


class Watched:
    """A run's events as they come, and what is said of each."""

    def __init__(self, path: Path) -> None:
        self.state = RunState(path, max_steps=200)
        self._narrator = Narrator(lambda: 3)

    def take(self, event: dict[str, Any]) -> list[tuple[str, str]]:
        self.state.take_event(event)
        return [(note.level, note.text) for note in self._narrator.notes(event, self.state)]

    def __call__(self, event: str, **more: Any) -> list[tuple[str, str]]:
        return self.take({"event": event, "attempt": 1, **more})

    def skipped(self, step: int, left_out: int, reason: str = FULL, tier: str = "disk", **more: Any) -> list[str]:
        said = self("skipped", step=step, left_out=left_out, reason=reason, tier=tier, **more)
        return [text for _, text in said]

    def committed(self, step: int, tier: str = "disk", **more: Any) -> None:
        assert self("committed", step=step, tier=tier, **more) == []

    def works_again(self, count: int, tier: str = "disk", **more: Any) -> list[tuple[str, str]]:
        detail = f"the {tier} tier works again; {count} checkpoints were left out meanwhile"
        return self("warning", detail=detail, **more)

    def summary(self, **outcome: Any) -> str:
        file = io.StringIO()
        summary(Console(file=file, width=80, no_color=True, _environ={}), self.state, {}, outcome)
        return file.getvalue()

    def stored(self) -> str:
        """The panel's line on what is stored."""
        console = Console(file=io.StringIO(), width=100, _environ={})
        with console.capture() as captured:
            console.print(draw(console, self.state, 1.0, 0.0))
        return next(line for line in captured.get().splitlines() if "stored" in line).strip("│ ").rstrip()


@pytest.fixture
def seen(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_an_outage_is_told_when_it_begins_and_when_it_ends_and_not_for_each_checkpoint(seen: Watched) -> None:
    assert seen.skipped(10, 1) == [f"disk left out step 10: {FULL}"]
    assert [seen.skipped(step, step - 9) for step in range(11, 60)] == [[]] * 49
    seen.committed(60)
    assert seen.works_again(50) == [("good", "the disk tier works again; 50 checkpoints were left out meanwhile")]
    assert (seen.state.skipped, seen.state.warnings) == ({"disk": 50}, 0)
    assert seen.skipped(70, 1) == [f"disk left out step 70: {FULL}"]


def test_outages_of_two_tiers_are_told_apart(seen: Watched) -> None:
    assert seen.skipped(10, 1)
    assert seen.skipped(10, 1, "no answer in time", tier="object") == ["object left out step 10: no answer in time"]
    assert seen.skipped(20, 2) == seen.skipped(20, 2, tier="object") == []
    seen.committed(30, tier="object")
    assert seen.works_again(2, tier="object")
    assert seen.skipped(40, 3) == []
    assert seen.skipped(40, 1, tier="object")
    assert seen.state.skipped == {"disk": 3, "object": 3}


def test_an_outage_that_began_before_the_view_is_told_once(seen: Watched) -> None:
    assert seen.skipped(100, 7) == [f"disk left out step 100: {FULL}"]
    assert seen.skipped(110, 8) == []
    seen.works_again(8)
    assert seen.state.skipped == {"disk": 8}


def test_a_tier_that_comes_and_goes_is_told_again_after_a_while(seen: Watched) -> None:
    said = [
        seen.skipped(n, 1, time=1000.0 + n) + [t for _, t in seen.works_again(1, time=1000.5 + n)] for n in range(9)
    ]
    assert [len(texts) for texts in said] == [2] * MAX_ALIKE + [0] * (9 - MAX_ALIKE)
    assert said[MAX_ALIKE - 1][0].endswith("(more like this go to events.jsonl only)")
    assert len(seen.skipped(50, 1, time=1002.0 + ALIKE_AGAIN_S)) == 1
    assert seen.state.skipped == {"disk": 10}


def test_what_a_slow_tier_left_out_is_counted_by_its_number(seen: Watched) -> None:
    assert seen.skipped(40, 5, LATE) == [f"disk left out 5 checkpoints up to step 40: {LATE}"]
    assert seen.skipped(60, 6, LATE) == [f"disk left out 6 checkpoints up to step 60: {LATE}"]
    assert seen.skipped(80, 1, OVERTAKEN, tier="object") == [f"object left out step 80: {OVERTAKEN}"]
    assert seen.skipped(90, 1, OVERTAKEN, tier="object")
    assert seen.state.skipped == {"disk": 11, "object": 2}
    assert seen.state.outages == {}


def test_snapshots_left_out_for_their_numbers_are_counted_when_they_are_told(seen: Watched) -> None:
    reason = "model.w holds NaN or infinity"
    assert seen.skipped(7, 1, reason, tier="memory") == [f"memory left out step 7: {reason}"]
    seen.committed(11, tier="memory")
    assert seen("warning", detail=FINITE) == [("good", FINITE)]
    assert seen.state.skipped == {"memory": 4}


def test_other_warnings_stay_warnings(seen: Watched) -> None:
    assert seen("warning", detail="an old checkpoint could not be deleted: x") == [
        ("warn", "warning: an old checkpoint could not be deleted: x")
    ]
    assert seen.state.warnings == 1


def test_a_tier_that_ends_the_run_is_told_with_its_reason_and_is_no_restart(seen: Watched) -> None:
    detail = f"the disk tier failed and its on_failure is stop: {FULL}"
    seen.state.take_step({"step": 12, "attempt": 1})
    assert seen("fault", attempt=0, step=None, rank=None, kind="tier", detail=detail) == [
        ("bad", f"{detail} — stopping")
    ]
    assert (seen.state.phase, seen.state.restarts_in_row) == ("stopping", 0)
    text = seen.summary(status="failed", message="a tier failed, and its on_failure is stop", code=69)
    assert f"failed        after step 12 of 200\n{'':<14}a tier failed, and its on_failure is stop\n" in text
    assert f"{'':<14}{detail}\n" in text
    assert to_json(seen.state, {}, {})["faults"] == [detail]


def test_the_panel_and_the_step_line_have_every_tier_fastest_first(seen: Watched) -> None:
    assert seen.stored().endswith("nothing yet")
    seen.state.take_step({"step": 151, "attempt": 1})
    seen.committed(100, tier="object")
    seen.committed(151, tier="memory")
    assert seen.skipped(140, 1)
    assert seen.stored().endswith("memory 151 · disk - (1 left out) · object 100")
    seen.skipped(150, 2)
    assert seen.stored().endswith("memory 151 · disk - (failing, 2 left out) · object 100")
    seen.committed(151)
    assert seen.stored().endswith("memory 151 · disk 151 (2 left out) · object 100")
    assert "memory 151" in step_line(seen.state)
    assert "object 100" in step_line(seen.state)


def ended(seen: Watched) -> None:
    seen.state.take_step({"step": 200, "attempt": 1})
    seen.committed(200, tier="memory", bytes=10, seconds=0.1)
    for step, rate in ((100, 1e9), (150, 3e9), (200, 2e9)):
        seen.committed(step, bytes_per_s=rate, path=f"/scratch/run/checkpoints/step-{step:010d}.a0001")
    seen.committed(150, tier="object", bytes_per_s=2.0**26, path="s3://bucket/run/step-0000000150.a0001")
    for count in (1, 2, 3):
        seen.skipped(150 + count, count, "no answer in time", tier="object")


def test_the_summary_says_what_each_tier_has_how_fast_and_what_it_left_out_and_why(seen: Watched) -> None:
    ended(seen)
    text = seen.summary(status="finished")
    assert "disk    step 200  1.9 GiB/s  /scratch/run/checkpoints/step-0000000200.a0001\n" in text
    assert (
        "object  step 150 (50 steps behind, 3 checkpoints left out)  64.0 MiB/s  "
        "s3://bucket/run/step-0000000150.a0001\n"
    ) in text
    assert f"{'':<14}{'':<8}last left out: no answer in time\n" in text


def test_the_summary_as_json_has_the_same(seen: Watched) -> None:
    ended(seen)
    document = to_json(seen.state, {}, {})
    json.dumps(document, allow_nan=False)
    tiers = document["checkpoints"]
    assert list(tiers) == ["memory", "disk", "object"]
    assert [tier for tier, told in tiers.items() if told["newest"]] == ["disk"], "memory was given back"
    assert tiers["object"] == {
        "step": 150, "newest": False, "path": "s3://bucket/run/step-0000000150.a0001", "kept": True,
        "left_out": 3, "left_out_reason": "no answer in time", "bytes_per_s": 2.0**26,
    }  # fmt: skip


def test_a_tier_that_never_worked_is_in_the_summary(seen: Watched) -> None:
    seen.state.take_step({"step": 20, "attempt": 1})
    seen.skipped(10, 1)
    seen.skipped(20, 2)
    text = seen.summary(status="finished")
    assert "checkpoints   disk  none committed (2 checkpoints left out)\n" in text
    assert f"last left out: {FULL}\n" in text
    told = to_json(seen.state, {}, {})["checkpoints"]["disk"]
    assert (told["step"], told["path"], told["newest"], told["left_out"]) == (None, None, False, 2)


def test_of_two_attempts_the_later_has_the_newest_state(seen: Watched) -> None:
    seen.committed(90, path="/a")
    seen.committed(80, tier="object", attempt=2, path="s3://b/c")
    tiers = to_json(seen.state, {}, {})["checkpoints"]
    assert [tier for tier, told in tiers.items() if told["newest"]] == ["object"]


@contextlib.contextmanager
def no_writes() -> Iterator[None]:
    def watcher(name: str, where: str, detail: Any) -> None:
        if name == "disk.write":
            raise OSError(28, "No space left on device", where)

    before = faults.watch(watcher)
    try:
        yield
    finally:
        faults.watch(before)


@pytest.fixture
def carry(tmp_path: Path) -> Callable[..., tuple[Place, Writer, Callable[[int], bool]]]:
    """Make a real writer for a tier, and a way to have it carry a step."""

    def make(**options: Any) -> tuple[Place, Writer, Callable[[int], bool]]:
        place = Place(tmp_path)
        job = TierJob(Where("disk", str(place.root)), keep=2, **options)
        writer = Writer(job, place.run, RUN_ID, Group(0, 1))

        def one(step: int) -> bool:
            snapshot(place.memory, step)
            records = place.memory.whole()[Version(1, step)]
            return writer.carry(Version(1, step), lambda: contextlib.nullcontext(gather(place.memory, records)))

        return place, writer, one

    return make


def test_the_events_that_the_writer_of_a_tier_makes_are_understood(
    carry: Callable[..., tuple[Place, Writer, Callable[[int], bool]]],
) -> None:
    place, writer, one = carry()
    assert one(10)
    with no_writes():
        assert not any(one(step) for step in (20, 30, 40))
    writer.health._again_at = 0.0
    assert one(50)
    seen = Watched(place.run.root)
    said = [text for event in read_lines(place.run.events) for _, text in seen.take(event)]
    assert len(said) == 2
    assert said[0].startswith("disk left out step 20: ")
    assert "No space left on device; needed " in said[0]
    assert said[1] == "the disk tier works again; 3 checkpoints were left out meanwhile"
    assert seen.state.skipped == {"disk": 3}
    told = to_json(seen.state, {}, {})["checkpoints"]["disk"]
    assert told["path"] == str(place.root / Version(1, 50).dirname)
    assert told["bytes_per_s"] > 0
    assert "No space left on device" in told["left_out_reason"], "and not that it was not tried again yet"
    writer.release()


def test_a_checkpoint_that_a_newer_one_overtook_is_understood(
    carry: Callable[..., tuple[Place, Writer, Callable[[int], bool]]],
) -> None:
    place, writer, _ = carry()
    follower = Follower(writer, writer)
    for step in (10, 20, 30):
        follower.offer(Version(1, step))
    told = read_lines(place.run.events)
    assert [(event["step"], is_late(event)) for event in told] == [(10, True), (20, True)]
    seen = Watched(place.run.root)
    said = [text for event in told for _, text in seen.take(event)]
    assert said == [f"disk left out step {step}: {OVERTAKEN}" for step in (10, 20)]
    assert seen.state.skipped == {"disk": 2}


def test_a_tier_whose_failure_stops_the_run_is_understood(
    carry: Callable[..., tuple[Place, Writer, Callable[[int], bool]]],
) -> None:
    place, writer, one = carry(on_failure="stop")
    with no_writes(), pytest.raises(TierFailed) as failed:
        one(10)
    assert str(failed.value).startswith("the disk tier failed and its on_failure is stop: ")
    (event,) = read_lines(place.run.events)
    assert not is_late(event)
    assert recovery_of(event) is None
    writer.release()
