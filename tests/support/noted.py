"""What runs, noted as it is made."""

from __future__ import annotations

import pytest

from fusepass.compile.boundary_views import Edges
from fusepass.runtime.region import FusedRegion


def noted_regions(monkeypatch: pytest.MonkeyPatch) -> list[FusedRegion]:
    """Gets, from now on, each region as it takes and gives what its graph has it."""
    found: list[FusedRegion] = []
    seen = Edges.seen

    def noted(way: Edges, region: FusedRegion) -> FusedRegion:
        found.append(seen(way, region))
        return found[-1]

    monkeypatch.setattr(Edges, "seen", noted)
    return found
