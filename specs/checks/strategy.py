"""Checks of the parallel degrees: their product, the batch over them, and what each asks of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..shapes import ff_dim
from ..text.tree import Finding
from .view import View

DEGREES = ("dp_replicate", "dp_shard", "tp", "pp")
_MODEL_DEGREES = {
    "tp": ("tensor parallel", '{"tp": {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}}'),
    "pp": ("pipeline parallel", '{"pp": ["embedding", "layers.0", …, "head"], "loss": F.cross_entropy}'),
}
"""What each is called, and what a plan of one's own returns for it."""


def _degrees(view: View) -> Iterator[Finding]:
    replicas, rest, world = view.whole("strategy", "dp_replicate"), _cuts(view), view.world()
    if rest is None or world is None:
        return
    shard, tp, pp = rest
    nodes, workers = world
    has = f"nodes * workers_per_node = {nodes} * {workers} = {nodes * workers}"
    if replicas is None:
        product = shard * tp * pp
        if view.is_elastic and (nodes * workers) % (tp * pp) == 0:
            yield from _more_than_there_are(shard, nodes * workers // (tp * pp), has)
        elif nodes * workers % product and view.get("strategy", "dp_replicate") is None:
            key = max(DEGREES[1:], key=lambda key: view.whole("strategy", key) or 0)
            message = f"dp_shard * tp * pp = {shard} * {tp} * {pp} = {product} does not divide {has}"
            hint = f"their product must be one of {_divisors(nodes * workers)}"
            yield Finding(("strategy", key), message, hint)
        return
    product = replicas * shard * tp * pp
    if product != nodes * workers:
        message = f"{' * '.join(DEGREES)} = {replicas} * {shard} * {tp} * {pp} = {product}, but {has}"
        left, over = divmod(nodes * workers, shard * tp * pp)
        hint = f"set it to {left}, or leave it out: it is {'all workers' if left == nodes * workers else left} then"
        if over or left == 0:
            hint = f"the others leave no whole number for it: their product must be one of {_divisors(nodes * workers)}"
        yield Finding(("strategy", "dp_replicate"), message, hint)


def _more_than_there_are(shard: int, most: int, has: str) -> Iterator[Finding]:
    """Of a run whose number of nodes changes, `dp_shard` follows what is there: it need not divide it."""
    if shard > most:
        message = f"{shard} is more than the most ranks that see different samples: {most}, where {has}"
        yield Finding(("strategy", "dp_shard"), message, f"use {most} or less")


def _cuts(view: View) -> tuple[int, int, int] | None:
    """dp_shard, tp and pp; None where one of them is wrong."""
    shard, tp, pp = (view.whole("strategy", key) for key in DEGREES[1:])
    return None if shard is None or tp is None or pp is None else (shard, tp, pp)


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, min(number, 4096) + 1) if number % size == 0)


def _data_parallel(view: View) -> int | None:
    """Ranks, or groups of ranks, that see different samples; None where the degrees are wrong."""
    rest, world = _cuts(view), view.world()
    if rest is None or world is None:
        return None
    whole, over = divmod(world[0] * world[1], rest[1] * rest[2])
    return whole if whole and not over else None


def _passes(view: View) -> int | None:
    """Micro-batches of a step; None where the batch does not divide."""
    total, micro = view.whole("training", "global_batch_size"), view.whole("training", "micro_batch_size")
    among = _data_parallel(view)
    if total is None or micro is None or among is None or total % (micro * among):
        return None
    return total // (micro * among)


def _batch(view: View) -> Iterator[Finding]:
    total, micro = view.whole("training", "global_batch_size"), view.whole("training", "micro_batch_size")
    among, world = _data_parallel(view), view.world()
    if total is None or micro is None or among is None or world is None:
        return
    unit = micro * among
    if total % unit == 0:
        return
    words = f"nodes * workers_per_node = {micro} * {world[0]} * {world[1]}"
    if among != world[0] * world[1]:
        words = f"dp_replicate * dp_shard = {micro} * {among}"
    message = f"{total} is not a multiple of micro_batch_size * {words} = {unit}"
    below = total - total % unit
    near = f"use {below} or {below + unit}" if below else f"use {unit} or more"
    if total % among == 0:
        share = total // among
        fitting = max(size for size in range(1, min(micro, share, 4096) + 1) if share % size == 0)
        near += f", or micro_batch_size {fitting}"
    yield Finding(("training", "global_batch_size"), message, near)


def _kind_of_model(view: View) -> Iterator[Finding]:
    """Only the decoder that is built in says how it is cut; others name code that does."""
    if view.get("model", "type") != "python" or view.get("model", "plan") is not None:
        return
    for key, (name, returned) in _MODEL_DEGREES.items():
        degree = view.whole("strategy", key)
        if degree is not None and degree > 1:
            message = f"{name} needs to be told how a model of type `python` is cut"
            hint = (
                f"set model.plan: module:callable, of a function plan(model) that returns {returned} "
                f"(docs/strategies.md); or use {key}: 1, and dp_shard to divide its parameters"
            )
            yield Finding(("strategy", key), message, hint)


