"""Runs whose number of nodes changes under them, and what is the same for each: batches, samples, losses."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence

from tests.job.dtrain import Job, slow, wait, wait_for_step
from tests.job.nodes import Cluster, spec_of

from dtrain.tiers.format.jsonfile import read, read_lines

TOLERANCE = 1e-4
"""Relative, of a loss against that of the fixed run: float32 sums in another order, and updates that follow them."""
STEPS = 60  # time for a launcher to start on a busy machine before two nodes alone are at the end
MEASURED = 22
"""After this step the first window of the controller is full, and the plan has what it measured."""
BATCH = 12
WORDS = [
    "model.dropout=0", f"training.global_batch_size={BATCH}", "training.micro_batch_size=2", f"max_steps={STEPS}",
]  # fmt: skip
"""Dropout draws differently with another number of ranks; 12 samples are 2 micro-batches on 3 nodes, 3 on 2."""


def elastic_spec(nodes: str, workers: int = 1, last_call: str = "20s", rejoin: str = "30s") -> str:
    """The tiny job on MIN:MAX nodes."""
    spec = spec_of(f'"{nodes}"', workers)
    return spec.replace("rejoin_timeout: 30s", f"rejoin_timeout: {rejoin}, last_call: {last_call}")


def shrink_and_grow(nodes: Cluster, words: Sequence[str] = (), workers: int = 1) -> None:
    """Three nodes, two when one is lost with its memory, three again; ends when all have."""
    job, words = nodes.job, [*WORDS, *words]
    nodes.start_all(*words, fault=";".join(slow(MEASURED, STEPS, attempt) for attempt in (1, 2)))
    wait_for_step(job, MEASURED)
    measured = read(job.run.plan)["measured"]
    nodes.kill_node(2)
    shutil.rmtree(nodes.memory(2).path, ignore_errors=True)  # the machine is gone
    wait(lambda: len(job.events("attempt")) == 2, 20, "two nodes to go on")
    attempt = job.events("attempt")[1]
    assert (attempt["nodes"], attempt["world"]) == (2, 2 * workers)
    taken = read(job.run.plan)["measured"]
    assert taken is not None
    assert taken["step"] >= measured["step"], "what was measured is taken along"
    wait(lambda: {line["attempt"] for line in read_lines(job.run.metrics)} >= {2}, 60, "a step of two nodes")
    nodes.start(2, *words)
    ended = nodes.end(120)
    assert [one.code for one in ended] == [0, 0, 0], ended
    assert [event["nodes"] for event in job.events("attempt")] == [3, 2, 3]
    assert [(e["kind"], e["node"]) for e in job.events("fault")] == [("node", 2)], "to grow is no fault"
    (_, resized) = job.events("resized")
    assert (resized["before"], resized["nodes"]) == (2, 3)
    assert job.events("restored")[-1]["tier"] == "peer", "all of the last one was in the memory of the two others"
    assert job.events("restored")[-1]["state_digest"] == resized["state_digest"], "what three have is what two had"
    wait(lambda: not job.processes(), 20, "the drainer of the killed launcher to give up")
    nodes.assert_nothing_left()


def assert_trained_alike(job: Job, fixed: Job, steps: int = STEPS, batch: int = BATCH) -> None:
    """Every sample once and in its step; the losses of the run whose number of nodes was fixed."""
    lines = {line["step"]: line for line in read_lines(job.run.metrics)}
    assert [lines[step]["samples"] for step in sorted(lines)] == [batch * step for step in range(1, steps + 1)]
    losses = job.losses()
    for step, loss in fixed.losses().items():
        assert math.isclose(losses[step], loss, rel_tol=TOLERANCE), (step, losses[step], loss)
