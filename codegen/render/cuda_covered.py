"""Tiles of rows that begin anywhere in memory: the aligned vectors that cover them come to shared memory as they lie."""

from __future__ import annotations

from fusepass.codegen.render.cuda_frame import Frame
from fusepass.codegen.render.cuda_transpose import SharedTranspose, define
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.spelling import C_TYPES, block


def read_covered(frame: Frame, each: SharedTranspose) -> list[str]:
    """Load what covers a tile's rows, the block's threads each the next vector; the lines that write it to shared memory."""
    load, tile = each.transposing.load, each.tile
    assert load is not None
    total, width = tile.along * tile.vectors, tile.width
    steps, full = -(-total // tile.threads), total % tile.threads == 0
    name, access, line = (frame.names.exact(f"{each.name}_{part}") for part in ("in", "access", "line"))
    # A remainder tells the compiler in which steps all threads have a vector.
    iteration = f" + {frame.u} * {tile.threads}" if steps > 1 else ""
    here = [
        f"const int {access} = int(threadIdx.x % {tile.threads}){iteration};",
        f"const int {line} = {access} / {tile.vectors};",
    ]

    if steps == 1:
        frame.top.lines += here

    def of_steps(lines: list[str]) -> list[str]:
        guarded = lines if full else block(f"if ({access} < {total})", lines)
        return frame.unrolled(frame.u, steps, [*here, *guarded] if steps > 1 else guarded)

    array, step = (f"[{steps}]", f"[{frame.u}]") if steps > 1 else ("", "")
    scope = frame.top.child(conditional=not full)
    along, count = frame.along(line), str(tile.across)
    if frame.leaves_rows(each.along.size, tile.along):  # what follows the last row is loaded as that
        along = f"fp::least({along}, {free(each.along.size - 1)})"
    define(frame, scope, each.along, along, 1)
    first = define(frame, scope, each.across, frame.first_across or "0", 1)
    if frame.may_leave(each.across.size, tile.across):
        count = f"fp::least({free(each.across.size)} - {first}, {count})"
    begin, number = scope.operand(each.index), f"{access} % {tile.vectors}"
    loaded = f"fp::load_covering<{width}>({frame.pointers[load.buffer]}, {begin}, {number}, {count})"
    frame.top.lines.append(f"fp::Vec<{C_TYPES[load.dtype]}, {width}> {name}{array};")
    frame.top.lines += of_steps([*scope.lines, f"{name}{step} = {loaded};"])
    # A row has whole vectors, so places count on from row to row, but for what keeps rows in different banks.
    place = f"{each.name}[{access} * {width} + {line} / {width} * {width}]"
    return of_steps([f"fp::as_vector<{width}>({place}) = {name}{step};"])
