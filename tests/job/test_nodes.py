"""One job over two nodes: the run of one node bit for bit, whatever happens to a worker or to a node."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.job.dtrain import STEPS, Job, assert_same, finish, slow, wait, wait_for_step
from tests.job.nodes import Cluster, cluster
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dtrain.engine.network.line import START_KEY, STORE_TIMEOUT
from dtrain.tiers.faults import fail_at


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path / "job") as made:
        yield made


def test_two_nodes_train_as_one_and_a_killed_worker_is_answered_by_a_restart(nodes: Cluster, oracle: Job) -> None:
    """Shards of the snapshot that both go on from lie in the memory of two nodes."""
    nodes.start_all(fault=f"{fail_at(1, 5, 'window.forward')};{fail_at(0, 8, 'update.after', attempt=2)}")
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0], ended
    job = nodes.job
    assert_same(job, oracle)
    assert [(e["rank"], e["node"], e["kind"]) for e in job.events("fault")] == [(1, 1, "killed"), (0, 0, "killed")]
    assert [e["tier"] for e in job.events("restored")] == ["memory", "memory"]
    assert "finished" in ended[1].out
    assert {p.name for p in (job.run.root / "checkpoints" / f"step-{STEPS:010d}.a0003").iterdir()} == {
        "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors",
    }  # fmt: skip
    nodes.assert_nothing_left()

    nodes.start(1, "cluster.rejoin_timeout=1s")  # a scheduler starts a node again that died when all was done
    late = nodes.end()[1]
    assert (late.code, f"complete at step {STEPS}" in late.said) == (0, True), late
    nodes.assert_nothing_left()


def test_row_89_a_node_that_dies_is_named_and_comes_back(nodes: Cluster, oracle: Job) -> None:
    tiers = f"tiers=[{{type: memory, every: 1}}, {{type: disk, every: {STEPS}}}]"
    nodes.start_all(tiers, fault=slow(4))
    wait_for_step(nodes.job, 4)
    nodes.kill_node(1)
    wait(lambda: nodes.job.events("fault"), 15, "the death to be noticed")
    (fault,) = nodes.job.events("fault")
    assert (fault["kind"], fault["node"], fault["rank"]) == ("node", 1, None)
    assert "node 1" in fault["detail"] and "silent" in fault["detail"]
    nodes.start(1, tiers)
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0], ended
    assert len(nodes.job.events("fault")) == 1, "no restart is counted twice"
    assert [e["tier"] for e in nodes.job.events("restored")] == ["memory"], "its memory outlived its launcher"
    assert_same(nodes.job, oracle)
    nodes.assert_nothing_left()


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_row_89_a_stop_signal_to_one_node_ends_all_at_one_step(node: int, nodes: Cluster, oracle: Job) -> None:
    nodes.start_all(fault=slow(3))
    wait_for_step(nodes.job, 3)
    nodes.running[node].send_signal(signal.SIGTERM)
    ended = nodes.end()
    assert [one.code for one in ended] == [75, 75], ended
    (preempted,) = nodes.job.events("preempted")
    assert (preempted["tier"], preempted["step"]) == ("disk", max(nodes.job.losses())), "no step is lost"
    nodes.assert_nothing_left()
    nodes.start_all(command="resume")
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0], ended
    assert len(nodes.job.run.metrics.read_text().splitlines()) == STEPS, "no step was repeated"
    assert_same(nodes.job, oracle)
    nodes.assert_nothing_left()


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_row_89_ctrl_c_on_one_node_ends_all(node: int, nodes: Cluster) -> None:
    nodes.start_all("max_steps=100000")
    wait_for_step(nodes.job, 3)
    nodes.running[node].send_signal(signal.SIGINT)
    ended = nodes.end(15)
    assert [one.code for one in ended] == [130, 130], ended
    assert all("Traceback" not in one.said for one in ended)
    wait(lambda: not nodes.job.processes(), 5, "everything to end")


def test_another_spec_on_one_node_is_refused_by_name_and_the_others_wait(nodes: Cluster, oracle: Job) -> None:
    nodes.start(0)
    wrong = finish(nodes.start(1, "training.optimizer.lr=1e-4"), timeout=30)
    assert wrong.code == 78
    assert "training.optimizer.lr is 0.0001 there and 0.003 on node 0" in wrong.err
    assert "Traceback" not in wrong.said
    nodes.start(1)
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0], ended
    assert any("training.optimizer.lr" in event["detail"] for event in nodes.job.events("warning"))
    assert_same(nodes.job, oracle)
    nodes.assert_nothing_left()


def test_without_node_0_the_others_end_and_all_go_on_from_memory(nodes: Cluster, oracle: Job) -> None:
    nodes.start_all("tiers=[{type: memory, every: 1}]", fault=slow(4))
    wait_for_step(nodes.job, 4)
    nodes.kill_node(0)
    ended = finish(nodes.running.pop(1), timeout=20)
    assert ended.code == 75, ended.said
    assert "node 0" in ended.said and "dtrain resume" in ended.said
    assert "Traceback" not in ended.said
    nodes.start_all("tiers=[{type: memory, every: 1}]", command="resume")
    both = nodes.end()
    assert [one.code for one in both] == [0, 0], both
    assert [event["tier"] for event in nodes.job.events("restored")] == ["memory"]
    assert nodes.job.losses() == oracle.losses()
    nodes.assert_nothing_left()


def test_row_100_a_rank_that_stands_still_is_named_whichever_node_it_is_on(nodes: Cluster, oracle: Job) -> None:
    nodes.start_all(fault=fail_at(1, 6, "window.forward", kind="stop"))
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0], ended
    (fault,) = nodes.job.events("fault")
    assert (fault["kind"], fault["rank"], fault["node"]) == ("hang", 1, 1), fault
    assert_same(nodes.job, oracle)
    nodes.assert_nothing_left()


def test_a_node_that_dies_before_its_worker_has_met_the_others_does_not_leave_them_waiting(
    nodes: Cluster, oracle: Job
) -> None:
    """The others wait for it in a library's call, for far longer than anybody should."""
    nodes.start_all(fault=fail_at(1, None, "worker.start", kind="stop"))
    wait(nodes.job.stopped, 30, "rank 1 to stand still at its start")
    nodes.kill_node(1)
    wait(lambda: nodes.job.events("fault"), 20, "the death to be noticed, and the attempt to be ended")
    nodes.start(1)
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0], ended
    assert_same(nodes.job, oracle)
    nodes.assert_nothing_left()


