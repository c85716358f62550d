"""What the precisions of a spec are in torch's words."""

from __future__ import annotations

import torch

PASS_DTYPES = {"fp32": torch.float32, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16, "bf16": torch.bfloat16}
"""The dtype of matrix products in a pass."""


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Around forward passes of this precision."""
    mixed = precision != "fp32"
    return torch.autocast(device.type, dtype=PASS_DTYPES[precision] if mixed else None, enabled=mixed)
