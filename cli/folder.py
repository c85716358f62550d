"""The run's own folder: usable, made, or refused with the key that names it, before anything else is looked at."""

from __future__ import annotations

import errno

from ..specs.codes import Code
from ..tiers.format.layout import RunDir
from ..tiers.stores.access import nearest, unusable
from .terminal.refusal import Refused

_WRONG_PATH = (errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors that no right and no room would mend."""


def check_folder(run: RunDir, remedy: str = "give another: output_dir=…") -> None:
    """Raise Refused where the run's folder cannot be made or written."""
    try:
        run.root.stat()
    except OSError as error:
        if error.errno in _WRONG_PATH:
            raise _refused(run, str(error.strerror), Code.BAD_SPEC, remedy) from error
    if (why := unusable(run.root)) is not None:
        raise _refused(run, why, Code.MISSING_RESOURCE if nearest(run.root).is_dir() else Code.BAD_SPEC, remedy)


def make_folder(run: RunDir, remedy: str = "give another: output_dir=…") -> None:
    """Make the folder that this node writes into, which may be there already. Raises Refused."""
    check_folder(run, remedy)
    try:
        run.own.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        code = Code.BAD_SPEC if error.errno in _WRONG_PATH else Code.MISSING_RESOURCE
        raise _refused(run, f"{error.filename}: {error.strerror}", code, remedy) from error


def _refused(run: RunDir, why: str, code: Code, remedy: str) -> Refused:
    return Refused(code, f"output_dir {run.root} cannot be used: {why}; {remedy}")
