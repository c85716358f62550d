"""What a plan promises, over jobs and machines of all sizes: its advice is enough, and better hardware never hurts."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.planners.build import tiny

from dtrain.planners.intervals import BUDGET, Place, Wanted
from dtrain.planners.machine import Machine
from dtrain.planners.plan import Plan, make_plan

ADVICE = {
    r"\(training\.global_batch_size (\d+)\)": ("training", "global_batch_size"),
    r"a copy at (\S+ \S+) per rank": ("cluster", "channels", "storage", "bandwidth"),
    r"checkpoint\.max_overhead (\S+%)": ("checkpoint", "max_overhead"),
    r"needs (\S+ \S+) per node \(cluster\.hardware\.disk_bandwidth": ("cluster", "hardware", "disk_bandwidth"),
    r"needs (\S+ \S+) per node \(cluster\.hardware\.object_bandwidth": ("cluster", "hardware", "object_bandwidth"),
}
"""What a line of `changes` asks for, and the key of the spec that takes it as it is written there."""
Values = dict[str, Any]


def every() -> st.SearchStrategy[Any]:
    return st.one_of(st.just("auto"), st.just("auto"), st.sampled_from([1, 2, 3, 10, 100]))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Values, Machine]:
    """The tiny job with other sizes, tiers, rates and budget, and a machine for it."""
    nodes, workers = draw(st.sampled_from([1, 2, 64])), draw(st.sampled_from([1, 2, 8]))
    samples, passes = draw(st.sampled_from([1, 16])), draw(st.sampled_from([1, 2, 7, 64]))
    accelerator = draw(st.sampled_from(["cpu", "h100"]))
    slow = {"when_slow": draw(st.sampled_from(["auto", "skip", "wait"]))}
    tiers: list[Values] = [{"type": "memory", "every": draw(every())}]
    tiers += [{"type": "peer", "every": draw(every())}] if nodes > 1 and draw(st.booleans()) else []
    for kind in ({"type": "disk"}, {"type": "object", "url": "s3://b/x"}):
        kept = {"keep_every": draw(st.sampled_from([12, 60, 97, 1000]))} if draw(st.integers(0, 3)) == 0 else {}
        tiers += [slow | kind | kept | {"every": draw(every())}] if draw(st.booleans()) else []
    width = 8 * draw(st.sampled_from([1, 16, 512]))
    values: Values = {
        "max_steps": draw(st.sampled_from([1, 7, 100, 1000, 10**6])),
        "model": {"type": "gpt", "n_layers": draw(st.sampled_from([1, 12])), "d_model": width, "n_heads": 4,
                  "vocab_size": 256},
        "training": {"global_batch_size": samples * passes * nodes * workers, "micro_batch_size": samples},
        "cluster": {
            "nodes": nodes, "workers_per_node": workers, "device": "cpu" if accelerator == "cpu" else "cuda",
            "hardware": {"disk_bandwidth": draw(st.floats(1e3, 1e12)), "object_bandwidth": draw(st.floats(1e3, 1e12)),
                         "flops": draw(st.floats(1e9, 1e16))},
            "channels": {"storage": {"bandwidth": draw(st.floats(1e3, 1e12))}},
        },
        "tiers": tiers,
        "checkpoint": {"max_overhead": draw(st.sampled_from([0.001, 0.01, 0.05, 0.2]))},
    }  # fmt: skip
    return values, Machine(draw(st.sampled_from([2, 64])), 2**34, 2**33, accelerator)


def planned(values: Values, machine: Machine, keys: tuple[str, ...] = (), value: object = None) -> Plan:
    """Plan the job, with the value of one key replaced."""
    values = copy.deepcopy(values)
    block = values
    for key in keys[:-1]:
        block = block[key]
    if keys:
        block[keys[-1]] = value
    return make_plan(tiny(**values), machine)


MORE_SNAPSHOTS_TOO = (
    {
        "max_steps": 100,
        "model": {"type": "gpt", "n_layers": 1, "d_model": 128, "n_heads": 4, "vocab_size": 256},
        "training": {"global_batch_size": 14, "micro_batch_size": 1},
        "cluster": {"nodes": 2, "workers_per_node": 1, "device": "cpu", "hardware": {"flops": 23696579316.0},
                    "channels": {"storage": {"bandwidth": 27114812.0}}},
        "tiers": [{"type": "memory", "every": "auto"}, {"type": "peer", "every": "auto"}],
        "checkpoint": {"max_overhead": 0.01},
    },
    Machine(2, 2**34, 2**33, "cpu"),
)  # fmt: skip
"""The budget that lets other nodes have every snapshot lets more snapshots be made, which take their part of it."""


@settings(deadline=None)
@given(jobs())
@example(MORE_SNAPSHOTS_TOO)
def test_each_change_that_a_plan_names_is_enough_as_it_is_written(job: tuple[Values, Machine]) -> None:
    plan = planned(*job)
    for line in plan.changes:
        for pattern, keys in ADVICE.items():
            asked = re.search(pattern, line)
            if asked is None:
                continue
            value = int(asked[1]) if asked[1].isdigit() else asked[1]
            better = planned(*job, keys, value)
            if "_bandwidth" in keys[-1] or "needs checkpoint" in line:
                assert not any(other.split(" needs ")[0] == line.split(" needs ")[0] for other in better.changes), line
                continue
            assert better.tiers[0].every == (1 if better.tiers[0].auto else plan.tiers[0].every), line
            assert not any("a snapshot of every step" in other for other in better.changes), line


@settings(deadline=None)
@given(jobs(), st.one_of(st.floats(1.001, 4), st.floats(1.001, 1000)))
def test_faster_hardware_and_a_larger_budget_never_mean_fewer_checkpoints(
    job: tuple[Values, Machine], factor: float
) -> None:
    values, machine = job
    plan, (hardware, channels) = planned(values, machine), (values["cluster"][key] for key in ("hardware", "channels"))
    for keys, value in (
        (("cluster", "hardware", "disk_bandwidth"), hardware["disk_bandwidth"]),
        (("cluster", "hardware", "object_bandwidth"), hardware["object_bandwidth"]),
        (("cluster", "channels", "storage", "bandwidth"), channels["storage"]["bandwidth"]),
        (("checkpoint", "max_overhead"), values["checkpoint"]["max_overhead"]),
    ):
        limit = 1.0 if keys[0] == "checkpoint" else 1e15
        better = planned(values, machine, keys, min(value * factor, limit))
        for before, after in zip(plan.tiers, better.tiers, strict=True):
            assert after.every <= before.every, (keys, before.why, after.why)


def test_a_narrower_interval_of_snapshots_takes_every_other_one_with_it() -> None:
    """Snapshots went from every 99 steps to every 50, and the store behind them from every 99 to every 100."""
    widths: list[list[int]] = []
    for budget in (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0):
        values: Values = {
            "max_steps": 100,
            "cluster": {"device": "cuda", "channels": {"storage": {"bandwidth": "100 MiB/s"}},
                        "hardware": {"object_bandwidth": "20 KiB/s"}},
            "tiers": [{"type": "memory", "every": "auto"}, {"type": "object", "url": "s3://b/x", "every": "auto"}],
            "checkpoint": {"max_overhead": budget},
        }  # fmt: skip
        widths.append([tier.every for tier in planned(values, Machine(2, 2**34, 2**33, "h100")).tiers])
    assert len({memory for memory, _ in widths}) > 3, "snapshots are made more often"
    for before, after in itertools.pairwise(widths):
        assert all(narrow <= wide for wide, narrow in zip(before, after, strict=True)), widths
        assert all(slow % memory == 0 for memory, slow in (before, after)), widths


def test_an_interval_that_is_the_widest_wanted_is_rounded_up_for_no_other() -> None:
    """Snapshots that 100 steps would pay for were made every 128, though nothing behind them asked for doubles."""
    for wanted, after in itertools.product(range(1, 200), range(1, 200)):
        steps = Place(1000, after=after).fitted(Wanted(wanted, BUDGET)).steps
        below = 2 ** ((wanted - 1).bit_length() - 1) if wanted > 1 else 0
        if after <= below or wanted == 1:
            assert steps == wanted, after
        else:
            assert wanted <= steps < 2 * wanted, after
