"""How a convolution's input and result lie in memory, by name."""

from __future__ import annotations

import enum


class AnchorFormat(enum.Enum):
    """How a convolution's input and result lie in memory."""

    CALLER = "as is"
    CHANNELS_LAST = "channels last"
    CHANNELS_FIRST = "channels first"
