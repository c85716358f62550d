"""File names are bytes: where Python would read and write them as ASCII only, it begins again in its UTF-8 mode."""

from __future__ import annotations

import codecs
import os
import sys


def take_any_name() -> None:
    """Run this command anew in UTF-8 mode where the locale has ASCII names only (LC_ALL=C with PYTHONUTF8=0).

    A spec may name a folder that this process could not even open, and so could none of those that it starts. What is
    printed stays in the encoding of the terminal.
    """
    if codecs.lookup(sys.getfilesystemencoding()).name != "ascii":
        return
    terminal = getattr(sys.stdout, "encoding", None) or "ascii"
    spoken = os.environ.get("PYTHONIOENCODING") or f"{terminal}:backslashreplace"
    environment = {**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": spoken}
    os.execve(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]], environment)
