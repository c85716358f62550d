"""The ranks of a benchmark: its own module, started once for each, without the launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dtrain.engine.process import streaming
from dtrain.specs.models import Spec

FOLDER = "DTRAIN_BENCH_DIR"
"""Variable with the folder of the memory tier."""


def start_ranks(
    module: str, spec: Spec, folder: Path, words: Sequence[str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """Start `python -m module` with these words, or this process's own, as every rank of the spec."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(spec.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, **streaming(os.environ), **common, FOLDER: str(folder)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *(sys.argv[1:] if words is None else words)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(spec.world_size)
    ]
