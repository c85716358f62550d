"""People's own code, named in the spec as `module:callable`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class UserCodeError(Exception):
    """Code that the spec names cannot be used; the message says why."""


def add_import_paths(*folders: str) -> None:
    """Let entries be imported from these folders, the first one first."""
    for folder in reversed(folders):
        resolved = str(Path(folder).resolve())
        if resolved not in sys.path:
            sys.path.insert(0, resolved)


def call_entry(entry: str, kwargs: Mapping[str, Any], key: str) -> Any:
    """Import `module:callable` and call it; raises UserCodeError when there is no such thing."""
    module_name, _, attribute = entry.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise UserCodeError(
            f"{key}: no module {module_name!r}; it is looked for in the working directory, "
            "beside the spec and among installed packages"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise UserCodeError(f"{key}: {module_name} has no callable {attribute!r}; it has {', '.join(names) or 'none'}")
    return function(**kwargs)
