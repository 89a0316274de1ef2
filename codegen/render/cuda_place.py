"""Where a block's patch of an image lies, and where in it a thread stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusepass.codegen.render.cuda_tile import Arranged
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.schedule.plan import Schedule


@dataclass(frozen=True)
class PatchPlace:
    """The C texts of these numbers; empty where a block has one image, or one row of threads.

    Attributes:
        rows: of results that a block has, a number.
        first_image, first_row: the block's first image, and the first of its rows.
        top_row, column: a thread's first row and column.
        plane, row_in_patch: a thread's image and first row, counted from the block's.
    """

    rows: int
    first_image: str
    first_row: str
    top_row: str
    column: str
    plane: str
    row_in_patch: str


def patch_place(
    arranged: Arranged, plan: Schedule, top: Scope, number: str, constant: Callable[[str, str], str]
) -> PatchPlace:
    """Defines the image and the column of a thread in `top`; block `number`; `constant` declares a name with a value."""
    y, x = arranged.image
    groups = plan.groups // plan.planes
    rows, image, first_row, row_in_patch, plane = groups * plan.unroll, number, "0", "", ""
    bands = y.size // rows
    lane = constant("lane", f"threadIdx.x % {plan.lanes}" if plan.groups > 1 else "threadIdx.x")
    column = constant(x.name, f"{lane} * {plan.width}" if plan.width > 1 else lane)
    top.define_axis(x, column)
    if bands > 1:
        first_row = constant("first_row", f"fp::mod({number}, {bands}) * {rows}")
        image = f"fp::div({number}, {bands})"
    top_row = first_row
    if groups > 1:
        group = f"threadIdx.x / {plan.lanes}" + (f" % {groups}" if plan.planes > 1 else "")
        top_row = row_in_patch = constant("group", f"{group} * {plan.unroll}" if plan.unroll > 1 else group)
        if bands > 1:
            top_row = constant("top_row", f"{first_row} + {row_in_patch}")
    if plan.planes > 1:
        image = f"{number} * {plan.planes}"
        plane = constant("plane", f"threadIdx.x / {plan.lanes * groups}")
    first_image = constant("first_image", image)
    if arranged.row is not None:
        top.define_axis(arranged.row, constant("row", f"{first_image} + {plane}" if plane else first_image))
    return PatchPlace(rows, first_image, first_row, top_row, column, plane, row_in_patch)
