"""What writers of convolutions share whose blocks stay on the device: weights are fetched once, then one tile after another."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

from fusepass.codegen.render.cuda.contraction.convolution.results import ConvolutionWriter
from fusepass.codegen.render.cuda.contraction.convolution.tiles import quotient
from fusepass.codegen.render.cuda.contraction.loops import UNROLL
from fusepass.codegen.render.cuda.family import Text
from fusepass.codegen.render.spelling import block


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
        """The kernel; see `_over_tiles`."""
        tiles = list(self._over_tiles(buffers, ready, work, pointer, teams, behind))
        body = [
            *self._shared(),
            *(self.states.begin() if self.states else ()),
            "",
            *self._fetch_weights(),
            "",
            *self._fetch_tile(),
            "",
            *tiles,
        ]
        return Text(tables=tuple(self._tables()), body=tuple(body))

    def _over_tiles(
        self,
        buffers: int,
        ready: Sequence[str],
        work: Iterable[str],
        pointer: str,
        teams: int,
        behind: Sequence[str] | None,
    ) -> Iterable[str]:
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
        yield f"int {c.number} = {first};"
        yield from now if double or early else ()
        if teams > 1:  # what the block has in common is there for all of its groups
            yield from ("fp::end_copies();", "fp::await_copies<0>();", *ready, "__syncthreads();")
        yield from block(f"for (; {c.number} < {self.tile_count}; {c.number} += {stride})", loop)
