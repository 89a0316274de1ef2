"""The passes in order, with the verifier after each when debugging."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorOptions, Choice, generate_anchors
from fusepass.codegen.passes.axes import order_and_merge, rename_axes
from fusepass.codegen.passes.columns_of_one import columns_of_one
from fusepass.codegen.passes.filled import fill_products
from fusepass.codegen.passes.fuse import ElementRules, fuse_elements, fuse_rows, fuse_siblings
from fusepass.codegen.passes.joined_loads import join_loads
from fusepass.codegen.passes.library_results import keep_library_results
from fusepass.codegen.passes.lines import Fills, lines_together
from fusepass.codegen.passes.nested import nest_reductions
from fusepass.codegen.passes.over_rows import reduce_over_rows
from fusepass.codegen.passes.partials import Pieces
from fusepass.codegen.passes.parts import fuse_parts
from fusepass.codegen.passes.place_numbers import place_numbers
from fusepass.codegen.passes.products import Length, split_products, whole_sums, without_idle_views
from fusepass.codegen.passes.scans import fuse_scans
from fusepass.codegen.passes.short_rows import windows_of_readers, windows_of_reductions, windows_of_short_rows
from fusepass.codegen.passes.split import SplitPolicy, separate_layouts, split_long_rows
from fusepass.codegen.passes.split_scans import split_scans
from fusepass.codegen.passes.statistics import online_softmax
from fusepass.codegen.passes.teams import StripChoice, TeamChoice, form_teams
from fusepass.codegen.passes.updates import store_once, write_last
from fusepass.codegen.passes.weights import BeginningsOf, lay_out_taps, lay_out_weights
from fusepass.codegen.passes.window_kernels import separate_windows

_ANCHORS = "generate_anchors"

Pass = Callable[[Program, Builder], Program]
Observer = Callable[[str, Program], None]
T = TypeVar("T")


@dataclass(frozen=True)
class PassOptions:
    """What the passes need to know of the device.

    Attributes:
        split: when long rows are split.
        longest_cached_row: rows of at most this many elements stay on chip between reduction loops.
        longest_column: the same of rows whose elements are not neighbours in memory, where nothing is stored per element.
        stores_columns: whether a kernel that only reduces such rows had better store what happens per element, too.
        stores_pieces: whether pieces of rows had better store what is stored and needed again.
        access: bytes of the widest access: rows of fewer that are only reduced become windows; 0 where a thread has no use of its neighbours'
            rows, and what is reduced across them is stored before.
        anchors: which anchors become kernels, but for what is said here; None where none do.
        pieces: in how many pieces a convolution's kernel reduces over positions.
        row_pieces: in how many pieces of its rows a kernel that reduces along them reduces over them, too; None where that had better be another.
        fills: whether a product makes its right operand itself.
        staged: whether what windows of a kernel overlap in is staged, if the kernel does nothing else.
        scanned: whether rows of a kernel that scans stay on the chip, so that it may have other reduction loops before.
        seconds: how long a kernel takes that has windows or might have; None where windows are never laid out in output tiles.
        product_length: terms that a piece of the sums of a kernel's matrix product should have.
        separate_from: elements of a kernel from which one that reads and writes along different axes is worth two launches;
            None where pointwise kernels exchange no tiles.
        taps_from: elements of a kernel from which on weights of its windows that lie apart are worth another launch; None for never.
        teams, strips: the team of blocks that should share a kernel's rows, or strips of them.
        beginnings: where a kernel's rows begin, if its weights should lie likewise.
        busy: whether so many threads keep the device busy.
    """

    split: SplitPolicy
    longest_cached_row: int
    longest_column: int = 1 << 16
    stores_columns: bool = True
    stores_pieces: bool = True
    access: int = 0
    anchors: AnchorOptions | None = None
    pieces: Pieces = lambda program, kernel: None
    row_pieces: Pieces = lambda program, kernel: None
    fills: Choice = lambda program, kernel: False
    staged: Choice = lambda program, kernel: False
    scanned: Choice = lambda program, kernel: True
    seconds: Callable[[Program, Kernel], float] | None = None
    separate_from: int | None = None
    taps_from: int | None = None
    teams: TeamChoice = lambda program, kernel: None
    strips: StripChoice = lambda program, kernel: None
    beginnings: BeginningsOf = lambda program, kernel: None
    busy: Fills = lambda threads: True
    product_length: Length = whole_sums


def passes(options: PassOptions) -> tuple[tuple[str, Pass], ...]:
    """Every pass, by name, in the order it runs."""
    columns = options.longest_column if options.stores_columns else 0
    rules = ElementRules(options.longest_cached_row, columns, options.stores_pieces)
    return (
        ("fuse_scans", fuse_scans),
        ("fuse_rows", lambda p, b: fuse_rows(p, b, options.staged, options.scanned)),
        ("fuse_siblings", fuse_siblings),
        ("fuse_parts", fuse_parts),
        ("online_softmax", lambda p, b: online_softmax(p, b, options.longest_cached_row, options.longest_column)),
        (_ANCHORS, lambda p, b: _generate_anchors(p, b, options)),
        ("nest_reductions", nest_reductions),
        ("windows_of_readers", lambda p, b: windows_of_readers(p, b, options.longest_cached_row, options.access)),
        ("fuse_elements", lambda p, b: fuse_elements(p, b, rules)),
        ("reduce_over_rows", lambda p, b: reduce_over_rows(p, b, options.row_pieces)),
        ("windows_of_reductions", lambda p, b: windows_of_reductions(p, b, options.longest_cached_row, options.access)),
        ("separate_windows", lambda p, b: _separate_windows(p, b, options)),
        ("fill_products", lambda p, b: fill_products(p, b, options.fills)),
        ("columns_of_one", columns_of_one),
        ("form_teams", lambda p, b: form_teams(p, b, options.teams, options.strips)),
        ("split_long_rows", lambda p, b: split_long_rows(p, b, options.split, rules)),
        ("split_scans", lambda p, b: split_scans(p, b, options.split)),
        ("split_products", lambda p, b: split_products(p, b, options.product_length)),
        ("separate_layouts", lambda p, b: separate_layouts(p, b, options.separate_from)),
        ("write_last", write_last),
        ("order_and_merge", order_and_merge),
        ("windows_of_short_rows", lambda p, b: windows_of_short_rows(p, b, options.access)),
        ("join_loads", lambda p, b: join_loads(p, b, options.access)),
        ("lines_together", lambda p, b: lines_together(p, b, options.access, options.busy)),
        ("lay_out_weights", lambda p, b: lay_out_weights(p, b, options.beginnings)),
        ("lay_out_taps", lambda p, b: lay_out_taps(p, b, options.taps_from)),
        ("place_numbers", place_numbers),
        ("store_once", store_once),
        ("keep_library_results", keep_library_results),
        ("rename", _rename),
    )


class Known:
    """What was found of the programs of one builder, under options that differ in who computes anchors alone: candidates are one program
    before that is decided, and often behind it.
    """

    def __init__(self) -> None:
        self._programs: dict[Program, Program] = {}
        self._found: dict[tuple[str, int], tuple[Program, Any]] = {}

    def same(self, program: Program) -> Program:
        """The first one that equals `program`."""
        return self._programs.setdefault(program, program)

    def once(self, name: str, program: Program, make: Callable[[Program], T]) -> T:
        """What `make`, which `name` stands for, gave for this very `program`."""
        key = name, id(program)
        if key not in self._found:
            self._found[key] = program, make(program)  # which keeps the program, and with it its identity
        found: T = self._found[key][1]
        return found


def run_passes(
    program: Program,
    builder: Builder,
    options: PassOptions,
    *,
    check: bool = False,
    observe: Observer | None = None,
    known: Known | None = None,
) -> Program:
    """`program` after every pass.

    With `check` the verifier runs after each and an `IRError` names the pass that broke a rule; `observe` sees
    every intermediate program. Nothing runs of which the result is `known`.
    """
    known = known or Known()
    for name, function in passes(options):
        if name == _ANCHORS:
            program = known.same(function(program, builder))
        else:
            program = known.once(name, program, partial(_applied, function, builder))
        if observe is not None:
            observe(name, program)
        if check:
            _checked(name, program)
    return program


def _applied(function: Pass, builder: Builder, program: Program) -> Program:
    return function(program, builder)


def _checked(name: str, program: Program) -> None:
    try:
        verify(program)
    except Exception as error:
        error.add_note(f"after pass {name}")
        raise


def _generate_anchors(program: Program, builder: Builder, options: PassOptions) -> Program:
    if options.anchors is None:
        return without_idle_views(program)
    shared = partial(_is_shared, options, builder)
    kept = options.longest_cached_row
    return generate_anchors(program, builder, replace(options.anchors, pieces=options.pieces, kept=kept, shared=shared))


def _separate_windows(program: Program, builder: Builder, options: PassOptions) -> Program:
    estimate = options.seconds

    def seconds(program: Program, kernels: Collection[Kernel]) -> float:
        assert estimate is not None
        some = replace(program, kernels=tuple(kernels))
        some = form_teams(some, builder, options.teams, options.strips)
        some = order_and_merge(split_long_rows(some, builder, options.split), builder)
        return sum(estimate(some, kernel) for kernel in some.kernels)

    return separate_windows(program, builder, options.pieces, seconds if estimate is not None else None)


def _is_shared(options: PassOptions, builder: Builder, program: Program, kernel: Kernel) -> bool:
    """Whether blocks would share the rows of `kernel`."""
    alone = replace(program, kernels=(kernel,))
    (made,) = form_teams(alone, builder, options.teams, options.strips).kernels
    return made.team is not None


def _rename(program: Program, builder: Builder) -> Program:
    kernels = (
        replace(rename_axes(kernel, builder), name=f"{program.name}_{number}")
        for number, kernel in enumerate(program.kernels)
    )
    return replace(program, kernels=tuple(kernels))
