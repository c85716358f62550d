"""Checks that span several keys: head sizes, the order of the tiers, what is evaluated on.

Each runs as soon as the keys it needs are right, so that one wrong key does not hide the next fault.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..text.tree import Finding, KeyPath, Node, find, scalars
from ..units import parse_fraction
from .strategy import STRATEGY_CHECKS
from .view import View

BYTES_VOCABULARY = 256
_SPEED = ("memory", "peer", "disk", "object")
"""Types of tiers, fastest first."""


def _heads(view: View) -> Iterator[Finding]:
    if view.get("model", "type") == "gpt":
        yield from _head_sizes(view, ("model",), even=True)
    family = view.get("model", "like", "family")
    if isinstance(family, str):
        yield from _head_sizes(view, ("model", "like"), even=family == "decoder")


def _head_sizes(view: View, block: KeyPath, *, even: bool) -> Iterator[Finding]:
    """The width is a multiple of the heads; rotary positions turn pairs, so their heads have an even size."""
    width, heads = view.whole(*block, "d_model"), view.whole(*block, "n_heads")
    groups = view.whole(*block, "n_kv_heads")
    if width is not None and heads is not None:
        unit = 2 * heads if even else heads
        below = width - width % unit
        near = f"use d_model {below} or {below + unit}" if below else f"use d_model {unit}"
        if width % heads:
            yield Finding((*block, "d_model"), f"{width} is not divisible by n_heads = {heads}", near)
        elif even and (width // heads) % 2:
            size = width // heads
            message = f"the head size d_model / n_heads = {width} / {heads} = {size} is odd"
            yield Finding((*block, "d_model"), message, f"rotary positions need an even one: {near}")
    if heads is not None and groups is not None and heads % groups:
        fitting = [str(size) for size in range(1, min(heads, 1024) + 1) if heads % size == 0]
        message = f"n_heads = {heads} is not divisible by n_kv_heads = {groups}"
        yield Finding((*block, "n_kv_heads"), message, f"use one of {', '.join(fitting)}")


def _patches(view: View) -> Iterator[Finding]:
    block = ("model", "like")
    if view.get(*block, "family") != "diffusion":
        return
    side, patch = view.whole(*block, "input_size"), view.whole(*block, "patch_size")
    if side is not None and patch is not None and side % patch:
        yield Finding((*block, "input_size"), f"{side} is not a multiple of patch_size = {patch}", _near(side, patch))


def _vocabulary(view: View) -> Iterator[Finding]:
    size = view.whole("model", "vocab_size")
    texts = view.get("dataset", "type") in ("text", "jsonl") and view.get("dataset", "tokenizer") == "bytes"
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
    """Each tier is filled from the next faster one, so its interval is a multiple of that one's.

    A tier whose interval is planned is passed over: the plan makes it fit between its neighbours.
    """
    source: tuple[str, int] | None = None
    for kind, index in _chain(view):
        every = view.whole("tiers", index, "every")
        if every is None:
            continue
        if source is not None and every % source[1]:
            filled = f"is filled from {_FILLS[source[0]]}, every {source[1]} steps"
            message = f"the {_PLACE[kind]} {filled}; {every} is no multiple of {source[1]}"
            yield Finding(("tiers", index, "every"), message, _near(every, source[1]))
        source = kind, every


def _peer(view: View) -> Iterator[Finding]:
    """Copies of snapshots need snapshots, and as many other nodes as there are copies.

    One copy on one node is what a spec for any number of nodes asks for: the run leaves the tier out and says so.
    """
    at = {kind: index for index, kind in reversed(view.tiers())}
    if "peer" not in at:
        return
    if "memory" not in at:
        message = "it is filled from snapshots in memory, and there is no `memory` tier"
        yield Finding(("tiers", at["peer"], "type"), message, "put {type: memory} before it")
    count, replicas = view.nodes(), view.whole("tiers", at["peer"], "replicas")
    nodes = count.least if count is not None else None
    idle = nodes == 1 and replicas == 1 and count is not None and not count.elastic
    if nodes is not None and replicas is not None and replicas >= nodes and not idle:
        others = "1 node, so there is no other one" if nodes == 1 else f"{nodes} nodes, so {nodes - 1} other ones"
        others = f"at the least {others}" if count is not None and count.elastic else others
        fewer = f"use {nodes - 1} or less, or" if nodes > 1 else "remove the tier, or use"
        wanted = "1 other node is" if replicas == 1 else f"{replicas} other nodes are"
        message = f"{wanted} to get a copy, and the job has {others}"
        yield Finding(("tiers", at["peer"], "replicas"), message, f"{fewer} more nodes (cluster.nodes)")
    every = view.whole("tiers", at["peer"], "every")
    snapshots = view.whole("tiers", at["memory"], "every") if "memory" in at else None
    if every is not None and snapshots is not None and every % snapshots:
        message = (
            f"it is filled from {_FILLS['memory']}, every {snapshots} steps; {every} is no multiple of {snapshots}"
        )
        yield Finding(("tiers", at["peer"], "every"), message, _near(every, snapshots))


def _kept_for_good(view: View) -> Iterator[Finding]:
    """What is kept for good must be made first: `keep_every` is a multiple of the tier's own interval."""
    source: tuple[str, int] | None = None
    for kind, index in _chain(view):
        every = view.whole("tiers", index, "every")
        source = (kind, every) if every is not None else source
        keep_every = view.whole("tiers", index, "keep_every")
        if source is None or keep_every is None or keep_every % source[1] == 0:
            continue
        made = "checkpoints are made here" if source[0] == kind else f"there are {_FILLS[source[0]]}"
        message = f"{made} every {source[1]} steps, so {keep_every} would keep other steps than it says"
        yield Finding(("tiers", index, "keep_every"), message, _near(keep_every, source[1]))


