"""The shape of the model, read from the model itself: which block takes which keys of which kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from ..block import Block
from ..datasets import ENTRY_PATTERN
from ..models import (
    INTERFACE_PATTERN,
    NAME_PATTERN,
    RENDEZVOUS_PATTERN,
    Spec,
)
from ..nodes import parse_nodes
from ..places import ENDPOINT_PATTERN, URL_PATTERN
from ..text.tree import KeyPath
from ..units import parse_bandwidth, parse_bytes, parse_flops, parse_fraction, parse_seconds

Names = tuple[str, ...]
"""A key path without list indices: where a block stands in the model."""

_UNITS: dict[Any, str] = {
    parse_bytes: "a size like 10GiB",
    parse_bandwidth: "a bandwidth like 10GiB/s",
    parse_flops: "a rate of operations above 0, like 400TFLOP/s",
    parse_seconds: "a time above 0, like 30s",
    parse_fraction: "a fraction from 0 to 1, like 1%",
    parse_nodes: "a whole number of at least 1, or `MIN:MAX` like 2:4",
}
_PATTERNS = {
    ENTRY_PATTERN: "`module:callable`, like `zoo:mlp`",
    NAME_PATTERN: "1 to 64 letters, digits, `.`, `_` or `-`, with a letter or digit first",
    URL_PATTERN: "`s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder` or `file:///folder`",
    ENDPOINT_PATTERN: "an address like `http://minio:9000`",
    RENDEZVOUS_PATTERN: "`auto`, `slurm`, or `HOST:PORT` of node 0 with a port from 1 to 65535, like `node0:29500`",
    INTERFACE_PATTERN: "`auto`, or the name of a network interface, like `eth0`",
}


@dataclass(frozen=True)
class Place:
    """One block of the spec; `variants` has several entries where the key `tag` chooses among models."""

    names: Names
    tag: str | None
    many: bool
    variants: Mapping[str, type[Block]]

    def choose(self, values: object) -> type[Block] | None:
        """Return the model for this block's values; None when its tag names none."""
        if self.tag is None:
            return next(iter(self.variants.values()))
        chosen = values.get(self.tag) if isinstance(values, Mapping) else None
        return self.variants.get(chosen) if isinstance(chosen, str) else None

    @property
    def title(self) -> str:
        """The block as people write it: `training.optimizer`, `tiers[]`."""
        return title(self.names) + ("[]" if self.many else "")


def title(names: Names) -> str:
    """Join names to a path; the items of a list block are marked."""
    return ".".join(names)


def names_of(path: KeyPath) -> Names:
    """Drop the list indices of a key path."""
    return tuple(part for part in path if isinstance(part, str))


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _place(names: Names, annotation: Any, tag: str | None, many: bool = False) -> Place | None:
    """Return the block that an annotation stands for; None for a plain value."""
    if get_origin(annotation) is list:
        return _place(names, get_args(annotation)[0], None, many=True)
    if get_origin(annotation) is Annotated:
        base, *extras = get_args(annotation)
        tags = [extra.discriminator for extra in extras if isinstance(extra, FieldInfo)]
        return _place(names, base, next((str(found) for found in tags if found), tag), many)
    models = [kind for kind in _options(annotation) if isinstance(kind, type) and issubclass(kind, Block)]
    if not models:
        return None
    if tag is None:
        return Place(names, None, many, {"": models[0]})
    values = {str(get_args(model.model_fields[tag].annotation)[0]): model for model in models}
    return Place(names, tag, many, values)


@cache
def places() -> Mapping[Names, Place]:
    """Return all blocks of the spec, the whole spec first under the empty path."""
    found: dict[Names, Place] = {}

    def visit(place: Place) -> None:
        found[place.names] = place
        for model in place.variants.values():
            for key, info in model.model_fields.items():
                tag = str(info.discriminator) if info.discriminator else None
                below = _place((*place.names, key), info.annotation, tag)
                if below is not None:
                    visit(below)

    visit(Place((), None, False, {"": Spec}))
    return found


def keys_of(place: Place) -> dict[str, list[str]]:
    """Return every key of a block with the tags of the variants that take it."""
    keys: dict[str, list[str]] = {}
    for tag, model in place.variants.items():
        for key in model.model_fields:
            keys.setdefault(key, []).append(tag)
    return keys


