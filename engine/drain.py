"""The drainer's process, seen from the launcher."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from ..tiers.drainer import DrainJob
from ..tiers.jsonfile import append_event, replace
from ..tiers.layout import RunDir
from ..tiers.memory import MemoryDir

MAX_STARTS = 5


class DrainerProcess:
    """Starts the drainer, starts it again when it dies, and ends it when all is carried to disk."""

    def __init__(self, run: RunDir, job: DrainJob) -> None:
        """Prepare; `start` starts it."""
        self.run, self.job = run, job
        self.starts = 0
        self.given_up = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; it leaves by itself if we die."""
        self.starts += 1
        path = Path(self.job.memory_dir) / "drainer.json"
        replace(path, self.job.to_bytes())
        self.run.logs.mkdir(parents=True, exist_ok=True)
        log = self.run.logs / "drainer.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dtrain.tiers.drainer", str(path)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "DTRAIN_ATTEMPT": str(self.starts)},
            )

    @property
    def running(self) -> bool:
        """Tell whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def check(self, attempt: int) -> None:
        """Start it again if it died; after too many deaths it is left dead and that is said."""
        if self.given_up:
            for slot in MemoryDir(Path(self.job.memory_dir)).pending():
                slot.drain_mark.unlink(missing_ok=True)  # or the workers would wait for a free slot for ever
            return
        if self._process is None or self._process.poll() is None:
            return
        code = self._process.returncode
        self._process = None
        again = self.starts < MAX_STARTS
        detail = f"the drainer ended with {code}; " + (
            "started again" if again else "given up, no more disk checkpoints"
        )
        append_event(self.run.events, "fault", None, attempt, rank=None, kind="drainer", detail=detail)
        self.given_up = not again
        if again:
            self.start()

    def stop(self, timeout_s: float) -> bool:
        """Let it finish what is pinned; False when it did not end in time and was killed."""
        if self._process is None:
            return True
        process, self._process = self._process, None
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(b"stop\n")
            process.stdin.flush()
        try:
            process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return False
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
        return process.returncode == 0
