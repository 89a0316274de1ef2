"""What a CUDA kernel keeps of a row between phases: its values, in registers or in dynamic shared memory, and what depends on the row alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusepass.codegen.ir.dataflow import Kept, kept_in_memory, kept_values
from fusepass.codegen.ir.expr import Const, Expr, ReductionResult, descend, evaluated
from fusepass.codegen.render.cuda.walk.frame import Frame, Number, Pool
from fusepass.codegen.render.cuda.walk.states import State
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare
from fusepass.codegen.schedule.plan import Keep
from fusepass.errors import RenderError


def values_to_keep(frame: Frame) -> tuple[Kept, ...]:
    """What the kernel's schedule keeps."""
    match frame.keep:
        case Keep.REGISTERS:
            return kept_values(frame.kernel, frame.dataflow)
        case Keep.PACKED | Keep.SHARED | Keep.FETCHED:
            return kept_in_memory(frame.kernel, frame.dataflow)
        case Keep.NOTHING:
            return ()


class KeptPlaces:
    """The variables of kept values. What is in shared memory is taken from there, and left there, as whole vectors."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self._shared = frame, frame.keep.in_shared
        self._names: dict[int, str] = {}
        self._vectors: dict[int, str] = {}
        self._pool = Pool(frame.names.exact("pool"), free)
        self.place = ""  # of the vector at hand, where that is not its number

    def name(self, kept: Kept) -> str:
        """The C name of all places."""
        return self._names[id(kept.node)]

    def element(self, kept: Kept) -> str:
        """The C expression for a kept value, in the loops over steps and lanes."""
        frame = self.frame
        lane = f"[{frame.v}]" if frame.has_lanes(kept.node) else ""
        if self._shared:
            return f"{self._staged(kept)}{lane or '[0]'}"
        return f"{self.name(kept)}{f'[{frame.u}]' if frame.schedule.unroll > 1 else ''}{lane}"

    def declare(self, kept: Kept) -> None:
        frame, tile = self.frame, self.frame.tile
        element, width = C_TYPES[kept.node.dtype], self._width(kept)
        name = self._names[id(kept.node)] = frame.names.numbered("kept")
        if self._shared:
            self._vectors[id(kept.node)] = frame.names.exact(f"{name}_vector")
            frame.top.lines += [] if self._pool.used else [self._pool.declaration]
            places = -(-tile.count // tile.step) * tile.step
            if frame.of_block and frame.of_block.buffer:
                places = frame.of_block.buffer.places * frame.schedule.unroll * frame.schedule.threads
            nbytes = places * width * kept.node.dtype.nbytes
            frame.top.lines.append(self._pool.array(f"fp::Vec<{element}, {width}>", name, nbytes))
            return
        if tile.loop:
            raise RenderError(f"{frame.kernel.name} has no registers for all of a row")
        steps = f"[{frame.schedule.unroll}]" if frame.schedule.unroll > 1 else ""
        frame.top.lines.append(f"{element} {name}{steps}{f'[{width}]' if width > 1 else ''};")

    def staging(self, made: Sequence[Kept]) -> list[str]:
        """Declarations of the vectors that go to shared memory."""
        kinds = ((kept, f"fp::Vec<{C_TYPES[kept.node.dtype]}, {self._width(kept)}>") for kept in made)
        return [f"{kind} {self._staged(kept)};" for kept, kind in kinds] if self._shared else []

    def taken(self, known: Sequence[Kept], number: str | Number) -> list[str]:
        """Read vector `number` of `known` values from shared memory."""
        return [
            f"const auto {self._staged(kept)} = {self.name(kept)}[{self.place or number}];"
            for kept in known
            if self._shared
        ]

    def left(self, made: Sequence[Kept], number: str | Number) -> list[str]:
        """Write vector `number` of the values just `made` to shared memory."""
        return [f"{self.name(kept)}[{number}] = {self._staged(kept)};" for kept in made if self._shared]

    def check(self) -> None:
        """Raises RenderError where the schedule has less room than what was declared."""
        self._pool.check(self.frame.kernel.name, self.frame.schedule.shared_bytes)

    def _width(self, kept: Kept) -> int:
        return self.frame.schedule.width if self.frame.has_lanes(kept.node) else 1

    def _staged(self, kept: Kept) -> str:
        """A vector on its way to or from shared memory."""
        return self._vectors[id(kept.node)]


class RowValues:
    """Arrays with an element for each of a thread's rows.

    `states` are those of the reduction loops that are done, by reduction.
    """

    def __init__(self, frame: Frame, stats: Sequence[ReductionResult]) -> None:
        self.frame = frame
        self.states: dict[str, State] = {}
        self._stats = stats
        self._arrays: list[tuple[Expr, str]] = []

    def compute(self, roots: Iterable[Expr]) -> None:
        """Compute what depends on the row alone once per row, where a thread has several."""
        have = {id(node) for node, _ in self._arrays}
        nodes = [node for node in self._frontier(roots) if id(node) not in have]
        if not nodes:
            return
        lanes = self.frame.top.child({self.frame.lane: self.frame.v})
        self.bind(lanes)
        made = []
        for node in nodes:
            name = self.frame.names.numbered("row_value")
            text = bare(lanes.value(node))
            self.frame.top.lines.append(f"{C_TYPES[node.dtype]} {name}[{self.frame.schedule.width}];")
            lanes.lines.append(f"{name}[{self.frame.v}] = {text};")
            made.append((node, f"{name}[{self.frame.v}]"))
        self.frame.top.lines += self.frame.unrolled(self.frame.v, self.frame.schedule.width, lanes.lines)
        self._arrays += made

    def _frontier(self, roots: Iterable[Expr]) -> list[Expr]:
        """The largest values below `roots` that differ from row to row only, outside masks and windows."""
        frame = self.frame

        def differs(node: Expr) -> bool:
            return frame.arranged.col in frame.dataflow.needs(node)

        # The last ones first.
        nodes = descend([*roots][::-1], lambda node: evaluated(node)[::-1] if differs(node) else ())
        known = ReductionResult | Const
        return [node for node in nodes if not differs(node) and frame.has_lanes(node) and not isinstance(node, known)]

    def bind(self, lanes: Scope) -> None:
        """Make them and the results of reductions known where a lane's row is."""
        for stat in self._stats:
            if stat.reduction in self.states:
                lanes.bind(stat, f"{self.states[stat.reduction].element}.part<{stat.part}>()")
        for node, place in self._arrays:
            lanes.bind(node, place)
