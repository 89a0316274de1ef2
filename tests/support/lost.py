"""Whether a GPU is of no more use to a process."""

from __future__ import annotations

import torch


class Lost(Exception):
    """What ran when a GPU was found to be of no more use; a kernel before it may have done it."""


def is_lost(device: str) -> bool:
    """Whether a GPU refuses this process: after an illegal access, say, until the process ends."""
    if device == "cpu":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
