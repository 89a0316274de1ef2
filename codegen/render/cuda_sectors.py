"""Tiles of a convolution that overlap along the last axis: each stores whole sectors of the results alone; see `Tiles.pace`."""

from __future__ import annotations

from fusepass.codegen.render.spelling import Locals
from fusepass.codegen.schedule_convolution.tiles import SECTOR, Tiles


def own_sectors(on: Tiles, spread: int, c: Locals) -> list[str]:
    """``ahead``, how far a result is from the tile's first one, and ``own``: the tile stores it where that, counted from the beginning
    of its sector, is less. The first tile of a row and the last one store all to its ends. `spread` is `Convolution.spread`.
    """
    step = on.pace * spread
    before = f"({c.tile_x} ? 0 : {SECTOR})"  # of a row begins a sector
    return [
        f"const int {c.ahead} = int({c.x}) - {c.tile_x} * {step} + {before};",
        f"const unsigned {c.own} = {c.tile_x} == {on.tiles[-1] - 1} ? {1 << 30} : {step} + {before};",
    ]


def store_own(target: str, index: str, value: str, index_type: str, nbytes: int, c: Locals) -> str:
    """The statement that stores `value`, of so many bytes, at `target[index]`, if the tile stores it."""
    own = f"unsigned({c.ahead} - int({c.at} % {SECTOR // nbytes})) < {c.own}"
    return f"if (const {index_type} {c.at} = {index}; {own}) {target}[{c.at}] = {value};"


def is_first(on: Tiles, spread: int, c: Locals) -> str:
    """The condition that no later tile has a result."""
    return f"int({c.x}) < ({c.tile_x} + 1) * {on.pace * spread} || {c.tile_x} == {on.tiles[-1] - 1}"
