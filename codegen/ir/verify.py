"""The rules that every program obeys; run after lowering and after every pass when debugging and in tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from fusepass.codegen.ir.convolution import Convolution, Pooling, ScaledHalves, ScaledWeights, halves_of_place
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Prefix, ReduceOp, ReductionResult, Window
from fusepass.codegen.ir.index import Axis, axis_index, contiguous_strides
from fusepass.codegen.ir.product import PLACE, Filling, Product, parts_of
from fusepass.codegen.ir.program import Anchor, Kernel, Partials, Program, Ref, Role, Store, Team
from fusepass.codegen.ir.team import exchange_offsets
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.ir.updates import reads_in_place
from fusepass.codegen.ir.verify_expressions import expr_faults, find_buffer, store_faults
from fusepass.errors import IRError


def verify(program: Program) -> None:
    """Raise `IRError`, naming every broken rule and showing the program, unless `program` is well formed."""
    faults = list(_program_faults(program))
    if faults:
        raise IRError("\n".join([*faults, program_text(program)]))


def _program_faults(program: Program) -> Iterator[str]:
    names = [buffer.name for buffer in program.buffers]
    if len(set(names)) != len(names):
        yield "two buffers share a name"
        return
    for buffer in program.buffers:
        if buffer.role is Role.TEMP and buffer.extent > buffer.numel:
            yield f"temporary {buffer.name} lies on more memory than it has elements"
    roles = {buffer.name: buffer.role for buffer in program.buffers}
    for name in program.inputs:
        if roles.get(name) is not Role.INPUT:
            yield f"input {name} is not an input buffer"
    for name in program.outputs:
        if roles.get(name) not in (Role.OUTPUT, Role.ANCHOR):
            yield f"output {name} is neither an output nor an anchor's result"
    for output, updated in program.updates:
        if roles.get(output) is not Role.OUTPUT or roles.get(updated) is not Role.INPUT:
            yield f"{output} over {updated}, which are no output and input"
    written, written_over = set[str](), set[str]()
    for call in program.calls:
        if roles.get(call.result) is not Role.ANCHOR or call.result in written:
            yield f"{call.target} writes {call.result}, which is not its to write"
        for name in _arguments((call.args, call.kwargs)):
            if roles.get(name) is not Role.INPUT and name not in written:
                yield f"{call.target} reads {name} before it is written"
        written.add(call.result)
    for kernel in program.kernels:
        yield from (f"{kernel.name}: {fault}" for fault in _kernel_faults(program, kernel))
        for name in sorted(kernel.reads):
            if roles.get(name) not in (Role.INPUT,) and name not in written:
                yield f"{kernel.name} reads {name} before it is written"
        for name in sorted(kernel.overflow_flags):
            if name not in written or roles[name] is not Role.TEMP:
                yield f"{kernel.name} raises an alarm in {name}, which is no temporary written before"
        for name in sorted(kernel.writes):
            over = roles.get(name) is Role.ANCHOR and name in program.outputs and name not in written_over
            if name in written and kernel.when is None and not kernel.rest and not over:
                yield f"{kernel.name} writes {name}, which was written before"
            if roles.get(name) is Role.INPUT or (roles.get(name) is Role.ANCHOR and not over):
                yield f"{kernel.name} writes {name}, which is not its to write"
            if over and name in kernel.reads and not reads_in_place(kernel, name, name):
                yield f"{kernel.name} writes {name} over what it reads elsewhere"
        for name in sorted(kernel.reads & written_over):
            yield f"{kernel.name} reads {name}, which was written over"
        written_over |= {name for name in kernel.writes if roles.get(name) is Role.ANCHOR}
        written |= kernel.writes
    for name, role in roles.items():
        if role is Role.OUTPUT and name not in written and program.buffer(name).numel:
            yield f"output {name} is never written"


def _arguments(value: object) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.buffer
    elif isinstance(value, tuple):
        for item in value:
            yield from _arguments(item)


def _kernel_faults(program: Program, kernel: Kernel) -> Iterator[str]:
    axes = [axis.name for axis in (*kernel.rows, *kernel.cols)]
    if len(set(axes)) != len(axes):
        yield "two axes share a name"
    if bool(kernel.cols) != bool(kernel.reduction_loops):
        yield "columns without a reduction, or a reduction without columns"
    if kernel.once and (kernel.when is not None or kernel.rest or kernel.reads & kernel.writes):
        yield "what is stored once, in a kernel that may not run, or that reads what it writes"
    if kernel.when is not None and (not isinstance(kernel.anchor, Product | None) or kernel.team is not None):
        yield "a convolution, or rows that blocks share, in a kernel that may not run"
    if kernel.overflow_flag is not None:
        if (
            kernel.overflow_flag.condition.dtype is not DType.BOOL
            or kernel.anchor is not None
            or not kernel.is_pointwise
        ):
            yield "an alarm that is no condition per element"
        yield from expr_faults(program, kernel.overflow_flag.condition, frozenset(kernel.rows), {})
    for store in kernel.once:
        yield from store_faults(program, store, frozenset(), {})
    if kernel.row_stores and not kernel.reduction_loops:
        yield "row stores in a pointwise kernel"
    partial = kernel.partials.stores if kernel.partials else ()
    alike, others = kernel.stores, partial
    if not kernel.is_pointwise:
        alike, others = kernel.row_stores, (*kernel.stores, *partial)
    # What is stored at each element, or for each row, may go to several places of a buffer.
    several = (kernel.anchor is None or not kernel.is_pointwise) and _are_apart(alike)
    alone = len({store.buffer for store in alike}) if several else len(alike)
    if alone + len(others) + len(kernel.once) != len(kernel.writes):
        yield "two stores to one buffer"
    if len({reduction.name for reduction in kernel.reductions}) != len(kernel.reductions):
        yield "two reductions share a name"
    if kernel.scans:
        yield from _scan_faults(kernel)
    if kernel.team is not None:
        yield from _team_faults(program, kernel, kernel.team)
    rows, everything = frozenset(kernel.rows), frozenset((*kernel.rows, *kernel.cols))
    known: dict[str, int] = {}  # parts of each result that later expressions may use; see `expr_faults`
    if kernel.anchor is not None:
        yield from _anchor_faults(program, kernel, kernel.anchor)
        known[kernel.anchor.name] = 1
    for reduction_loop in kernel.reduction_loops:
        for reduction in reduction_loop:
            if len(reduction.values) != reduction.op.arity:
                yield f"{reduction.name} takes {reduction.op.arity} values, has {len(reduction.values)}"
            for value in reduction.values:
                yield from expr_faults(program, value, everything, known, everywhere=not kernel.within)
        known.update({each.name: -each.op.parts if each.running else each.op.kept for each in reduction_loop})
    if kernel.partials is not None:
        yield from _partial_faults(program, kernel, kernel.partials, known)
    for store in kernel.row_stores:
        yield from store_faults(program, store, rows, known, everywhere=not kernel.within)
    for store in kernel.stores:
        yield from store_faults(program, store, everything, known, everywhere=not kernel.within)
    if kernel.within and (not isinstance(kernel.anchor, Product) or kernel.anchor.pieces > 1):
        yield "points that do not exist, in a kernel without whole sums of a product"
    if any(not bound.index.axes <= rows for bound in kernel.within):
        yield "points that do not exist for what is no row"


def _are_apart(stores: Sequence[Store]) -> bool:
    """Whether stores to one buffer are so many elements apart, at each point alike."""
    places = {(store.buffer, store.index) for store in stores}
    terms = {(store.buffer, store.index.terms) for store in stores}
    return len(places) == len(stores) and len(terms) == len({store.buffer for store in stores})


def _scan_faults(kernel: Kernel) -> Iterator[str]:
    *before, last = kernel.reduction_loops
    if len(last) > 1 or any(reduction.running for reduction_loop in before for reduction in reduction_loop):
        yield "a running reduction beside others of its sweep, or before others"
    if len(kernel.cols) > 1 or kernel.col_count == 1:
        yield "a running reduction over several axes, or one of one point"
    if kernel.team is not None or kernel.anchor is not None:
        yield "a running reduction of rows that blocks share, or of an anchor's result"
    own = tuple(axis_index(axis) for axis in kernel.cols)
    if any(isinstance(node, Prefix) and (node.index,) != own for node in kernel.nodes):
        yield "a running reduction used at another column"
    if any(reduction.op in (ReduceOp.MOMENTS, ReduceOp.MERGE_MOMENTS) for reduction in last):
        yield "running moments"


def _anchor_faults(program: Program, kernel: Kernel, anchor: Anchor) -> Iterator[str]:
    if isinstance(anchor, Product):
        yield from _product_faults(program, kernel, anchor)
        return
    if len(kernel.cols) > 1 or len(kernel.rows) + len(kernel.cols) != len(anchor.stride) + 2:
        yield f"axes of {anchor.name} that are not sample, channel and {len(anchor.stride)} spatial axes"
    if anchor.column not in (1, len(anchor.stride) + 1):
        yield f"columns of {anchor.name} that are neither channels nor the last axis"
    for name in (anchor.source, anchor.weight):
        buffer = find_buffer(program, name)
        if buffer is None or len(buffer.shape) != len(anchor.stride) + 2:
            yield f"{anchor.name} of {name}, which is no buffer with {len(anchor.stride)} spatial axes"
    if anchor.groups > 1:
        yield from _group_faults(program, kernel, anchor)
    if anchor.halves is not None:
        yield from _halves_faults(program, anchor, anchor.halves)
    if anchor.pooled is not None:
        yield from _pooling_faults(program, anchor, anchor.pooled)
    packed, weight = (find_buffer(program, name) for name in (anchor.packed or "", anchor.weight))
    if anchor.packed is None or weight is None:
        return
    if packed is None or packed.shape != anchor.packed_shape(weight.shape):
        yield f"{anchor.name} takes its weights from {anchor.packed}, which does not have them in slices"


def _group_faults(program: Program, kernel: Kernel, anchor: Convolution) -> Iterator[str]:
    source, weight = find_buffer(program, anchor.source), find_buffer(program, anchor.weight)
    if source is None or weight is None:
        return
    _, ins = anchor.group_channels(weight.shape)
    if weight.shape[0] % anchor.groups or source.shape[1] != anchor.groups * ins:
        yield f"{anchor.name} has {anchor.groups} groups of {ins} channels, {anchor.source} {source.shape[1]} channels"
    if (kernel.cols and anchor.column == 1) or anchor.halves is not None:
        yield f"{anchor.name} in groups, reduced over channels or of scaled halves"


def _halves_faults(program: Program, anchor: Convolution, halves: ScaledHalves | ScaledWeights) -> Iterator[str]:
    source, weight = program.buffer(anchor.source), program.buffer(anchor.weight)
    samples, outs = source.shape[0], weight.shape[int(anchor.transposed)]
    each = halves_of_place(source.shape[1], anchor.parts)
    half = source.dtype if source.dtype.is_half else DType.F16
    if source.dtype.is_half and (isinstance(halves, ScaledWeights) or halves.scales):
        yield f"{anchor.name} scales halves"
    wanted = [(halves.weight, half, (outs, *weight.shape[2:], *each))]
    if isinstance(halves, ScaledWeights):
        wanted += [(halves.channels, DType.F32, source.shape[1:2]), (halves.outs, DType.F32, (outs,))]
    else:
        wanted += [(halves.source, half, (samples, *source.shape[2:], *each))]
        wanted += [(name, DType.F32, (samples, outs)) for name in halves.scales]
    for name, dtype, shape in wanted:
        buffer = find_buffer(program, name)
        if buffer is None or (buffer.dtype, buffer.shape, buffer.strides) != (dtype, shape, contiguous_strides(shape)):
            yield f"{anchor.name} reads {name}, which does not have {dtype} as {shape}"


def _pooling_faults(program: Program, anchor: Convolution, pooled: Pooling) -> Iterator[str]:
    if not anchor.transposed:
        yield f"{anchor.name} pools phases, which only a transposed convolution has"
    if anchor.packed is not None or anchor.halves is not None:
        yield f"{anchor.name} pools products of packed operands"
    outs = program.buffer(anchor.weight).shape[1] * anchor.groups
    bias = None if pooled.bias is None else find_buffer(program, pooled.bias)
    if pooled.bias is not None and (
        bias is None or (bias.dtype, bias.shape, bias.strides) != (DType.F32, (outs,), (1,))
    ):
        yield f"{anchor.name} adds {pooled.bias}, which is not a number for each channel"


def _partial_faults(program: Program, kernel: Kernel, partials: Partials, known: dict[str, int]) -> Iterator[str]:
    if kernel.reduction_loops:
        yield from _partial_faults_of_rows(program, kernel, partials, known)
        return
    has_windows = any(isinstance(node, Window) for node in kernel.nodes)
    if not (kernel.anchor or has_windows) or kernel.cols or partials.over or not partials.reductions:
        yield "partial results of a kernel that has neither an anchor nor windows per element, or of nothing"
        return
    if kernel.anchor is None and not partials.per_sample:
        yield "partial results of windows over several samples"
    if isinstance(kernel.anchor, Product) and (kernel.anchor.pieces > 1 or not partials.per_sample):
        yield "partial results of parts of sums, or of several matrices"
    sample, channel = kernel.lines
    for reduction in partials.reductions:
        if reduction.op.arity != 1 or reduction.values != (partials.value,) or partials.value.dtype is not DType.F32:
            yield f"{reduction.name} is not of the one float32 value that is reduced over positions"
    yield from expr_faults(program, partials.value, frozenset(kernel.rows), known, everywhere=not kernel.within)
    yield from _partial_store_faults(program, partials, (channel, *((sample,) if partials.per_sample else ())))


def _partial_faults_of_rows(
    program: Program, kernel: Kernel, partials: Partials, known: dict[str, int]
) -> Iterator[str]:
    shared = kernel.anchor is not None or kernel.team is not None or kernel.scans
    if shared or not partials.reductions or not 0 < partials.over <= len(kernel.rows):
        yield "partial results over no rows, of nothing, or of rows that blocks share, or that are scanned"
        return
    samples = kernel.rows[: len(kernel.rows) - partials.over]
    if partials.per_sample is not bool(samples):
        yield "partial results of each sample without samples, or of all samples with some"
    for reduction in partials.reductions:
        if reduction.op.arity != 1 or reduction.op.finds_place:
            yield f"{reduction.name} is not of one value, or gives a position"
        if reduction.name in known:
            yield f"{reduction.name} is reduced along rows and over them"
    for value in partials.values:
        yield from expr_faults(program, value, frozenset((*kernel.rows, *kernel.cols)), known)
    yield from _partial_store_faults(program, partials, (*samples, *kernel.cols))


def _partial_store_faults(program: Program, partials: Partials, axes: Sequence[Axis]) -> Iterator[str]:
    results = {reduction.name: reduction.op.kept for reduction in partials.reductions}
    for store in partials.stores:
        yield from store_faults(program, store, frozenset((partials.pieces, *axes)), results)
        if not isinstance(store.value, ReductionResult):
            yield f"store to {store.buffer} of more than a partial result"


def _team_faults(program: Program, kernel: Kernel, team: Team) -> Iterator[str]:
    if team.members < 2 or team.teams < 1 or not kernel.reduction_loops:
        yield f"{team.teams} teams of {team.members} blocks, which have nothing to share"
    if team.strip > 1 and len(kernel.reduction_loops) > 1:
        yield f"strips of {team.strip} rows, swept more than once"
    buffer = find_buffer(program, team.exchange)
    needed = exchange_offsets(kernel, team.members, team.teams, team.strip)[""]
    if buffer is None or buffer.role is not Role.TEMP or buffer.nbytes < needed:
        yield f"{team.exchange} is no temporary of {needed} bytes"
    if any(team.exchange in other.reads | other.writes for other in program.kernels):
        yield f"{team.exchange} is a team's and has a reader or writer"


def _product_faults(program: Program, kernel: Kernel, product: Product) -> Iterator[str]:
    if len(kernel.rows) != 4 or kernel.rows[0].size != product.pieces or len(kernel.cols) > 1:
        yield f"rows of {product.name} that are not {product.pieces} pieces, batch, row and column"
        return
    sizes = kernel.matrix
    if kernel.cols and (product.pieces > 1 or (product.apart and kernel.rows[2].size % product.apart)):
        yield f"columns of {product.name} that are not rows {product.apart} apart, or of sums in pieces"
    if product.runs and (product.right.row, product.right.inner) != (PLACE, product.runs.inner):
        yield f"columns of {product.right.buffer} that are no neighbours"
    if product.fills and product.filling is None:
        yield f"{product.name} makes its right operand of nothing"
    if product.filling is not None:
        yield from _filling_faults(program, kernel, product, product.filling)
    for operand, rows in ((product.left, sizes[2]), (product.right, sizes[3])):
        buffer = find_buffer(program, operand.buffer)
        counts = ((rows, operand.row), (product.inner, operand.inner))
        if buffer is None or buffer.dtype is not product.dtype:
            yield f"{product.name} of {operand.buffer}, which is no buffer of {product.dtype}"
        elif any(prod(size for size, _ in parts_of(stride, count)) != count for count, stride in counts):
            yield f"{operand.buffer} does not have {rows} rows of {product.inner} numbers for {product.name}"
        elif operand.extent(sizes[1], rows, product.inner) > buffer.extent and 0 not in (*sizes, product.inner):
            yield f"{product.name} reads {operand.buffer} out of range"


def _filling_faults(program: Program, kernel: Kernel, product: Product, filling: Filling) -> Iterator[str]:
    source = find_buffer(program, filling.source)
    if source is None or source.dtype is not DType.F32 or product.dtype is not DType.F16:
        yield f"{product.name} makes halves of {filling.source}, which is no buffer of float32"
        return
    samples, channels, *image = source.shape
    wanted = [(size for size, _, _ in filling.image), contiguous_strides(image), (filling.sample, filling.channel)]
    if [tuple(each) for each in wanted] != [tuple(image), source.strides[2:], source.strides[:2]]:
        yield f"{product.name} takes images of {filling.source} that do not lie there"
    runs = product.runs
    if runs is None or runs.planes * PLACE != channels or runs.plane != prod(size for *_, size in filling.image):
        yield f"{product.name} makes places of {filling.source} that its runs do not have"
    if kernel.matrix[1] != samples:
        yield f"{product.name} has {kernel.matrix[1]} matrices, {filling.source} {samples} samples"
    for name, count in zip(filling.factors, (samples, channels), strict=True):
        factors = find_buffer(program, name)
        if factors is None or (factors.dtype, factors.shape, factors.strides) != (DType.F32, (count,), (1,)):
            yield f"{product.name} multiplies {filling.source} with {name}, which is not {count} numbers"
