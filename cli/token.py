"""The run's token, by which its launchers know each other: a file, a variable, or the folder that all nodes share."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from ..specs.codes import Code
from ..tiers.format.layout import RunDir
from ..tiers.peers.seal import Seal
from .terminal.refusal import Refused

TOKEN_VARIABLE = "DTRAIN_TOKEN"
TOKEN_FILE = "token"
LOOK_S = 0.2


def given_seal(token_file: str | None) -> Seal | None:
    """Of the token that the file or the variable has; None without either. The workers never see it. Raises Refused."""
    text = os.environ.pop(TOKEN_VARIABLE, None)
    if token_file is not None:
        text = Path(token_file).read_text(errors="replace")
    source = f"--token-file {token_file}" if token_file is not None else TOKEN_VARIABLE
    return _seal(text, source) if text is not None else None


def own_seal(run: RunDir) -> Seal:
    """Node 0's: of the token in the run's folder, which is made here if there is none."""
    path = run.root / TOKEN_FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _seal(path.read_text(errors="replace"), str(path))
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return _seal(path.read_text(), str(path))


def shared_seal(run: RunDir, deadline: float) -> Seal:
    """Another node's: node 0 writes it into the folder before it listens. Raises Refused.

    `deadline` (time.monotonic) is for a network file system, which may remember for a while that there was none.
    """
    path = run.root / TOKEN_FILE
    while True:
        os.listdir(run.root)  # has such a file system look again
        if path.is_file() and (text := path.read_text(errors="replace")).endswith("\n"):
            return _seal(text, str(path))
        if time.monotonic() > deadline:
            raise Refused(
                Code.MISSING_RESOURCE,
                f"node 0 is there, and there is no {path}: this folder is not the one of node 0. Share it, or give all "
                f"nodes one token, --token-file FILE or {TOKEN_VARIABLE}=… (openssl rand -hex 32 makes one)",
            )
        time.sleep(LOOK_S)


def _seal(text: str, source: str) -> Seal:
    try:
        return Seal(text.strip())
    except ValueError as error:
        raise Refused(Code.USAGE, f"{source}: {error}; openssl rand -hex 32 makes one") from error
