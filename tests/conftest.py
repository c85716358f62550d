"""What holds for all tests, however they are started: how they search (hypothesis), that commands hear a hang-up."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("alike", derandomize=True, database=None, max_examples=50)
settings.register_profile("anew", print_blob=True, max_examples=300)
settings.load_profile("alike")

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; commands would inherit that, but no handler
    signal.signal(signal.SIGHUP, lambda *_: None)