def fields_at(path: KeyPath) -> list[FieldInfo]:
    """Return the fields that a key path may mean, one per variant of its block."""
    names = names_of(path)
    place = places().get(names[:-1]) if names else None
    if place is None:
        return []
    infos = (model.model_fields.get(names[-1]) for model in place.variants.values())
    return [info for info in infos if info is not None]


def default_of(model: type[BaseModel], key: str) -> Any:
    """Return the default of a field; None when it has none."""
    info = model.model_fields.get(key)
    return None if info is None or info.is_required() else info.get_default(call_default_factory=True)


def key_path(loc: Iterable[str | int]) -> KeyPath:
    """Turn the location in a pydantic error into a key path: without tags, without branches of unions."""
    path: list[str | int] = []
    place: Place | None = places()[()]
    skip_tag = False
    for part in loc:
        if skip_tag and isinstance(part, str):
            skip_tag = False
        elif isinstance(part, int):
            path.append(part)
            skip_tag = place is not None and place.tag is not None
        elif place is not None:
            path.append(part)
            place = places().get(names_of(tuple(path)))
            skip_tag = place is not None and place.tag is not None and not place.many
        else:
            break
    return tuple(path)


def _constraints(extras: Iterable[Any]) -> Iterator[Any]:
    for extra in extras:
        if isinstance(extra, FieldInfo):
            yield from extra.metadata
        else:
            yield extra


def _limits(extras: list[Any]) -> dict[str, Any]:
    names = ("gt", "ge", "lt", "le", "min_length", "max_length", "pattern")
    return {name: value for extra in extras for name in names
            if (value := getattr(extra, name, None)) is not None}  # fmt: skip


def _range(limits: Mapping[str, Any], whole: bool) -> str:
    low = limits.get("ge")
    if whole and "gt" in limits:
        low = limits["gt"] + 1
    high = limits.get("lt")
    if low is not None and "le" in limits:
        return f" from {low:g} to {limits['le']:g}"
    parts = [f"of at least {low:g}"] if low is not None else []
    parts += [f"above {limits['gt']:g}"] if "gt" in limits and not whole else []
    # The limit of 64-bit numbers goes without saying.
    parts += [f"below {high:g}"] if high is not None and high < 2**62 else []
    return " " + " and ".join(parts) if parts else ""


def wanted(annotation: Any, extras: Iterable[Any] = ()) -> str:
    """Say in words which values an annotation takes: `a whole number of at least 1`."""
    extras = list(_constraints(extras))
    if get_origin(annotation) is Annotated:
        base, *more = get_args(annotation)
        return wanted(base, [*more, *extras])
    for extra in extras:
        if isinstance(extra, BeforeValidator) and extra.func in _UNITS:
            return _UNITS[extra.func]
    options = _options(annotation)
    if len(options) > 1:
        words = ["null" if kind is type(None) else wanted(kind, extras) for kind in options]
        return " or ".join(dict.fromkeys(words))
    return _plain_kind(annotation, _limits(extras))


def _plain_kind(kind: Any, limits: Mapping[str, Any]) -> str:
    words = {
        bool: "true or false",
        int: "a whole number" + _range(limits, True),
        float: "a number" + _range(limits, False),
        str: "text that is not empty" if limits.get("min_length") else "text",
    }
    if get_origin(kind) is Literal:
        choices = [f"`{choice}`" for choice in get_args(kind)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if get_origin(kind) is list:
        return f"a list of exactly {limits['min_length']}" if limits.get("min_length") else "a list"
    if kind is str and "pattern" in limits:
        return _PATTERNS.get(limits["pattern"], "text")
    return words.get(kind, "a block of keys")


def wanted_at(path: KeyPath) -> str:
    """Say which values the key at `path` takes."""
    if path and isinstance(path[-1], int):
        lists = [info.annotation for info in fields_at(path) if get_origin(info.annotation) is list]
        return wanted(get_args(lists[0])[0]) if lists else "a block of keys"
    texts = list(dict.fromkeys(wanted(info.annotation, info.metadata) for info in fields_at(path)))
    if len(texts) > 2 and all(text.count("`") == 2 and text[0] == text[-1] == "`" for text in texts):
        return f"one of {', '.join(texts)}"
    return " or ".join(texts) or "something else"
