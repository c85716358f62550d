"""Where a run's folder is, while somebody may move or remove it."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class Whereabouts:
    """A folder that is followed wherever it is moved on its file system."""

    def __init__(self, folder: Path) -> None:
        """Hold on to it; raises OSError when it is not there."""
        self.folder = folder
        self._descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go."""
        os.close(self._descriptor)

    def is_gone(self) -> bool:
        """Tell whether there is no folder of that name any more."""
        try:
            return not stat.S_ISDIR(self.folder.stat().st_mode)
        except OSError as error:
            return isinstance(error, FileNotFoundError | NotADirectoryError)

    def moved_to(self) -> Path | None:
        """Where it is now; None when it is where it was, or nowhere."""
        now = Path(f"/proc/self/fd/{self._descriptor}").readlink()
        try:  # of one that was removed the kernel gives the old name and a word more
            is_there = os.path.samestat(now.stat(), os.fstat(self._descriptor))
        except OSError:
            return None
        return now if is_there and now != self.folder.absolute() else None
