"""What all rows meet along their columns, such as weights, on its way to shared memory while a row is loaded and reduced.

Bulk copies bring what the first steps of the last phase need, so that these steps do not wait for the L2 cache, and hold up nothing else.
"""

from __future__ import annotations

from fusepass.codegen.ir.expr import Load, walk
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.spelling import C_TYPES, block
from fusepass.errors import RenderError


class Staged:
    """The copies of a kernel whose schedule has `staged` steps; the frame knows where they go."""

    def __init__(self, frame: Frame) -> None:
        self.frame, names = frame, frame.names
        self._barrier, self._pool = names.exact("staged_are_here"), names.exact("staged_pool")
        nodes = walk(*(store.value for store in frame.kernel.stores))
        self._loads = [node for node in nodes if isinstance(node, Load) and node.buffer in frame.schedule.stages]
        frame.staged = {load.buffer: names.exact(f"{frame.pointers[load.buffer]}_staged") for load in self._loads}

    def begun(self) -> list[str]:
        """One thread begins all copies; before the first barrier of the block."""
        frame, plan = self.frame, self.frame.schedule
        inner = frame.top.child(conditional=True)
        assert frame.arranged.col is not None
        inner.define_axis(frame.arranged.col, frame.head or "0")
        sizes = [plan.staged * plan.lanes * plan.width * load.dtype.nbytes for load in self._loads]
        if sum(sizes) != plan.shared_bytes:
            raise RenderError(f"{frame.kernel.name} stages {sum(sizes)} bytes, not {plan.shared_bytes}")
        lines = [f"extern __shared__ __align__(16) unsigned char {self._pool}[];"]
        lines.append(f"__shared__ fp::Barrier {self._barrier};")
        made = [f"fp::make_barrier(&{self._barrier}, 1);", "fp::publish_barriers();"]
        inner.lines.append(f"fp::arrive_before(&{self._barrier}, {sum(sizes)});")
        start = 0
        for load, nbytes in zip(self._loads, sizes, strict=True):
            place, element = frame.staged[load.buffer], C_TYPES[load.dtype]
            there = f"{self._pool} + {start}" if start else self._pool
            lines.append(f"{element}* const {place} = reinterpret_cast<{element}*>({there});")
            source = f"{frame.pointers[load.buffer]} + {inner.operand(frame.first_lane(load.index))}"
            inner.lines.append(f"fp::begin_long_copy({place}, {source}, {nbytes}, &{self._barrier});")
            start += nbytes
        one = "if (threadIdx.x == 0)"  # of a warp that meets in between: racecheck takes all of it for the maker of the barrier
        return [*lines, *block(one, made), "__syncwarp();", *block(one, inner.lines)]

    def awaited(self) -> list[str]:
        """All threads wait for the copies."""
        return [f"fp::await_phase(&{self._barrier}, 0);"]