def _chain(view: View) -> list[tuple[str, int]]:
    """The first tier of each type that fills the next one, fastest first: type and position."""
    at = {kind: index for index, kind in reversed(view.tiers())}
    return [(kind, at[kind]) for kind in _SPEED if kind in at and kind != "peer"]


def _near(value: int, unit: int) -> str:
    below = value - value % unit
    return f"use {below} or {below + unit}" if below else f"use {unit}"


_PLACE = {"disk": "disk", "object": "object store"}
_FILLS = {"memory": "snapshots in memory", "disk": "checkpoints on disk"}
_TAKES = {"endpoint": ("s3", "az"), "region": ("s3",)}
"""Kinds of stores that an option of the object tier is for."""


def _object_options(view: View) -> Iterator[Finding]:
    for index, kind in view.tiers():
        url = view.get("tiers", index, "url") if kind == "object" else None
        if not isinstance(url, str):
            continue
        scheme = url.partition("://")[0]
        for key, schemes in _TAKES.items():
            if view.get("tiers", index, key) is not None and scheme not in schemes:
                known = " and ".join(f"{scheme}://" for scheme in schemes)
                message = f"only stores of {known} take this key, and the url is {scheme}://"
                yield Finding(("tiers", index, key), message, "remove it", at_key=True)


def _same_folder(view: View) -> Iterator[Finding]:
    """Two tiers in one folder would shut each other out."""
    at = {kind: index for index, kind in reversed(view.tiers())}
    if not {"disk", "object"} <= at.keys():
        return
    path, url = view.get("tiers", at["disk"], "path"), view.get("tiers", at["object"], "url")
    output = view.get("output_dir")
    if not all(isinstance(text, str) for text in (path, url, output)) or not url.startswith("file://"):
        return
    folder = os.path.normpath(url.removeprefix("file://"))
    if folder == os.path.normpath(os.path.abspath(os.path.join(output, path))):  # noqa: PTH100, PTH118
        message = "this is the folder of the disk tier"
        yield Finding(("tiers", at["object"], "url"), message, "give each tier a folder of its own")