@pytest.mark.campaign
def test_row_88_a_launcher_that_is_stopped_is_given_up_and_joins_again(nodes: Cluster, oracle: Job) -> None:
    windows = ";".join(fail_at(0, step, "window.forward", kind="slow", nth=1) for step in range(3, STEPS + 1))
    nodes.start_all(fault=f"{slow(3)};{windows}")  # it does not come to its end before the silence is noticed
    wait_for_step(nodes.job, 3)
    nodes.running[1].send_signal(signal.SIGSTOP)
    wait(lambda: nodes.job.events("fault"), 20, "the silence to be noticed")
    nodes.running[1].send_signal(signal.SIGCONT)
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0], ended
    (fault,) = nodes.job.events("fault")
    assert (fault["kind"], fault["node"]) == ("node", 1)
    assert "joining again" in ended[1].said
    assert_same(nodes.job, oracle)
    nodes.assert_nothing_left()


def test_row_88_a_node_that_is_stopped_as_the_run_ends_is_told_and_its_part_of_the_last_state_waited_for(
    nodes: Cluster, oracle: Job
) -> None:
    nodes.start_all(fault=slow(STEPS - 2))
    wait_for_step(nodes.job, STEPS - 3)
    nodes.running[1].send_signal(signal.SIGSTOP)
    wait(lambda: max(nodes.job.losses()) == STEPS, 30, "the last step")
    wait(lambda: nodes.job.events("fault"), 20, "the silence to be noticed")
    nodes.running[1].send_signal(signal.SIGCONT)
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0], ended
    assert [(e["kind"], e["node"]) for e in nodes.job.events("fault")] == [("node", 1)]
    assert_same(nodes.job, oracle)
    nodes.assert_nothing_left()


def test_a_stranger_at_the_rendezvous_changes_nothing_and_is_named(nodes: Cluster, oracle: Job) -> None:
    """It writes over everything that launchers have said and will say next, again and again."""
    nodes.start_all(fault=slow(2))
    wait_for_step(nodes.job, 2)
    store = TCPStore(nodes.host, nodes.port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
    root = f"dtrain/{store.get(START_KEY).decode()[-32:]}"
    word = json.loads(store.get(f"{root}/hello/1")[64:])["word"]
    end = json.dumps({"kind": "end", "code": 0, "status": "finished", "message": "", "step": 0, "attempt": 9})
    for _ in range(20):
        for number in range(12):
            store.set(f"{root}/up/{word}/{number}", end)
            store.set(f"{root}/down/{word}/{number}", "0" * 64 + end)
        for key in ("hello/1", "beat/0", f"beat/{word}"):
            store.set(f"{root}/{key}", "0" * 64 + end)
        time.sleep(0.05)
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0], ended
    assert any("without this run's token" in event["detail"] for event in nodes.job.events("warning"))
    assert not nodes.job.events("fault")
    assert_same(nodes.job, oracle)
    nodes.assert_nothing_left()


CLOCK = """
import time
_real = time.time
time.time = lambda: _real() + float("{skew}")
"""


def test_row_103_a_node_whose_clock_is_a_minute_wrong_is_like_any_other(nodes: Cluster, oracle: Job) -> None:
    """Also after a fault on it, when the notes of all ranks are put in order."""
    path = nodes.job.folder / "clock"
    path.mkdir()
    (path / "sitecustomize.py").write_text(CLOCK.format(skew=60))
    nodes.start(0, fault=fail_at(1, 6, "window.forward", kind="raise"))
    before = os.environ.get("PYTHONPATH")
    nodes.job.extra["PYTHONPATH"] = os.pathsep.join([str(path), *([before] if before else [])])
    nodes.start(1, fault=fail_at(1, 6, "window.forward", kind="raise"))
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0], ended
    assert [(e["rank"], e["kind"]) for e in nodes.job.events("fault")] == [(1, "exception")]
    assert_same(nodes.job, oracle)
    nodes.assert_nothing_left()
