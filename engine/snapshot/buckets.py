"""The update in parts, in the order in which the state is copied: each waits on the device for its own copies alone.

Where a copy is late, what has been copied is updated meanwhile. Every number is updated by itself, so the parts give
what the whole gives, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..optim.masters import Masters

BUCKETS = 8
"""At most; each costs a call of the optimizer, and gains no more than its part of the update's time."""
UNCOPIED = -1
"""Number of the item after which a parameter may change of which this rank copies nothing."""


def update_in_parts(optimizer: torch.optim.Optimizer, last: Mapping[Tensor, int], hold: Callable[[int], None]) -> None:
    """Make one update. `last`: the number of the last item with something of a parameter, or of what is kept of it.

    `hold` lets what is computed from then on follow the copy of an item, and of all items before it.
    """
    whole = optimizer.param_groups
    try:
        for item, bucket in _buckets(whole, last):
            if item != UNCOPIED:
                hold(item)
            optimizer.param_groups = bucket
            optimizer.step()
    finally:
        optimizer.param_groups = whole


def in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an update can be made so; one through fp32 copies goes through all of them at once."""
    return not isinstance(optimizer, Masters)


def _buckets(groups: list[dict[str, Any]], last: Mapping[Tensor, int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Parts of about as many numbers, each with the item it waits for, and of each group what is in it."""
    members = [
        (last.get(parameter, UNCOPIED), number, parameter)
        for number, group in enumerate(groups)
        for parameter in group["params"]
    ]
    members.sort(key=lambda member: member[0])
    share = max(1, -(-sum(parameter.numel() for _, _, parameter in members) // BUCKETS))
    buckets: dict[int, list[tuple[int, int, Tensor]]] = {}
    size = 0
    for member in members:
        buckets.setdefault(size // share, []).append(member)
        size += member[2].numel()
    for bucket in buckets.values():
        mine = [[parameter for _, of, parameter in bucket if of == number] for number in range(len(groups))]
        yield bucket[-1][0], [{**group, "params": its} for group, its in zip(groups, mine, strict=True) if its]