def _evaluation(view: View) -> Iterator[Finding]:
    """Something is evaluated on, and it is not what is trained on."""
    block = ("evaluation",)
    if view.get(*block) is None:
        return
    fraction, own = view.get(*block, "fraction"), view.get(*block, "dataset")
    if own is not None:
        if fraction is not None:
            message = "nothing is held out of the training data where `evaluation` has a `dataset` of its own"
            yield Finding((*block, "fraction"), message, "remove one of the two", at_key=True)
        if _same_data(view):
            hint = "give other data, or, but for python, leave `dataset` out: a part of the data is held out then"
            yield Finding((*block, "dataset"), "this is the data that is trained on", hint, at_key=True)
    elif view.get("dataset", "type") == "python":
        message = "nothing can be held out of a dataset of type `python`, whose samples only its own code knows"
        hint = "give evaluation a `dataset` of its own, like `dataset: {type: python, entry: my_data:build_held_out}`"
        yield Finding(block, message, hint, at_key=True)
    if own is None and fraction is not None and not _is_part(fraction):
        message = "must leave something to train on and something to evaluate on: more than 0, less than 1"
        yield Finding((*block, "fraction"), message, "like 1%")


def _same_data(view: View) -> bool:
    """Tell whether evaluation names the very data that is trained on."""
    own, trained = ("evaluation", "dataset"), ("dataset",)
    kind = view.get(*own, "type")
    if kind is None or kind != view.get(*trained, "type"):
        return False
    if kind != "python":
        paths = [view.get(*block, "path") for block in (own, trained)]
        return all(isinstance(path, str) for path in paths) and os.path.normpath(paths[0]) == os.path.normpath(paths[1])
    pairs = [(view.get(*own, key), view.get(*trained, key)) for key in ("entry", "kwargs")]
    return pairs[0][0] is not None and all((one or None) == (other or None) for one, other in pairs)


def _is_part(fraction: object) -> bool:
    try:
        return 0 < parse_fraction(fraction) < 1
    except ValueError:
        return True  # refused as it stands


def _elastic(view: View) -> Iterator[Finding]:
    """After a change of nodes the run goes on from its snapshots."""
    count = view.nodes()
    if count is None or not count.elastic:
        return
    if view.get("tiers") is not None and not any(kind == "memory" for _, kind in view.tiers()):
        message = "a run whose number of nodes changes goes on from its snapshots, and there is no `memory` tier"
        yield Finding(("cluster", "nodes"), message, "add `- {type: memory}`, or give one whole number")
    given = view.whole("strategy", "dp_replicate")
    if given is not None:
        message = f"the number of nodes may change, so dp_replicate cannot stay {given}"
        yield Finding(("strategy", "dp_replicate"), message, "leave it out: it is what the other degrees leave")


_CHECKS: tuple[Callable[[View], Iterator[Finding]], ...] = (
    *STRATEGY_CHECKS, _heads, _patches, _vocabulary, _warmup, _tier_order, _tier_intervals, _peer, _kept_for_good,
    _object_options, _same_folder, _evaluation, _elastic,
)  # fmt: skip


def contradictions(values: Any, faulty: Iterable[KeyPath]) -> list[Finding]:
    """Run all checks that span keys over the values of a spec."""
    view = View(values if isinstance(values, Mapping) else {}, faulty)
    return [finding for check in _CHECKS for finding in check(view)]


def not_finite(root: Node) -> list[Finding]:
    """Find NaN and infinity in the free-form blocks, whose values the model does not check."""
    findings = []
    for block in (("model",), ("dataset",), ("evaluation", "dataset")):
        node = find(root, (*block, "kwargs"))
        for path, scalar in scalars(node, (*block, "kwargs")) if node is not None else ():
            value = scalar.value
            if isinstance(value, float) and not math.isfinite(value):
                findings.append(Finding(path, "must be a finite number", "quote it if it is text"))
    return findings
