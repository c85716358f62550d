"""`dtrain init`: a spec to begin with."""

from __future__ import annotations

import sys
from pathlib import Path

from ..specs.codes import Code
from ..specs.template import TEMPLATE

NAME = "spec.yaml"


def init(folder: str) -> int:
    """Write spec.yaml into `folder`; an existing one is left alone."""
    path = Path(folder) / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(TEMPLATE)
    except FileExistsError:
        sys.stderr.write(f"{path} exists already; move it away or name another folder\n")
        return Code.USAGE
    except OSError as error:
        sys.stderr.write(f"{path}: {error.strerror}\n")
        return Code.MISSING_RESOURCE
    sys.stdout.write(f"wrote {path}; look at it with dtrain plan {path}, start it with dtrain run {path}\n")
    return Code.DONE
