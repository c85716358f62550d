"""A run with checkpoints in several tiers, and the commands on it, all without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.tiers.build import RUN_ID, Place, snapshot
from typer.testing import CliRunner

from dtrain.cli.commands import app
from dtrain.specs.load import spec_from_json, spec_to_json
from dtrain.tiers.format.jsonfile import dumps, replace
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.memory.slots import MemoryDir, memory_dir
from dtrain.tiers.stores.store import Place as Where
from dtrain.tiers.tier import Tier, open_tier

SPEC: dict[str, Any] = {
    "name": "small",
    "output_dir": "run",
    "max_steps": 200,
    "model": {"type": "gpt", "n_layers": 1, "d_model": 32, "n_heads": 2, "vocab_size": 256},
    "dataset": {"type": "text", "path": "python:stdlib", "seq_len": 16},
    "training": {"global_batch_size": 8, "micro_batch_size": 4, "optimizer": {"name": "adamw", "lr": 1e-3}},
}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The only thing on stdout."""
        value: dict[str, Any] = json.loads(self.out)
        return value


def dtrain(*words: object) -> Ended:
    """A command in this process; a traceback fails the test."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    return Ended(result.exit_code, result.stdout, result.stderr)


class Run(Place):
    """A run's folder with a disk tier and one in a bucket that is a folder."""

    def __init__(self, folder: Path) -> None:
        """Make it below `folder`, which stands for the machine's tmpfs too."""
        super().__init__(folder)
        self.bucket = folder / "bucket"
        self.own = memory_dir(self.run)
        self.write_spec(
            {"type": "memory"},
            {"type": "disk", "keep": 2},
            {"type": "object", "url": self.bucket.as_uri(), "keep": 1},
        )

    def write_spec(self, *tiers: dict[str, Any], **more: Any) -> None:
        self.spec = spec_to_json(spec_from_json({**SPEC, **more, "tiers": list(tiers)}))
        replace(self.run.spec, dumps(self.spec))

    @property
    def object(self) -> Tier:
        return open_tier(Where("object", self.bucket.as_uri()), RUN_ID)

    def store_object(self, step: int, attempt: int = 1) -> Path:
        snapshot(self.memory, step, attempt=attempt)
        records = self.memory.whole()[Version(attempt, step)]
        return self.bucket / self.object.write(*gather(self.memory, records)).folder

    def store_memory(self, step: int, attempt: int = 1) -> MemoryDir:
        self.own.path.mkdir(exist_ok=True)
        replace(self.own.path / "owner.json", dumps({"run_id": RUN_ID, "output_dir": str(self.run.root)}))
        snapshot(self.own, step, attempt=attempt, slot=step % 3)
        return self.own


def flip(path: Path, position: int = -3) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
