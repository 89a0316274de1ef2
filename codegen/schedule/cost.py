"""About how long a schedule of a memory-bound kernel takes: what ranks the schedules that a kernel may have.

Three things go on at once, and the slowest one decides, as long as it is clearly the slowest: memory moves bytes, threads
execute instructions, and blocks wait, each for its own loads and for each other. Multiprocessors hide the waiting by
having several blocks. The constants are round numbers for Hopper; what matters is the order of the schedules of one kernel.
"""

from __future__ import annotations

from math import log2

from fusepass.codegen.ir.dataflow import phases
from fusepass.codegen.ir.expr import Apply, Builder, walk
from fusepass.codegen.ir.ops import CHEAP
from fusepass.codegen.ir.twopass import split_statistics
from fusepass.codegen.schedule.plan import Keep, Schedule, Walk
from fusepass.codegen.schedule.shape import LINE, Access, Shape, ceil

_LAUNCH = 2.5e-6  # seconds
_LOAD, _SHARED, _MEETING, _SHUFFLE = 9e-7, 1e-7, 6e-8, 1.5e-8  # seconds that a thread waits for each
_START = 4e-7  # seconds of a block before its first load
_ISSUE = 128 * 1.7e9  # instructions of threads that a multiprocessor executes in a second
_COSTLY = 14  # instructions of a function that is none of the cheap ones
_ACCESS = 4  # of a load or store, with its index
_MERGE = 6  # of one step in which two lanes merge a state
_PLAIN_REGISTERS = 28  # of a thread, besides what it holds
_MOST_BLOCKS = 32  # on a multiprocessor
_RESERVED = 1 << 10  # bytes of shared memory that the device takes of each block
_CACHED = 0.4  # of the time of memory takes what is read again and still in the second-level cache
_SHARP = 3.0  # how clearly the slowest one of the three decides


def estimate(shape: Shape, plan: Schedule) -> float:
    """Seconds of one launch of the kernel of `shape` as `plan` lays it out."""
    facts = shape.facts
    resident = _resident(shape, plan)
    parts = (
        _bytes(shape, plan, resident) / facts.bandwidth,
        _instructions(shape, plan) / (_ISSUE * facts.multiprocessors),
        _turns(plan, resident, facts.multiprocessors) * _waiting(shape, plan),
    )
    together: float = sum(part**_SHARP for part in parts) ** (1 / _SHARP)
    return _LAUNCH + together


def _resident(shape: Shape, plan: Schedule) -> int:
    """Blocks that stand on a multiprocessor at once."""
    facts = shape.facts
    held = plan.unroll * plan.width
    words = shape.kept_words if plan.keep is Keep.REGISTERS else sum(max(a.nbytes, 4) // 4 for a in _loads(shape))
    registers = min(_PLAIN_REGISTERS + held * max(words, 1), 255)
    most = min(facts.max_threads // plan.threads, facts.registers // (registers * plan.threads), _MOST_BLOCKS)
    if plan.shared_bytes:
        most = min(most, (facts.shared_bytes_per_block + _RESERVED) // (plan.shared_bytes + _RESERVED))
    return max(most, 1)


def _turns(plan: Schedule, resident: int, multiprocessors: int) -> float:
    """How often a multiprocessor has its places filled; what comes last is not shared evenly."""
    turns = plan.blocks / (resident * multiprocessors)
    return ceil(plan.blocks, resident * multiprocessors) if turns < 2 else turns + 0.5


def _steps(shape: Shape, plan: Schedule) -> float:
    """How often a thread loads, and waits for what it has loaded, in one phase."""
    match plan.walk:
        case Walk.INNER:
            each = ceil(plan.vectors(shape.cols), plan.lanes)
        case Walk.OUTER:
            each = ceil(shape.cols, plan.groups)
        case _:
            each = plan.unroll
    return max(each / plan.unroll, 1.0)


def _phases(shape: Shape, plan: Schedule) -> int:
    kernel = shape.kernel
    if plan.keep is not Keep.NOTHING:
        kernel = split_statistics(kernel, Builder())
    return len(kernel.sweeps) + bool(kernel.stores)


def _waiting(shape: Shape, plan: Schedule) -> float:
    """Seconds of one block that has a multiprocessor's memory to itself."""
    steps, phases = _steps(shape, plan), _phases(shape, plan)
    rows = ceil(shape.rows, plan.blocks) if plan.fetches else 1
    loading = 1 if plan.keep is not Keep.NOTHING else phases
    seconds = loading * steps * _LOAD
    if plan.fetches:
        seconds /= 2  # under way while the row before is stored
    seconds += (phases - loading) * steps * (_SHARED if plan.keep is Keep.SHARED else 0.0)
    meetings = max(phases - 1, 0) if shape.kernel.sweeps else 0
    inside = min(plan.lanes, 32) if plan.walk is Walk.INNER else 1
    across = plan.lanes > 32 if plan.walk is Walk.INNER else plan.groups > 1
    seconds += meetings * (log2(inside) * _SHUFFLE + (across or plan.exchanges) * 2 * _MEETING)
    return _START + rows * seconds


def _bytes(shape: Shape, plan: Schedule, resident: int) -> float:
    """Bytes that memory moves."""
    kernel, program = shape.kernel, shape.program
    read = sum(program.buffer(access.buffer).nbytes * _waste(shape, plan, access) for access in _loads(shape))
    small = sum(program.buffer(name).nbytes for name in kernel.reads - {access.buffer for access in _loads(shape)})
    written = sum(program.buffer(name).nbytes for name in kernel.writes)
    again = _phases(shape, plan) - 1 if plan.keep is Keep.NOTHING and shape.kernel.sweeps else 0
    at_once = min(plan.blocks, resident * shape.facts.multiprocessors) / plan.blocks * read
    share = _CACHED if min(read, 2 * at_once) < shape.facts.l2_bytes else 1.0
    if plan.walk is Walk.OUTER:
        read *= 1 + plan.overlap / (plan.lanes * plan.width) * _CACHED
    return read * (1 + again * share) + small + written


def _waste(shape: Shape, plan: Schedule, access: Access) -> float:
    """How many times its bytes memory moves for a load, as pieces are shorter than lines."""
    if plan.walk is not Walk.OUTER:
        return 1.0
    piece = plan.lanes * plan.width * access.nbytes
    return 1 + LINE / piece / 8


def _loads(shape: Shape) -> list[Access]:
    found = {access.buffer: access for access in shape.main if access.buffer in shape.kernel.reads}
    return list(found.values())


def _instructions(shape: Shape, plan: Schedule) -> float:
    kernel = shape.kernel if plan.keep is Keep.NOTHING else split_statistics(shape.kernel, Builder())
    points = shape.rows * max(shape.cols, 1)
    each = 0.0
    for number, roots in enumerate(phases(kernel)):
        nodes = list(walk(*roots))
        costs = (_COSTLY if node.op not in CHEAP else 1 for node in nodes if isinstance(node, Apply))
        each += sum(costs) + (2 * len(kernel.sweeps[number]) if number < len(kernel.sweeps) else 0)
    accesses = len(_loads(shape)) + len(kernel.stores)
    each += accesses * _ACCESS / plan.width
    lanes = plan.lanes if plan.walk is Walk.INNER else plan.groups
    merges = len(kernel.reductions) * lanes * log2(max(min(lanes, 32), 1)) * _MERGE
    return points * each + shape.rows * merges
