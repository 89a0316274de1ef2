"""The kernel that takes the place of a library convolution or product, with what reads its result as its epilogue."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.along import reduced_along
from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Gather, Load, Window
from fusepass.codegen.ir.index import Axis, Index, axis_index, linear
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Anchor, Buffer, Kernel, LibraryCall, Program, Role, Store
from fusepass.codegen.passes.alignment import dimensions_of, with_whole_dimensions
from fusepass.codegen.passes.depthwise import Depthwise, depthwise_value
from fusepass.codegen.passes.few_results import FewResults, few_results_value
from fusepass.codegen.passes.fuse_into_producer import fuse_into_producer
from fusepass.codegen.passes.halved_kernel import Halved
from fusepass.codegen.passes.plain_product import PlainProduct
from fusepass.codegen.passes.products import product_rows, product_value
from fusepass.codegen.passes.rewrite import rewrite_kernel

AnyAnchor = Anchor | Depthwise | FewResults | Halved | PlainProduct
CHANNELS = 1  # their dimension


def anchored(
    program: Program, builder: Builder, call: LibraryCall, anchor: AnyAnchor, over: int | None
) -> Program | None:
    """`program` with the kernel that replaces `call` in the first place, and what reduces over that dimension of its result in it.

    None where nothing reduces over it. What is reduced along the last axis may be read by others, too: then it is stored.
    """
    result = program.buffer(call.result)
    calls = tuple(other for other in program.calls if other is not call)
    role = Role.OUTPUT if result.name in program.outputs else Role.TEMP
    stored = tuple(replace(buffer, role=role) if buffer is result else buffer for buffer in program.buffers)
    readers = [kernel for kernel in program.kernels if result.name in kernel.reads]
    alone = len(readers) == 1 and result.name not in program.outputs
    for reader in readers if alone or over not in (CHANNELS, None) else ():
        absorbed = _absorbed(program, reader, builder, call, anchor, over, keep=not alone)
        if absorbed is None and isinstance(anchor, Depthwise) and alone:
            absorbed = _absorbed_in_parts(reader, builder, call, anchor, result)
        # Nothing that the epilogue reads is written by a kernel before it, or it could not come first.
        written = frozenset[str]().union(*(kernel.writes for kernel in program.kernels))
        if absorbed is not None and not absorbed.reads & written:
            rest = tuple(kernel for kernel in program.kernels if kernel is not reader)
            buffers = tuple(buffer for buffer in program.buffers if buffer is not result) if alone else stored
            return replace(program, calls=calls, kernels=(absorbed, *rest), buffers=buffers)
    if over is not None:
        return None
    axes = tuple(Axis(f"d{number}", size) for number, size in enumerate(result.shape))
    value = _value(program, builder, call, anchor, axes)
    store = Store(result.name, linear([axis_index(axis) for axis in axes], result.strides), value)
    rows, origin = _rows(anchor, axes), (operator_of(call),)
    kernel = Kernel(f"{result.name}_kernel", rows, (), (), (), (store,), origin, in_kernel(anchor))
    made = replace(program, calls=calls, kernels=(kernel, *program.kernels), buffers=stored)
    return made if isinstance(anchor, Product | Depthwise | FewResults) else fuse_into_producer(made, builder)


def _absorbed_in_parts(
    reader: Kernel, builder: Builder, call: LibraryCall, anchor: Depthwise, result: Buffer
) -> Kernel | None:
    """`reader` with windows in place of what it reads of `result`: parts of it, such as all but its end, or both halves of its channels.

    None where that would compute an element more than once, or where it lies is no affine function of the reader's axes.
    """
    if not reader.is_pointwise or any(isinstance(node, Window | Gather) for node in reader.nodes):
        return None
    loads = [load for load in reader.loads() if load.buffer == result.name]
    parts = {load.index: _place(load.index, result) for load in loads}
    if any(place is None for place in parts.values()) or len(parts) * reader.row_count > result.numel:
        return None
    values = {index: depthwise_value(builder, anchor, result, place) for index, place in parts.items() if place}

    def leaf(node: Expr) -> Expr | None:
        return values[node.index] if isinstance(node, Load) and node.buffer == result.name else None

    return replace(rewrite_kernel(reader, builder, leaf=leaf), origin=(operator_of(call), *reader.origin))


def _place(index: Index, result: Buffer) -> tuple[Index, ...] | None:
    """The position along each dimension of `result` of the element at `index`; None where that is no affine function of axes."""
    place = [Index()] * len(result.shape)
    for number in sorted(range(len(place)), key=lambda number: -result.strides[number]):
        if result.shape[number] > 1:
            place[number], index = index // result.strides[number], index % result.strides[number]
    affine = all(isinstance(atom, Axis) for each in place for atom, _ in each.terms)
    return tuple(place) if affine and index == Index() else None


def _value(program: Program, builder: Builder, call: LibraryCall, anchor: AnyAnchor, axes: tuple[Axis, ...]) -> Expr:
    """The element of the result of `call` at `axes`, its dimensions."""
    if isinstance(anchor, Product):
        return product_value(program, builder, call, anchor, axes)
    if isinstance(anchor, Depthwise):
        return depthwise_value(builder, anchor, program.buffer(call.result), [axis_index(axis) for axis in axes])
    if isinstance(anchor, FewResults):
        return few_results_value(builder, anchor, program.buffer(call.result), axes)
    if isinstance(anchor, Halved):
        return anchor.value(builder, axes)
    if isinstance(anchor, PlainProduct):
        return anchor.value(builder)
    return builder.cast(builder.reduction_result(anchor.name, 0, DType.F32), program.buffer(call.result).dtype)


def _rows(anchor: AnyAnchor, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The rows of a kernel with `anchor` whose result has the dimensions `axes`."""
    return product_rows(axes) if isinstance(anchor, Product) else axes


