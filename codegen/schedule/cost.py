"""About how long a schedule of a memory-bound kernel takes: what ranks the schedules that a kernel may have.

Three things go on at once, and the slowest one decides, as long as it is clearly the slowest: memory moves bytes, threads
execute instructions, and blocks wait, each for its own loads and for each other. Multiprocessors hide the waiting by
having several blocks. The constants fit times of 189 schedules of some fifty kernels on an H200: those of one kernel relative to each other within 5 % in
the mean. What matters is their order.
"""

from __future__ import annotations

from functools import cached_property

from fusepass.codegen.device import RESERVED
from fusepass.codegen.ir.dataflow import Dataflow, phases
from fusepass.codegen.ir.expr import Apply, Builder, walk
from fusepass.codegen.ir.ops import CHEAP
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.ir.twopass import split_statistics
from fusepass.codegen.ir.vectors import alignment
from fusepass.codegen.schedule.plan import Keep, Schedule
from fusepass.codegen.schedule.shape import LINE, SECTOR, Access, Shape, ceil

_LAUNCH = 2.5e-6  # seconds
# Seconds of a block: to its first load, for each load, from shared memory.
_START, _LOAD, _SHARED = 2.7e-7, 4.5e-7, 2e-7
_DISPATCH = 7.3e-8  # seconds from one block to the next on a multiprocessor, at least
_COSTLY = 8.0  # instructions of a function that is none of the cheap ones
_ACCESS = 2.7  # of a load or store, with its index
_MERGE = 1.7  # of one step in which two lanes merge a state
_MEET = 24.0  # of warps that merge theirs
_PLACE = 69.0  # of a thread that finds its row
_PLAIN_REGISTERS = 48  # of a thread, besides what it holds
_MOST_BLOCKS = 32  # on a multiprocessor
_CACHED = 0.14  # of the time of memory takes what is read again and still in the second-level cache
_SHORT = 0.037  # of a load's time takes each line of pieces that are shorter than one
_PARTS = 1.2  # of the time of a store takes that sectors are written in part
_SPREAD = 0.011  # of memory's time, for each doubling of a pointwise thread's vectors: they lie further apart
_LONELY = 0.17  # of memory's time, shared by the blocks that a multiprocessor has at once
_SHARP, _LONELY_SHARP = 4.9, 2.5  # how clearly the slowest of the three decides; where a multiprocessor has one block


