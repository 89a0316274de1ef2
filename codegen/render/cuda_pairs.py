"""Results of a generated convolution two neighbours at a time, where all stores have them side by side.

A warp has laid out 16 channels by 32 (or 64) neighbours. A thread that takes two of a row reads and stores them at once, and loads
what they share, a bias or a factor, once.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.expr import ReductionResult
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Store
from fusepass.codegen.ir.vectors import is_vector, split_index
from fusepass.codegen.render.cuda_input import unrolled
from fusepass.codegen.render.cuda_positions import PositionWriter, Sums
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block

_LANE = Axis("lane", 2)
_BESIDE = "$beside"


def takes_pairs(writer: PositionWriter) -> bool:
    """Whether a thread may take two neighbours: they are results both or none, and stored side by side.

    Where nothing is stored, the second need not be a result: who reduces them knows which are.
    """
    kernel, last = writer.kernel, writer.kernel.rows[-1]
    if writer.on.pair not in (1, 2) or writer.anchor.spread[-1] > writer.on.pair:
        return False
    if kernel.partials is not None and not kernel.stores:
        return last not in writer.printer.dataflow.needs(kernel.partials.value)
    side_by_side = (is_vector(split_index(store.index, last, _LANE), last, _LANE) for store in kernel.stores)
    return writer.sizes[-1] % 2 == 0 and all(side_by_side)


def pairs(writer: PositionWriter, group: str, covered: int, pragma: str, height: int = ROWS) -> list[str]:
    """What is done with the 16 channels, or `height`, that lie in the warp's room; the first 8 of its positions are the `group`-th ones."""
    at_once = 2 // writer.on.pair  # rows of the room
    first = "$lane * 2" if at_once == 1 else "$lane % 16 * 2"
    places, inside = writer.position(group, "$lane" if at_once == 1 else f"({first})", "0")
    row = "$down" if at_once == 1 else "$down * 2 + $lane / 16"
    lines = [
        f"const int $row = {row};",
        f"const int $channel = $first_channel + $m * {ROWS} + $row;",
        *_guarded(writer, covered, [*_both(writer, f"$room[$row * {writer.on.staged_pitch} + {first}]")]),
    ]
    beside = f"const {writer.index_type} {_BESIDE} = {writer.axes[-1]} + 1;"
    places += [beside] if any(_BESIDE in line for line in lines) else []
    return [*places, *block(f"if ({inside})", unrolled("$down", height // at_once, lines, pragma))]


def pairs_of_warps(writer: PositionWriter, sums: Sums, together: int) -> list[str]:
    """The same for four warps that multiply `together`, whose positions lie side by side in ``$shared``: each has some of the channels there,
    so that all neighbours of one are stored one after another. The `Sums.group` is that of the first warp.
    """
    pitch, at = shared_pitch(together), "$along"
    places, inside = writer.position(sums.group, at, "0")
    beside = f"const {writer.index_type} {_BESIDE} = {writer.axes[-1]} + 1;"
    two = [*_both(writer, f"$shared[$row * {pitch} + {at}]")]
    places += [beside] if any(_BESIDE in line for line in two) else []
    along = [f"const int {at} = $half * 64 + $lane * 2;", *places, *block(f"if ({inside})", two)]
    lines = [
        f"const int $row = $down * {together} + $warp % {together};",
        f"const int $channel = $first_channel + $m * {ROWS} + $row;",
        *_guarded(writer, sums.covered, unrolled("$half", together // 2, along)),
    ]
    stored = unrolled("$down", ROWS // together, lines)
    return unrolled("$m", sums.rows, ["fp::meet_group();", sums.staging, "fp::meet_group();", *stored])


def shared_pitch(together: int) -> int:
    """Floats from a channel to the next one where so many warps lay theirs out side by side; rows that a warp writes at once lie in
    different banks.
    """
    return 32 * together + 4


def _guarded(writer: PositionWriter, covered: int, lines: list[str]) -> list[str]:
    """`lines` where the channel is one of the result."""
    return lines if writer.sizes[1] == covered else block(f"if ($channel < {writer.end_channel})", lines)


def _both(writer: PositionWriter, at: str) -> Iterable[str]:
    """The lines for two neighbours, whose sums lie at `at`."""
    kernel, printer = writer.kernel, writer.printer
    yield f"const fp::Vec<float, 2> $two = fp::as_vector<2>({at});"
    shared = Scope(printer)
    for axis, text in zip(kernel.rows, ("$sample", "$channel", *writer.axes[:-1]), strict=False):
        shared.define_axis(axis, text)
    printer.expect(kernel.roots)
    made = [_one(writer, shared, number) for number in range(2)]
    yield from shared.lines
    for lines, _ in made:
        yield from lines
    (_, first), (_, second) = made
    for store, (index, here), (_, there) in zip(kernel.stores, first, second, strict=False):
        kind = f"fp::Vec<{C_TYPES[writer.program.buffer(store.buffer).dtype]}, 2>"
        yield f"fp::store_vector({writer.pointers[store.buffer]} + ({index}), {kind}{{{{{here}, {there}}}}});"
    if kernel.partials is not None:
        yield f"fp::as_vector<2>({at}) = fp::Vec<float, 2>{{{{{first[-1][1]}, {second[-1][1]}}}}};"


def _one(writer: PositionWriter, shared: Scope, number: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Lines that compute one of the two; index and value of each store, and the value that is reduced last."""
    kernel, here = writer.kernel, shared.child()
    here.define_axis(kernel.rows[-1], (writer.axes[-1], _BESIDE)[number])
    for node in kernel.nodes:
        if isinstance(node, ReductionResult):
            here.bind(node, f"$two[{number}]")
    made = [(here.index(store.index), _stored(writer, here, store)) for store in kernel.stores]
    if kernel.partials is not None:
        made.append(("", bare(here.value(kernel.partials.value))))
    return here.lines, made


def _stored(writer: PositionWriter, scope: Scope, store: Store) -> str:
    buffer, value = writer.program.buffer(store.buffer), bare(scope.value(store.value))
    return value if store.value.dtype is buffer.dtype else f"fp::cast<{C_TYPES[buffer.dtype]}>({value})"
