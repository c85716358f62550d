"""Which signals stop a run."""

from __future__ import annotations

import signal

from dtrain.engine.attempt.agent import STOP_SIGNALS, StopSignals


def test_a_hangup_that_was_ignored_stays_ignored() -> None:
    """As nohup asks for; the others are heeded."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopSignals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopSignals():
            assert callable(signal.getsignal(signal.SIGHUP))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
