"""Whether a GPU is of no more use to a process."""

from __future__ import annotations

import torch


def is_lost(device: str) -> bool:
    """Whether a GPU refuses this process: after an illegal access, say, until the process ends."""
    if device == "cpu":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
