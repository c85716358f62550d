"""`dtrain validate`: checks a spec and says what it describes, or everything that is wrong with it."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from ..specs.errors import SpecError, shown
from ..specs.load import load_spec, spec_to_json
from ..specs.models import GptModel, Spec


def validate(spec_path: str, overrides: list[str], as_json: bool) -> int:
    """Check one spec and return the exit code: 0, or 78 when it cannot be used."""
    try:
        spec = load_spec(spec_path, overrides)
    except SpecError as error:
        if as_json:
            _write_json({"valid": False, "problems": error.to_json()})
        _say(str(error), to_stderr=True)
        return SpecError.exit_code
    if as_json:
        _write_json({"valid": True, "spec": spec_to_json(spec)})
    else:
        _say(f"{shown(spec_path, 200)}: valid — {summary(spec)}", to_stderr=False)
        if spec.unused is not None:
            _say(f"warning: {spec.unused}", to_stderr=False)
    return 0


def summary(spec: Spec) -> str:
    """Describe a job in one line: name, model, world size, micro-batches, tiers."""
    model = spec.model
    spec = spec.largest
    what = (
        f"gpt ({model.n_layers} layers, d_model {model.d_model})"
        if isinstance(model, GptModel)
        else f"model {model.entry}"
    )
    passes = spec.micro_batches
    tiers = " + ".join(f"{tier.type} every {tier.every}" for tier in spec.used_tiers) or "none"
    return (
        f"{spec.name}, {what}, world size {spec.world_size}, "
        f"{passes} micro-batch{'' if passes == 1 else 'es'} per step, tiers: {tiers}"
    )


def _say(text: str, to_stderr: bool) -> None:
    """Print lines as they are: not wrapped, no markup; characters the terminal lacks are escaped."""
    console = Console(stderr=to_stderr, soft_wrap=True, markup=False, highlight=False, emoji=False)
    safe = text.encode(console.encoding, "backslashreplace").decode(console.encoding)
    console.print(safe)


def _write_json(document: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