class Costs:
    """Estimates for schedules of the kernel of one shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        loads = {access.buffer: access for access in shape.main if access.buffer in shape.kernel.reads}
        self.loads = tuple(loads.values())

    def seconds(self, plan: Schedule) -> float:
        """Of one launch of the kernel as `plan` lays it out."""
        sharp = _SHARP if self.resident(plan) > 1 else _LONELY_SHARP
        together: float = sum(part**sharp for part in self.parts(plan)) ** (1 / sharp)
        return _LAUNCH + together

    def parts(self, plan: Schedule) -> tuple[float, float, float]:
        """Seconds that memory moves bytes, that instructions take, and that blocks wait."""
        facts, resident = self.shape.facts, self.resident(plan)
        return (
            self._bytes(plan, resident) * (1 + _LONELY / resident) / facts.bandwidth,
            self._instructions(plan) / (facts.machine.rates.issue * facts.multiprocessors),
            max(
                _iterations(plan, resident, facts.multiprocessors) * self._waiting(plan),
                plan.blocks / facts.multiprocessors * _DISPATCH,
            ),
        )

    def resident(self, plan: Schedule) -> int:
        """Blocks that stand on a multiprocessor at once."""
        shape, facts, held = self.shape, self.shape.facts, plan.unroll * plan.width
        loaded = sum(max(access.nbytes, 4) // 4 for access in self.loads)
        keep = plan.keep
        words = shape.kept_words if keep.in_registers else loaded
        taken = ceil(held * shape.kept_bytes, 4) if keep is Keep.PACKED else held * max(words, 1)
        registers = min(_PLAIN_REGISTERS + taken, 255)
        if plan.resident:
            registers = min(registers, facts.registers // (plan.resident * plan.threads))
        most = min(facts.max_threads // plan.threads, facts.registers // (registers * plan.threads), _MOST_BLOCKS)
        if plan.shared_bytes:
            most = min(most, (facts.shared_bytes_per_block + RESERVED) // (plan.shared_bytes + RESERVED))
        return max(most, 1)

    def _bytes(self, plan: Schedule, resident: int) -> float:
        """That memory moves."""
        shape = self.shape
        kernel, program = shape.kernel, shape.program
        read = sum(program.buffer(access.buffer).nbytes * _waste(plan, access) for access in self.loads)
        small = sum(program.buffer(name).nbytes for name in kernel.reads - {access.buffer for access in self.loads})
        written: float = sum(program.buffer(name).nbytes for name in kernel.writes)
        if plan.tears and self._begins_anywhere:
            written *= 1 + _PARTS
        again = self._phases(plan) - 1 if plan.keep is Keep.NOTHING and kernel.reduction_loops else 0
        at_once = min(plan.blocks, resident * shape.facts.multiprocessors) / plan.blocks * read
        share = _CACHED if min(read, 2 * at_once) < shape.facts.l2_bytes else 1.0
        read *= 1 + plan.shared_rows * _CACHED
        return (read * (1 + again * share) + small + written) * (1 + _SPREAD * plan.spread)

    def _instructions(self, plan: Schedule) -> float:
        """Of all threads: for each element, and for each thread of a row to find its place and to merge what it has."""
        shape, merging = self.shape, plan.merging
        each = self._kept_work if plan.keep is not Keep.NOTHING else self._plain_work
        each += (len(self.loads) + len(shape.kernel.stores)) * _ACCESS / plan.width
        merged = len(self._kernel(plan).reductions) * (merging.steps * _MERGE + merging.warps * _MEET)
        threads = plan.blocks * plan.threads * self._rows_of_block(plan)
        again = plan.lanes * plan.width / plan.own_rows
        return shape.rows * max(shape.cols, 1) * each * again + threads * (_PLACE + merged * merging.states)

    def _waiting(self, plan: Schedule) -> float:
        """Seconds of one block that has a multiprocessor's memory to itself."""
        steps, phases = max(plan.vectors_of_thread(self.shape.cols) / plan.unroll, 1.0), self._phases(plan)
        keep, buffered = plan.keep, plan.buffer is not None
        loading = 1 if keep is not Keep.NOTHING else phases
        # Half is under way before.
        seconds = loading * steps * _LOAD * (0.5 if keep is Keep.FETCHED or buffered else 1.0)
        seconds += (phases - loading) * steps * (_SHARED if keep.in_shared else 0.0)
        return _START + self._rows_of_block(plan) * seconds

    def _rows_of_block(self, plan: Schedule) -> int:
        """That it takes one after another."""
        if plan.team is None and plan.keep is not Keep.FETCHED:
            return 1
        return ceil(self.shape.rows * (plan.team.members if plan.team else 1), plan.blocks)

    def _phases(self, plan: Schedule) -> int:
        kernel = self._kernel(plan)
        return len(kernel.reduction_loops) + kernel.ends_per_element

    def _kernel(self, plan: Schedule) -> Kernel:
        return self._kept if plan.keep is not Keep.NOTHING else self.shape.kernel

    @cached_property
    def _begins_anywhere(self) -> bool:
        """Whether rows that are stored side by side begin anywhere in a sector of memory."""
        axis, stores = self.shape.row_axis, self.shape.kernel.stores
        sizes = [SECTOR // self.shape.program.buffer(store.buffer).dtype.nbytes for store in stores]
        return axis is not None and any(
            alignment(store.index, axis, size) % size != 0 for store, size in zip(stores, sizes, strict=True)
        )

    @cached_property
    def _kept(self) -> Kernel:
        return split_statistics(self.shape.kernel, Builder())

    @cached_property
    def _kept_work(self) -> float:
        return _work(self._kept, keeps=True)

    @cached_property
    def _plain_work(self) -> float:
        return _work(self.shape.kernel, keeps=False)


def _work(kernel: Kernel, *, keeps: bool) -> float:
    """Instructions for each element; what an earlier phase computed is computed again unless the kernel `keeps` it."""
    dataflow, own = Dataflow(), frozenset(kernel.cols or kernel.rows)
    done: set[int] = set()
    total = 0.0
    for roots in phases(kernel):
        nodes = [node for node in walk(*roots) if isinstance(node, Apply) and id(node) not in done]
        total += sum(_COSTLY if node.op not in CHEAP else 1 for node in nodes if dataflow.needs(node) & own)
        done |= {id(node) for node in nodes} if keeps else set()
    return total


def _iterations(plan: Schedule, resident: int, multiprocessors: int) -> float:
    """How often a multiprocessor has its places filled; what comes last is not shared evenly."""
    iterations = plan.blocks / (resident * multiprocessors)
    return ceil(plan.blocks, resident * multiprocessors) if iterations < 2 else iterations + 0.5


def _waste(plan: Schedule, access: Access) -> float:
    """How many times its bytes memory seems to move for a load, as the pieces that neighbouring threads read are short."""
    if not plan.reads_runs:
        return 1.0
    lines = LINE / (plan.lanes * plan.width * access.nbytes)
    return 1 + _SHORT * lines**2
