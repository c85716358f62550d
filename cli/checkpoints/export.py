"""`dtrain export`: the weights of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from ...specs.codes import Code
from ...specs.units import parse_bytes
from ...tiers.fence import FOLDER as CLAIMS
from ...tiers.format.layout import MANIFEST, RunDir, parse_version, unfinished
from ...tiers.lock import Locked
from ...tiers.reading.export import Exported
from ...tiers.reading.export import export as write
from ...tiers.reading.recovery import Opened
from ...tiers.reading.whole import facts_of
from ..terminal.refusal import Refused, guarded
from ..view.format import human_bytes, plural
from .output import document, progress, say, talk
from .stored import Held, first_readable, pick

_HOLDS_CHECKPOINTS = "a place of checkpoints"


def export(
    target: str, out_dir: str, max_shard: str, as_json: bool, tier: str | None = None, *, ema: bool = False
) -> int:
    """Write the weights of one checkpoint (the newest, or that of a step) into `out_dir`. Returns the exit code."""
    return guarded(lambda: _export(target, out_dir, _shard_bytes(max_shard), as_json, tier, ema=ema), as_json)


def _shard_bytes(words: str) -> int:
    try:
        nbytes = parse_bytes(words)
    except ValueError as error:
        raise Refused(Code.USAGE, f"--max-shard {words}: {error}") from error
    if nbytes < 1:
        raise Refused(Code.USAGE, f"--max-shard {words}: a shard holds at least one byte")
    return nbytes


def _export(target: str, out_dir: str, max_shard_bytes: int, as_json: bool, tier: str | None, *, ema: bool) -> Code:
    out = Path(out_dir).resolve()
    picked = pick(target, tier)
    _refuse_place(out, out_dir)

    def work(held: Held, opened: Opened) -> tuple[Held, dict[str, Any], Exported]:
        about = {"run_id": picked.stored.run_id, **_about(held, opened), "ema": ema}
        if ema and not any(name.endswith(".ema") for name in facts_of(opened)):
            raise Refused(
                Code.USAGE, f"{held} has no averages of the weights: they are kept where training.ema_decay is set"
            )
        with progress(f"exporting {held}", opened.nbytes) as told:
            return held, about, write(opened, out, max_shard_bytes, about, told, ema=ema)

    try:
        (held, about, done), passed = first_readable(picked, work)
    except FileExistsError as error:
        raise Refused(Code.USAGE, f"{out_dir}: {error.strerror}; give another folder, or empty this one") from error
    except Locked as error:
        raise Refused(Code.MISSING_RESOURCE, f"another export is writing {out_dir} right now") from error
    if as_json:
        document({**about, "out": str(out), **vars(done), "passed_over": passed})
        return Code.DONE
    talk(f"{held} → {out_dir}")
    for name, nbytes in done.files.items():
        say(f"{name}  {human_bytes(nbytes)}")
    say(f"{plural(done.tensors, 'tensor')}, {human_bytes(done.tensor_bytes)}, state digest {done.state_digest}")
    return Code.DONE


def _refuse_place(out: Path, out_dir: str) -> None:
    """What lies among checkpoints is pruned, listed or resumed from as one; what lies in a run goes with it."""
    if parse_version(unfinished(out.name) or out.name) is not None:
        raise Refused(Code.USAGE, f"{out_dir}: {out.name} is the name of a checkpoint's folder; give another name")
    for folder in (out, *out.parents):
        what = _kind_of(folder) or (_HOLDS_CHECKPOINTS if folder in (out, out.parent) and _has_some(folder) else None)
        if what is not None:
            inside = "" if folder == out else f"inside {folder}, "
            raise Refused(Code.USAGE, f"{out_dir}: {inside}{what}; give a folder elsewhere")


def _kind_of(folder: Path) -> str | None:
    run = RunDir(folder)
    if run.run.is_file() and run.spec.is_file():
        return "the folder of a run"
    return _HOLDS_CHECKPOINTS if (folder / CLAIMS).is_dir() or (folder / MANIFEST).is_file() else None


def _has_some(folder: Path) -> bool:
    """A tier whose run has ended is claimed by nobody."""
    with contextlib.suppress(OSError):
        return any(parse_version(unfinished(name) or name) is not None for name in os.listdir(folder))
    return False


def _about(held: Held, opened: Opened) -> dict[str, Any]:
    """Where the weights are from; the spec is the one they were trained with, or null where it was not stored."""
    known = {"run_id": opened.meta["run_id"]} if "run_id" in opened.meta else {}  # a snapshot in memory has no manifest
    return {
        **known,
        "step": held.version.step,
        "attempt": held.version.attempt,
        "tier": held.tier,
        "spec": opened.meta.get("spec"),
    }
