"""Why somebody may not use a path, in words that say who could change that."""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path

DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors that are not about the path but about who asks for it."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a place that is full, or of which somebody has had his part."""
_USABLE = os.R_OK | os.W_OK | os.X_OK


def nearest(path: Path) -> Path:
    """The path itself, or the nearest above it that is there and may be looked at."""
    for one in (path, *path.parents):
        try:
            one.stat()
        except OSError:
            continue
        return one
    return path


def unusable(folder: Path) -> str | None:
    """Why nothing can be written below a folder that is there or is to be made; None when something can."""
    found = nearest(folder)
    if not found.is_dir():
        return f"{found} is no folder"
    return None if os.access(found, _USABLE) else whose(folder)


def whose(path: Path) -> str:
    """Whose the path, or the nearest above it, is, with its mode, and who is asking."""
    found = nearest(path)
    try:
        status, read_only = found.stat(), os.statvfs(found).f_flag & os.ST_RDONLY
    except OSError as error:
        return f"{found}: {error.strerror}"
    if read_only:
        return f"{found} lies on a file system that is mounted read-only"
    return f"{found} belongs to {_user(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o}; you are {_user()}"


def _user(uid: int | None = None) -> str:
    uid = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
