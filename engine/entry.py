"""People's own code, named in the spec as `module:callable`."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OWN_FOLDER = Path(__file__).parent


class UserCodeError(Exception):
    """Code that the spec names cannot be used; the message says why."""


class UserCodeFailed(Exception):
    """Code that the spec names raised an error; the message ends with that error's own frames."""


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
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserCodeFailed(told(error, f"{key}: importing {module_name} failed")) from error
        raise UserCodeError(
            f"{key}: no module {module_name!r}; it is looked for in the working directory, "
            "beside the spec and among installed packages"
        ) from error
    except Exception as error:
        raise UserCodeFailed(told(error, f"{key}: importing {module_name} failed")) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise UserCodeError(f"{key}: {module_name} has no callable {attribute!r}; it has {', '.join(names) or 'none'}")
    try:
        return function(**kwargs)
    except Exception as error:
        raise UserCodeFailed(told(error, f"{key}: {entry} failed")) from error


def told(error: BaseException, what: str) -> str:
    """One line that says what failed, then the traceback without our own frames and the import machinery's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((str(OWN_FOLDER), "<frozen importlib"))
    ]
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    return f"{what}: {type(error).__name__}: {error}\nTraceback (your code):\n{''.join(lines).rstrip()}"
