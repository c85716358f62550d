"""What one core of this machine does, timed for a fraction of a second in a process of its own, on one thread.

Of its own, for a library of matrix products that has started all its threads comes to a crawl on a machine that does
anything else at the same time, and their number cannot be changed any more.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "BLIS_NUM_THREADS")
SIDE = 384
"""Of a square matrix: its product is a ms or less, so that one of many is not disturbed."""
ARRAY_BYTES = 32 * 2**20
LEAST_LOOKS, LOOK_S = 3, 0.15
PATIENCE_S = 10.0
"""For a figure that is nice to have."""


@dataclass(frozen=True, slots=True)
class Core:
    """What one core was seen to do, per second; None: not looked at."""

    flop_per_s: float | None = None
    """Matrix products in fp32."""
    traffic_bytes_per_s: float | None = None
    """One large array added to another."""


def look_at_core() -> Core:
    """Time this machine; where that does not work nothing is known."""
    one = {**os.environ, **dict.fromkeys(THREADS, "1")}
    command = [sys.executable, "-P", "-m", "dtrain.cli.core"]
    try:
        answer = subprocess.run(command, env=one, capture_output=True, timeout=PATIENCE_S, check=True)
        return Core(**json.loads(answer.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return Core()


def main() -> None:
    """Time the core and print what was seen."""
    import numpy as np

    factor = np.ones((SIDE, SIDE), np.float32)
    product = np.empty_like(factor)
    source = np.ones(ARRAY_BYTES // 4, np.float32)
    target = np.ones_like(source)
    product_s = quickest(lambda: np.matmul(factor, factor, out=product))
    sum_s = quickest(lambda: np.add(source, target, out=target))
    core = Core(rounded(2 * SIDE**3 / product_s), rounded(3 * ARRAY_BYTES / sum_s))
    sys.stdout.write(json.dumps(asdict(core)))


def quickest(work: Callable[[], object]) -> float:
    """Return the seconds of the quickest of many calls: what else runs now will not when the job does."""
    work()
    times: list[float] = []
    while len(times) < LEAST_LOOKS or sum(times) < LOOK_S:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def rounded(value: float) -> float:
    """Round to ten steps per power of ten, so that the same machine gives the same plan every time."""
    return float(10 ** (round(10 * math.log10(value)) / 10))


if __name__ == "__main__":
    main()
