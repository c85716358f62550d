"""Checks that span several keys: batch arithmetic, degrees, head sizes, the order of the tiers.

Each runs as soon as the keys it needs are right, so that one wrong key does not hide the next fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from .outline import default_of, names_of, places
from .tree import Finding, KeyPath, Node, find, scalars

BYTES_VOCABULARY = 256
_SPEED = ("memory", "disk", "object")
"""Types of tiers, fastest first."""


class View:
    """The values of a spec that may be wrong elsewhere; a key with a fault, or below one, reads as None."""

    def __init__(self, values: Mapping[str, Any], faulty: Iterable[KeyPath]) -> None:
        self._values = values
        self._faulty = frozenset(faulty)

    def get(self, *path: str | int) -> Any:
        """Return the value at `path`, its default where the spec says nothing."""
        if any(path[: len(bad)] == bad for bad in self._faulty):
            return None
        current: Any = self._values
        for depth, part in enumerate(path):
            if isinstance(current, BaseModel):
                current = getattr(current, str(part), None)
            elif isinstance(current, list) and isinstance(part, int) and part < len(current):
                current = current[part]
            elif isinstance(current, Mapping) and part in current:
                current = current[str(part)]
            else:
                place = places().get(names_of(path[:depth]))
                model = place.choose(current) if place is not None else None
                current = default_of(model, str(part)) if model is not None else None
        return current

    def whole(self, *path: str | int) -> int | None:
        """Return the whole number at `path`; None if it is none."""
        value = self.get(*path)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def world(self) -> tuple[int, int] | None:
        """Return nodes and workers per node."""
        nodes, workers = self.whole("cluster", "nodes"), self.whole("cluster", "workers_per_node")
        return None if nodes is None or workers is None else (nodes, workers)

    def tiers(self) -> list[tuple[int, str]]:
        """Return the tiers that can be read: position and type."""
        tiers = self.get("tiers")
        kinds = [(index, self.get("tiers", index, "type")) for index in range(len(tiers or []))]
        return [(index, kind) for index, kind in kinds if isinstance(kind, str)]


def _batch(view: View) -> Iterator[Finding]:
    total = view.whole("training", "global_batch_size")
    micro = view.whole("training", "micro_batch_size")
    world = view.world()
    if total is None or micro is None or world is None:
        return
    nodes, workers = world
    unit = micro * nodes * workers
    if total % unit == 0:
        return
    below = total - total % unit
    message = (
        f"{total} is not a multiple of micro_batch_size * nodes * workers_per_node "
        f"= {micro} * {nodes} * {workers} = {unit}"
    )
    near = f"use {below} or {below + unit}" if below else f"use {unit} or more"
    if total % (nodes * workers) == 0:
        share = total // (nodes * workers)
        fitting = max(size for size in range(1, min(micro, share, 4096) + 1) if share % size == 0)
        near += f", or micro_batch_size {fitting}"
    yield Finding(("training", "global_batch_size"), message, near)


def _degrees(view: View) -> Iterator[Finding]:
    keys = ("dp_replicate", "dp_shard", "tp", "pp")
    degrees = [view.whole("strategy", key) for key in keys]
    world = view.world()
    replicate, rest = degrees[0], [degree for degree in degrees[1:] if degree is not None]
    if replicate is None or len(rest) < 3 or world is None:
        return
    product = replicate * rest[0] * rest[1] * rest[2]
    nodes, workers = world
    if product != nodes * workers:
        message = (
            f"{' * '.join(keys)} = {replicate} * {rest[0]} * {rest[1]} * {rest[2]} = {product}, but "
            f"nodes * workers_per_node = {nodes} * {workers} = {nodes * workers}"
        )
        hint = f"set it to {nodes * workers}, or leave it out: it is all workers then"
        yield Finding(("strategy", "dp_replicate"), message, hint)


def _heads(view: View) -> Iterator[Finding]:
    if view.get("model", "type") != "gpt":
        return
    width, heads = view.whole("model", "d_model"), view.whole("model", "n_heads")
    groups = view.whole("model", "n_kv_heads")
    if width is not None and heads is not None:
        unit = 2 * heads
        below = width - width % unit
        near = f"use d_model {below} or {below + unit}" if below else f"use d_model {unit}"
        if width % heads:
            yield Finding(("model", "d_model"), f"{width} is not divisible by n_heads = {heads}", near)
        elif (width // heads) % 2:
            size = width // heads
            message = f"the head size d_model / n_heads = {width} / {heads} = {size} is odd"
            yield Finding(("model", "d_model"), message, f"rotary positions need an even one: {near}")
    if heads is not None and groups is not None and heads % groups:
        fitting = [str(size) for size in range(1, min(heads, 1024) + 1) if heads % size == 0]
        message = f"n_heads = {heads} is not divisible by n_kv_heads = {groups}"
        yield Finding(("model", "n_kv_heads"), message, f"use one of {', '.join(fitting)}")


def _vocabulary(view: View) -> Iterator[Finding]:
    size = view.whole("model", "vocab_size")
    texts = view.get("dataset", "type") == "text" and view.get("dataset", "tokenizer") == "bytes"
    if view.get("model", "type") == "gpt" and texts and size is not None and size < BYTES_VOCABULARY:
        message = f"the bytes tokenizer makes tokens 0 to 255, so at least {BYTES_VOCABULARY} are needed"
        yield Finding(("model", "vocab_size"), message, f"use {BYTES_VOCABULARY} or more")


def _warmup(view: View) -> Iterator[Finding]:
    warmup, steps = view.whole("training", "scheduler", "warmup_steps"), view.whole("max_steps")
    if warmup is not None and steps is not None and warmup > steps:
        message = f"the warm-up of {warmup} steps is longer than the run (max_steps = {steps})"
        yield Finding(("training", "scheduler", "warmup_steps"), message, f"use {steps} or less")


def _tier_order(view: View) -> Iterator[Finding]:
    first: dict[str, int] = {}
    slowest = -1
    for index, kind in view.tiers():
        if kind not in _SPEED:
            continue
        if kind in first:
            message = f"a second `{kind}` tier (the first is tiers[{first[kind]}])"
            yield Finding(("tiers", index, "type"), message, "give each type of tier at most once")
            continue
        first[kind] = index
        speed = _SPEED.index(kind)
        if speed < slowest:
            message = f"the `{kind}` tier stands behind a slower one (`{_SPEED[slowest]}`)"
            yield Finding(("tiers", index, "type"), message, f"order them fastest first: {', '.join(_SPEED)}")
        slowest = max(slowest, speed)


def _tier_intervals(view: View) -> Iterator[Finding]:
    """Each tier is filled from the next faster one, so its interval is a multiple of that one's."""
    at = {kind: index for index, kind in reversed(view.tiers())}
    chain = [kind for kind in _SPEED if kind in at]
    for faster, slower in pairwise(chain):
        short, long = (view.whole("tiers", at[kind], "every") for kind in (faster, slower))
        if short is None or long is None or long % short == 0:
            continue
        below = long - long % short
        near = f"use {below} or {below + short}" if below else f"use {short}"
        message = f"the {_FILLED[slower]} is filled from {_FILLS[faster]}, every {short} steps; {long} is no multiple"
        yield Finding(("tiers", at[slower], "every"), message, near)


_FILLED = {"disk": "disk", "object": "object store"}
_FILLS = {"memory": "snapshots in memory", "disk": "checkpoints on disk"}


_CHECKS: tuple[Callable[[View], Iterator[Finding]], ...] = (
    _batch, _degrees, _heads, _vocabulary, _warmup, _tier_order, _tier_intervals,
)  # fmt: skip


def contradictions(values: Any, faulty: Iterable[KeyPath]) -> list[Finding]:
    """Run all checks that span keys over the values of a spec."""
    view = View(values if isinstance(values, Mapping) else {}, faulty)
    return [finding for check in _CHECKS for finding in check(view)]


def not_finite(root: Node) -> list[Finding]:
    """Find NaN and infinity in the free-form blocks, whose values the model does not check."""
    findings = []
    for block in ("model", "dataset"):
        node = find(root, (block, "kwargs"))
        for path, scalar in scalars(node, (block, "kwargs")) if node is not None else ():
            value = scalar.value
            if isinstance(value, float) and not math.isfinite(value):
                findings.append(Finding(path, "must be a finite number", "quote it if it is text"))
    return findings