def _tensor_parallel(view: View) -> Iterator[Finding]:
    """Heads, hidden width and vocabulary are divided evenly."""
    tp = view.whole("strategy", "tp")
    if tp is None or tp == 1 or view.get("model", "type") != "gpt":
        return
    heads = view.whole("model", "n_heads")
    sizes = {
        "n_heads": heads,
        "n_kv_heads": view.whole("model", "n_kv_heads") or heads,
        "d_ff": _hidden(view),
        "vocab_size": view.whole("model", "vocab_size"),
    }
    for key, size in sizes.items():
        if size is not None and size % tp and not (key == "n_kv_heads" and size == heads):
            given = view.get("model", key) is not None
            message = f"{size}{'' if given else ' (derived)'} is not divisible by strategy.tp = {tp}"
            above = size - size % tp + tp
            hint = f"use {key} {above}, or a tp of {_divisors_of(size, tp)}"
            yield Finding(("model", key) if given else ("strategy", "tp"), f"model.{key} = {message}", hint)


def _hidden(view: View) -> int | None:
    width, given = view.whole("model", "d_model"), view.get("model", "d_ff")
    kind = view.get("model", "activation")
    if given is not None:
        return view.whole("model", "d_ff")
    return None if width is None or not isinstance(kind, str) else ff_dim(width, kind)


def _divisors_of(size: int, below: int) -> str:
    return " or ".join(str(number) for number in range(1, below) if size % number == 0)


def _pipeline(view: View) -> Iterator[Finding]:
    pp, layers = view.whole("strategy", "pp"), view.whole("model", "n_layers")
    schedule, each = view.get("strategy", "pp_schedule"), view.whole("strategy", "pp_stages_per_rank")
    interleaved = schedule == "interleaved-1f1b"
    if pp is None or not isinstance(schedule, str):
        return
    if pp == 1:
        for key, given in (("pp_schedule", interleaved or schedule == "gpipe"), ("pp_stages_per_rank", each)):
            if given:
                yield Finding(("strategy", key), "there is no pipeline with pp: 1", "remove it, or set pp", at_key=True)
        return
    if each is not None and interleaved != (each > 1):
        message = f"the schedule {schedule} has {'two stages or more' if interleaved else 'one stage'} on each worker"
        hint = "use 2 or more" if interleaved else "use 1, or pp_schedule: interleaved-1f1b"
        yield Finding(("strategy", "pp_stages_per_rank"), message, hint)
        return
    stages = pp * (each or (2 if interleaved else 1))
    if layers is not None and layers < stages:
        message = f"{stages} stages need as many layers, and model.n_layers is {layers}"
        yield Finding(("strategy", "pp"), message, f"use {stages} layers or more, or fewer stages")
    yield from _enough_passes(view, pp, schedule)
    yield from _lengths_in_a_pipeline(view)


def _enough_passes(view: View, pp: int, schedule: str) -> Iterator[Finding]:
    passes = _passes(view)
    if passes is None:
        return
    key, has = ("training", "global_batch_size"), f"a step has {passes} micro-batches"
    if schedule == "1f1b" and passes < pp:
        message = f"{has}, and the schedule 1f1b over pp = {pp} stages needs {pp} or more"
        yield Finding(key, message, "use a larger global_batch_size, a smaller micro_batch_size, or pp_schedule: gpipe")
    if schedule == "interleaved-1f1b" and passes % pp:
        message = f"{has}, and the schedule interleaved-1f1b needs a multiple of pp = {pp}"
        yield Finding(key, message, "use another global_batch_size or micro_batch_size, or pp_schedule: 1f1b")


def _lengths_in_a_pipeline(view: View) -> Iterator[Finding]:
    length, judged = view.whole("dataset", "seq_len"), view.whole("evaluation", "dataset", "seq_len")
    if length is not None and judged is not None and length != judged:
        message = f"a pipeline is made for one length of samples, and dataset.seq_len is {length}"
        yield Finding(("evaluation", "dataset", "seq_len"), message, f"use {length}, or pp: 1")
    if view.get("dataset", "type") == "python" and view.get("model", "type") == "gpt":
        message = "a pipeline must know the length of the samples, which a dataset of type `python` does not tell"
        yield Finding(("strategy", "pp"), message, "use a dataset of type text, jsonl or tokens, or pp: 1")


STRATEGY_CHECKS: tuple[Callable[[View], Iterator[Finding]], ...] = (
    _batch, _degrees, _kind_of_model, _tensor_parallel, _pipeline,
)  # fmt: skip
