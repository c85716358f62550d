"""One way to say no: the reason on stderr, the exit code of the contract, and with --json a document on stdout."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ...specs.codes import Code
from ...specs.errors import SpecError
from ...tiers.format.jsonfile import Unreadable
from ...tiers.lock import Locked
from ...tiers.stores.access import DENIED, whose
from .signals import leave


class Refused(Exception):
    """The command cannot be done as asked; the message says why and what to do, the code how it ends."""

    def __init__(self, code: Code, message: str) -> None:
        """Remember the exit code."""
        super().__init__(message)
        self.code = code


_at_leaving: list[Callable[[], None]] = []


@contextmanager
def tidied(tidy: Callable[[], None]) -> Iterator[None]:
    """Call `tidy` at the end of the block, and when a signal ends the command within it."""
    _at_leaving.append(tidy)
    try:
        yield
    finally:
        _at_leaving.remove(tidy)
        tidy()


def stop_at_once(as_json: bool = False) -> None:
    """Before training has begun nothing is lost by leaving: one line, and out. The launcher has its own handlers."""

    def leave(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        for tidy in _at_leaving:
            with suppress(OSError):  # what cannot be taken away is no reason to stay
                tidy()
        message = f"stopped by {name} before the first step; nothing was stored"
        os.write(2, f"{message}\n".encode())
        if as_json:
            with suppress(OSError):
                os.write(1, _document(Code.INTERRUPTED, message).encode())
        os._exit(Code.INTERRUPTED)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            signal.signal(number, leave)


def guarded(work: Callable[[], int], as_json: bool) -> int:
    """Do a command's work; what a person or their machine got wrong is told without a traceback."""
    try:
        with _unwinding():
            return work()
    except SpecError as error:
        return _say(Code.BAD_SPEC, str(error), as_json, problems=error.to_json())
    except Refused as error:
        return _say(error.code, str(error), as_json)
    except Locked as error:
        return _say(Code.MISSING_RESOURCE, f"another dtrain drives this run: {error}", as_json)
    except Unreadable as error:
        return _say(Code.DAMAGED, str(error), as_json)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(int(Code.INTERRUPTED)) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        return _say(Code.MISSING_RESOURCE, _said(error), as_json)


def _said(error: OSError) -> str:
    """What the system said, and of whom it denied something."""
    if not error.strerror:
        return str(error)
    words = f"{error.filename or 'the system'}: {error.strerror}"
    named = isinstance(error.filename, str) and error.errno in DENIED
    return f"{words} ({whose(Path(error.filename))})" if named else words


@contextmanager
def _unwinding() -> Iterator[None]:
    """While a command works, a signal takes away what it has half written; one more ends it at once.

    Only where Ctrl-C would have ended it at once: a run, a resume and a benchmark have handlers of their own.
    """
    if signal.getsignal(signal.SIGINT) is not leave:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, leave)
        raise KeyboardInterrupt

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGINT, interrupt)
    ended = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ended:
        signal.signal(number, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, leave)
        for number in ended:
            signal.signal(number, signal.SIG_DFL)


def _say(code: Code, message: str, as_json: bool, **details: Any) -> int:
    sys.stderr.write(f"{message}\n")
    if as_json:
        sys.stdout.write(_document(code, message, **details))
    return code


def _document(code: Code, message: str, **details: Any) -> str:
    """What a command says with --json that has not done its work."""
    status = "interrupted" if code == Code.INTERRUPTED else "refused"
    return json.dumps({"status": status, "exit_code": int(code), "message": message, **details}) + "\n"