def in_kernel(anchor: AnyAnchor) -> Anchor | None:
    """What a kernel says of the anchor: nothing where it is part of the expressions."""
    if isinstance(anchor, Depthwise | FewResults):
        return None
    return anchor.anchor if isinstance(anchor, Halved | PlainProduct) else anchor


def operator_of(call: LibraryCall) -> str:
    """The ATen operator's name without its namespace and overload."""
    return call.target.split(".")[1]


def _absorbed(
    program: Program,
    reader: Kernel,
    builder: Builder,
    call: LibraryCall,
    anchor: AnyAnchor,
    over: int | None,
    *,
    keep: bool = False,
) -> Kernel | None:
    """`reader` as the epilogue of `call`, if it takes each element of its result once, at its own point.

    It must reduce `over` that dimension of a convolution and nothing else, or not at all. With `keep` the result is stored as well.
    """
    result = program.buffer(call.result)
    if reader.is_pointwise is (over is not None) or reader.anchor is not None:
        return None
    if any(isinstance(node, Window | Gather) for node in reader.nodes):
        return None
    reader = with_whole_dimensions(reader, builder, result)
    loads = [load for load in reader.loads() if load.buffer == result.name]
    axes = dimensions_of(reader, loads[0], result)
    if axes is None or any(load.index != loads[0].index for load in loads):
        return None
    rows, cols = _rows(anchor, axes), tuple[Axis, ...]()
    if over is not None:
        rows, cols = (*axes[:over], *axes[over + 1 :]), (axes[over],)
        if not isinstance(anchor, Convolution | Halved) or [axis for axis in reader.cols if axis.size != 1] != [*cols]:
            return None
        if isinstance(anchor, Convolution):
            anchor = replace(anchor, column=over)
    value = _value(program, builder, call, anchor, axes)

    def leaf(node: Expr) -> Expr | None:
        return value if isinstance(node, Load) and node.buffer == result.name else None

    rewritten = rewrite_kernel(reader, builder, leaf=leaf)
    origin = (operator_of(call), *reader.origin)
    stores = (*rewritten.stores, *([Store(result.name, loads[0].index, value)] if keep else []))
    made = replace(rewritten, rows=rows, cols=cols, stores=stores, anchor=in_kernel(anchor), origin=origin)
    return made if over in (CHANNELS, None) or reduced_along(made, axes) is not None else None
