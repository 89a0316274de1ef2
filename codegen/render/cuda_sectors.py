"""Tiles of a convolution that overlap along the last axis: each stores whole sectors of the results alone; see `Tiles.pace`."""

from __future__ import annotations

from fusepass.codegen.schedule_convolution.tiles import SECTOR, Tiles


def own_sectors(on: Tiles, spread: int) -> list[str]:
    """``$ahead``, how far a result is from the tile's first one, and ``$own``: the tile stores it where that, counted from the beginning
    of its sector, is less. The first tile of a row and the last one store all to its ends. `spread` is `Convolution.spread`.
    """
    step = on.pace * spread
    before = f"($tile_x ? 0 : {SECTOR})"  # of a row begins a sector
    return [
        f"const int $ahead = int($x) - $tile_x * {step} + {before};",
        f"const unsigned $own = $tile_x == {on.tiles[-1] - 1} ? {1 << 30} : {step} + {before};",
    ]


def store_own(target: str, index: str, value: str, index_type: str, nbytes: int) -> str:
    """The statement that stores `value`, of so many bytes, at `target[index]`, if the tile stores it."""
    own = f"unsigned($ahead - int($at % {SECTOR // nbytes})) < $own"
    return f"if (const {index_type} $at = {index}; {own}) {target}[$at] = {value};"


def is_first(on: Tiles, spread: int) -> str:
    """The condition that no later tile has a result."""
    return f"int($x) < ($tile_x + 1) * {on.pace * spread} || $tile_x == {on.tiles[-1] - 1}"
