"""What writers of convolutions share whose blocks stay on the device: weights are fetched once, then one tile after another."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

from fusepass.codegen.render.cuda_convolution import ConvolutionText, ConvolutionWriter
from fusepass.codegen.render.cuda_input import quotient
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
        """``$fetch``, which begins to fetch the input below a tile."""

    def text(
        self, buffers: int, ready: Sequence[str], work: Iterable[str], pointer: str, teams: int = 1
    ) -> ConvolutionText:
        """The kernel; see `_over_tiles`."""
        tiles = list(self._over_tiles(buffers, ready, work, pointer, teams))
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
        return ConvolutionText(tuple(self._tables()), tuple(map(self.named, body)))

    def _over_tiles(
        self, buffers: int, ready: Sequence[str], work: Iterable[str], pointer: str, teams: int
    ) -> Iterable[str]:
        """A block takes one tile after another: `ready` makes of what is there what `work` takes.

        With two `buffers`, of type `pointer`, the next tile is fetched meanwhile. With several `teams`, groups of four warps, each
        takes tiles of its own, and ``$team`` is its number.
        """
        blocks = self.plan.channel_blocks
        each = self.plan.blocks // blocks
        stride, first, meet = each, quotient("int(blockIdx.x)", blocks), "__syncthreads();"
        if teams > 1:
            stride, first, meet = each * teams, f"{first} + $team * {each}", "fp::meet_group();"
        ahead = [
            *block(f"if ($number + {stride} < {self.tile_count})", [f"$fetch($number + {stride}, $next);"]),
            "fp::end_copies();",
            "fp::await_copies<1>();",
        ]
        fetch = "$fetch($number, $tile);"
        whole = teams == 1 or self.tile_count >= stride
        now = [fetch if whole else f"if ($number < {self.tile_count}) {fetch}", "fp::end_copies();"]
        exchange = [f"{pointer} const $done = $tile;", "$tile = $next;", "$next = $done;"]
        double = buffers == 2
        loop = [
            *(ahead if double else [*now, "fp::await_copies<0>();"]),
            *ready,
            meet,
            *self.tile_place(),
            *work,
            meet,
            *(self.states.end("$first_channel") if self.states else ()),
            *(exchange if double else []),
        ]
        yield f"int $number = {first};"
        yield from now if double else ()
        if teams > 1:  # what the block has in common is there for all of its groups
            yield from ("fp::end_copies();", "fp::await_copies<0>();", *ready, "__syncthreads();")
        yield from block(f"for (; $number < {self.tile_count}; $number += {stride})", loop)
