"""Calls of regions that do something else than their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fusepass.runtime.call_text import CallText
from fusepass.runtime.region import FusedRegion


def replace_calls(
    monkeypatch: pytest.MonkeyPatch, other: Callable[[FusedRegion, CallText], tuple[str, dict[str, Any]]]
) -> None:
    """Let calls of regions be what `other` makes of a region and its text: source of ``run``, and the names that it refers to."""
    real = FusedRegion.__dict__["_text"].func

    def text(region: FusedRegion) -> CallText:
        source, scope = other(region, real(region))
        return CallText(source, scope, None)

    monkeypatch.setattr(FusedRegion, "_text", property(text))
