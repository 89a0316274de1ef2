"""What writers of convolutions share whose blocks stay on the device: weights are fetched once, then one tile after another; and what a thread makes
of its own sums, before they are laid out, if it is the same function of all positions' sums.

A thread has some channels of several positions at a time (`Held`), so that what depends on a channel is loaded and computed once for
these. Values that are stored are laid out as sums would be, and copied. What reduces over positions stays in registers for all positions
that a warp goes over in a tile; then the threads that have the same channels merge what they found.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.ir.expr import Expr, ReductionResult
from fusepass.codegen.ir.program import Reduction
from fusepass.codegen.render.cuda.contraction.convolution.results import ConvolutionWriter
from fusepass.codegen.render.cuda.contraction.convolution.tiles import Sums, quotient
from fusepass.codegen.render.cuda.contraction.loops import Loop
from fusepass.codegen.render.cuda.family import Text
from fusepass.codegen.render.cuda.partials import state_type
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import UNROLL, bare, block, either


class PersistentWriter(ConvolutionWriter, abc.ABC):
    """Lines of such a kernel; see `ConvolutionWriter`."""

    @abc.abstractmethod
    def _tables(self) -> Iterable[str]:
        """The constant tables."""

    @abc.abstractmethod
    def _shared(self) -> Iterable[str]:
        """The parts of shared memory, and what a thread knows of its place."""

    @abc.abstractmethod
    def _fetch_weights(self) -> Iterable[str]:
        """Weights, for all tiles."""

    @abc.abstractmethod
    def _fetch_tile(self) -> Iterable[str]:
        """``fetch``, which begins to fetch the input below a tile."""

    def fetched_input(self) -> Iterable[str]:
        """The same for tiles that stay as they are: all channels, zeros where there is no input."""
        c = self.c
        strides = self.source.strides
        lines, real, index = self.input_place(c.i)
        source = f"{self.pointers[self.source.name]} + ({c.real} ? {c.from_} + {self.index_type}({c.channel}) * {strides[1]} : 0)"
        lines += [
            f"const bool {c.real} = {real};",
            f"const {self.index_type} {c.from_} = {index};",
            UNROLL,
            *block(
                self.over_channels_of_input, [self.copy_input(f"{c.to} + {self.in_tile(c.channel)}", source, c.real)]
            ),
        ]
        yield "// begins to fetch the input below a tile, zeros where there is none"
        yield from block(
            f"const auto {c.fetch} = [&](int {c.number}, float* {c.to})",
            [*self.tile_place(), *block(self.copies, lines)],
            "};",
        )

    @property
    def over_channels_of_input(self) -> str:
        """The head of a loop."""
        c = self.c
        return f"for (int {c.channel} = 0; {c.channel} < {self.ins}; ++{c.channel})"

    def text(
        self,
        buffers: int,
        ready: Sequence[str],
        work: Iterable[str],
        pointer: str,
        teams: int = 1,
        *,
        behind: Sequence[str] | None = None,
    ) -> Text:
        """A block takes one tile after another: `ready` makes of what is there what `work` takes.

        With two `buffers`, of type `pointer`, the next tile is fetched meanwhile; so it is where `ready` leaves nothing of a tile that
        is needed: then `behind` follows it. With several `teams`, groups of four warps, each takes tiles of its own, and ``team`` is its number.
        """
        c = self.c
        blocks = self.plan.channel_blocks
        each = self.plan.blocks // blocks
        stride, first, meet = each, quotient("int(blockIdx.x)", blocks), "__syncthreads();"
        if teams > 1:
            stride, first, meet = each * teams, f"{first} + {c.team} * {each}", "fp::meet_group();"
        into = c.next if buffers == 2 else c.tile
        ahead = [
            *block(f"if ({c.number} + {stride} < {self.tile_count})", [f"{c.fetch}({c.number} + {stride}, {into});"]),
            "fp::end_copies();",
        ]
        fetch = f"{c.fetch}({c.number}, {c.tile});"
        whole = teams == 1 or self.tile_count >= stride
        now = [fetch if whole else f"if ({c.number} < {self.tile_count}) {fetch}", "fp::end_copies();"]
        exchange = [f"{pointer} const {c.done} = {c.tile};", f"{c.tile} = {c.next};", f"{c.next} = {c.done};"]
        double, early = buffers == 2, behind is not None
        fetched = [*ahead, "fp::await_copies<1>();"] if double else [*([] if early else now), "fp::await_copies<0>();"]
        loop = [
            *fetched,
            *([meet] if early else []),
            *ready,
            meet,
            *([*(behind or ()), *ahead] if early else []),
            *self.tile_place(),
            *work,
            meet,
            *(self.states.end(c.first_channel, self.end_channel) if self.states else ()),
            *(exchange if double else []),
        ]
        began: list[str] = []
        if teams > 1:  # what the block has in common is there for all of its groups
            began = ["fp::end_copies();", "fp::await_copies<0>();", *ready, "__syncthreads();"]
        body = [
            *self._shared(),
            *(self.states.begin() if self.states else ()),
            "",
            *self._fetch_weights(),
            "",
            *self._fetch_tile(),
            "",
            f"int {c.number} = {first};",
            *(now if double or early else ()),
            *began,
            *block(f"for (; {c.number} < {self.tile_count}; {c.number} += {stride})", loop),
        ]
        return Text(tables=tuple(self._tables()), body=tuple(body))


@dataclass(frozen=True)
class Held:
    """How the threads of a warp have its sums in registers.

    Attributes:
        channels, positions: of a thread.
        row: the place of a thread's channel, of that number, among those of the warp.
        at: the sum of a channel and a position, by their numbers.
        states: the type of what a thread finds of its values, of a type of states and a number of channels.
        push: adds values to these: the call, of which the arguments are missing, by whether all are real.
        leave: the call that adds these to the warp's.
        sums: the argument of `push` that has the values.
        staging: the statement that lays the values of the ``m``-th 16 channels out.
    """

    channels: int
    positions: int
    row: Callable[[str], str]
    at: Callable[[str, str], str]
    states: str
    push: Callable[[str], str]
    leave: str
    sums: str
    staging: str


class OwnValues:
    """Lines for what threads make of their own sums."""

    def __init__(self, writer: ConvolutionWriter, held: Held) -> None:
        self.writer, self.kernel, self.held = writer, writer.kernel, held
        partials = self.kernel.partials
        self.value: Expr = partials.value if partials is not None else self.kernel.stores[0].value
        self.reductions: tuple[Reduction, ...] = () if partials is None else partials.reductions

    def begin(self) -> Iterable[str]:
        """The states of reductions, for the positions of a tile."""
        for number, reduction in enumerate(self.reductions):
            yield f"{self.held.states}<{state_type(reduction)}, {self.held.channels}> {self._state(number)};"

    def use(self, sums: Sums) -> Iterable[str]:
        """Reduces and stores what becomes of ``sums``."""
        plain = any(store.value is not self.value for store in self.kernel.stores)
        if plain:
            yield from self._stored(replace(sums, staging=self.writer.own_staging(sums), repair=()))
        yield from self._values()
        if self.reductions:
            yield from self.writer.over_positions(sums, [])
            yield from self.pushed(f"{self.writer.c.inside}[0]", "0xffffffffu")
        if self.kernel.stores and not plain:
            yield from self._stored(replace(sums, staging=self.held.staging, repair=()))

    def reduced(self, inside: str, whole: str) -> Iterable[str]:
        """Reduces what becomes of ``sums``, at positions of which `inside` has a bit; where these are `whole`, all are results."""
        yield from self._values()
        yield from self.pushed(inside, whole)

    def pushed(self, inside: str, whole: str) -> Iterable[str]:
        """Adds the values to what was found."""
        every, some = (
            [f"{push}({self._state(number)}, {self.held.sums}, {inside});" for number in range(len(self.reductions))]
            for push in map(self.held.push, ("true", "false"))
        )
        return either(f"{inside} == {whole}", every, some)

    def end(self) -> Iterable[str]:
        """Adds what was found in a tile to the warp's states."""
        for number in range(len(self.reductions)):
            assert self.writer.states is not None
            yield f"{self.held.leave}({self.writer.states.of_iteration(number)}, {self._state(number)});"

    def _state(self, number: int) -> str:
        """What a thread finds for the reduction of that number."""
        return self.writer.c.named(f"own_{number}")

    def _values(self) -> Iterable[str]:
        """Puts values in the place of sums."""
        c = self.writer.c
        factor, scaled = self.writer.factors()
        channel, position = Loop(c.k, self.held.channels), Loop(c.t, self.held.positions)
        at = self.held.at(str(channel), str(position))
        shared = Scope(self.writer.printer, at=dict(zip(self.kernel.rows, (c.sample, c.channel), strict=False)))
        self.writer.printer.expect([self.value])
        each = shared.child()
        for node in self.kernel.nodes:
            if isinstance(node, ReductionResult):
                each.bind(node, c.sum, spare=1)
        value = bare(each.value(self.value))
        lines = [
            f"const int {c.row} = {self.held.row(str(channel))}, {c.channel} = {self.writer.first_channel} + {c.row};",
            *factor,
            *shared.lines,
            *position.over([f"float {c.sum} = {at};", f"{c.sum} = {scaled};", *each.lines, f"{at} = {value};"]),
        ]
        lines[1:] = self.writer.of_result(lines[1:])
        yield from channel.over(lines)

    def _stored(self, sums: Sums) -> Iterable[str]:
        """Stores what `sums` lay out, as a kernel would whose results these are."""
        (stat,) = {node for node in self.kernel.nodes if isinstance(node, ReductionResult)}
        stores = tuple(replace(store, value=stat) for store in self.kernel.stores)
        copying = copy.copy(self.writer)
        copying.kernel = replace(self.kernel, stores=stores, partials=None)
        copying.__dict__["states"] = None
        return copying.stored_own(sums)
