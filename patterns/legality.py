"""Which operators may not fuse, and why.

A check returns a reason, or None where it has no objection. `NODE_CHECKS` look at one operator, `TENSOR_CHECKS` at each
tensor that it reads or that is used of what it makes. Checks of regions are in `fusepass.patterns.region_legality`.

Aliasing needs no check: a view is never a region's output. Inside a region it is recomputed for free, and where it is
also needed outside it stays an ATen view of the region's output or input, so every alias the caller can see is real.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusepass.codegen.lowering.anchors import asks_for_weight
from fusepass.codegen.lowering.gathers import SCATTERS, meet_alone
from fusepass.codegen.lowering.resampling import NEAREST, nearest_slopes
from fusepass.codegen.lowering.tensor import DTYPES
from fusepass.patterns.aliasing import updates_statistics
from fusepass.patterns.arguments import arguments
from fusepass.patterns.effects import is_constant_number, is_random, waits_for_host, writes

aten = torch.ops.aten

PACKED = "packed"
"""In ``meta`` of a node: the call of the library that computes it (`fusepass.patterns.packing`)."""

DEVICES = ("cpu", "cuda")
"""Device types that code is generated for."""


@dataclass(frozen=True)
class Refusal:
    """Why an operator does not fuse.

    Attributes:
        reason: in words.
        node: the node's name in the captured graph.
        target: the ATen operator, such as ``"aten.rand_like"``.
    """

    reason: str
    node: str
    target: str


def node_refusal(node: fx.Node) -> Refusal | None:
    """Why `node` may be in no region at all, if so."""
    if not isinstance(node.target, OpOverload):
        return Refusal("not an ATen operator", node.name, str(node.target))
    reason = next((reason for check in NODE_CHECKS if (reason := check(node)) is not None), None)
    reason = reason or next(
        (reason for tensor in tensors(node) for check in TENSOR_CHECKS if (reason := check(tensor)) is not None), None
    )
    return None if reason is None else Refusal(reason, node.name, str(node.target.overloadpacket))


def tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors that `node` reads and those among its results that are used."""
    for source in node.all_input_nodes:
        if isinstance(value := source.meta.get("val"), torch.Tensor):
            yield value
    yield from _results(node)


def _results(node: fx.Node) -> Iterator[torch.Tensor]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        used = (value[user.args[1]] for user in node.users if user.target is operator.getitem and user.users)  # type: ignore[index]
        yield from (each for each in used if isinstance(each, torch.Tensor))


def no_write(node: fx.Node) -> str | None:
    return "writes to its argument" if writes(node.target) or updates_statistics(node) else None


def no_random_numbers(node: fx.Node) -> str | None:
    return "draws random numbers" if is_random(node.target) else None


def no_host_synchronisation(node: fx.Node) -> str | None:
    return "its result, or the size of it, is needed on the host" if waits_for_host(node.target, _read(node)) else None


def _read(node: fx.Node) -> Iterator[object]:
    """What all arguments of `node` look like: an index may be the very tensor that it is looked up in."""
    for argument in pytree.tree_leaves(node.args):
        if isinstance(argument, fx.Node):
            yield argument.meta.get("val")


_BEYOND = {
    "a sort: elements change places by their values": ("sort topk kthvalue median nanmedian mode msort argsort"),
    "a search in sorted values": "searchsorted bucketize",
    "a sum of products, in an order of its own": "_trilinear",
    "attention, which the library does in one kernel": (
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
    ),
    "a recurrent layer, which the library does in one call": (
        "gru lstm rnn_tanh rnn_relu mkldnn_rnn_layer _cudnn_rnn miopen_rnn"
    ),
    "a scatter: several elements may meet in one place": (
        "scatter scatter_add scatter_reduce index_put index_add index_copy index_fill index_reduce put masked_scatter "
        "embedding_dense_backward max_unpool2d max_unpool3d"
    ),
    "solves or factorises matrices": (
        "_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd linalg_cholesky_ex linalg_eig geqrf "
        "linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lu linalg_lu_factor_ex "
        "linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr linalg_solve_triangular lu_unpack ormqr cholesky "
        "triangular_solve cholesky_solve cholesky_inverse"
    ),
}
"""Kinds of work that no kernel of the IR does, with the operators of each. PyTorch decomposes some into quadratic work."""
_REASONS = {name: reason for reason, names in _BEYOND.items() for name in names.split()}


def within_reach(node: fx.Node) -> str | None:
    if node.target in SCATTERS:
        given = arguments(node)
        if meet_alone(given["self"].meta["val"].shape, given["dim"], given["index"].meta["val"].shape):
            return None
    return _REASONS.get(node.target._schema.name.removeprefix("aten::"))  # type: ignore[union-attr]


_EMPTY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})


def initialised(node: fx.Node) -> str | None:
    """Memory that an operator in no region fills; a region may give what has no values any value."""
    empty = node.target._schema.name.removeprefix("aten::") in _EMPTY  # type: ignore[union-attr]
    filled = any(user.op == "output" or is_random(user.target) or writes(user.target) for user in node.users)
    return "its result has no values yet" if empty and filled else None


_STEPS = {"aten::linspace": (torch.float32, torch.float64), "aten::logspace": (torch.float64,)}
"""Steps from one number to another, and the types whose digits hide that eager rounds them to the type that it gives."""


def steps_as_eager(node: fx.Node) -> str | None:
    """Eager rounds the ends, too, and powers magnify that; PyTorch's Python rounds the result alone."""
    precise = _STEPS.get(node.target._schema.name)  # type: ignore[union-attr]
    if precise is None or all(tensor.dtype in precise for tensor in _results(node)):
        return None
    return "steps that are rounded to a type of few digits, or to whole numbers"


def single_arguments(node: fx.Node) -> str | None:
    known = all(isinstance(source.meta.get("val"), torch.Tensor) for source in node.all_input_nodes)
    return None if known and node.meta.get("val") is not None else "reads or gives something else than tensors"


def one_device(node: fx.Node) -> str | None:
    read = (source.meta.get("val") for source in node.all_input_nodes if not is_constant_number(source))
    devices = {str(value.device) for value in (*read, *_results(node)) if isinstance(value, torch.Tensor)}
    return f"works on {' and '.join(sorted(devices))}" if len(devices) > 1 else None


def no_constant(node: fx.Node) -> str | None:
    number = node.target is aten.lift_fresh_copy.default and is_constant_number(node)
    return "a constant, which kernels take as a number" if number else None


def single_gradient(node: fx.Node) -> str | None:
    together = node.target is aten.convolution_backward.default and not asks_for_weight(node.args[10])  # type: ignore[arg-type]
    return "several gradients of a convolution, which the library computes together" if together else None


def known_neighbours(node: fx.Node) -> str | None:
    if node.target not in NEAREST or any(map(static_shape, tensors(node))):
        return None
    return None if nearest_slopes(node) else "rounding decides which neighbour is the nearest"


def single_results(node: fx.Node) -> str | None:
    together = isinstance(node.meta.get("val"), tuple | list) and any(
        user.target is not operator.getitem for user in node.users
    )
    return "its results are used as a tuple" if together else None


def understood_view(node: fx.Node) -> str | None:
    return "a view of memory beside its input" if node.target is aten.as_strided.default else None


def no_packed(node: fx.Node) -> str | None:
    return (
        "made of parameters once, or a part of a call of the library whose weights are laid out once"
        if PACKED in node.meta
        else None
    )


def static_shape(tensor: torch.Tensor) -> str | None:
    return None if all(isinstance(size, int) for size in tensor.shape) else "a shape is symbolic"


def not_empty(tensor: torch.Tensor) -> str | None:
    return "a tensor is empty" if any(isinstance(size, int) and size == 0 for size in tensor.shape) else None


def dense_layout(tensor: torch.Tensor) -> str | None:
    return None if tensor.layout is torch.strided else f"layout {str(tensor.layout).removeprefix('torch.')}"


def no_lazy_sign(tensor: torch.Tensor) -> str | None:
    return "a tensor is lazily negated or conjugated" if tensor.is_neg() or tensor.is_conj() else None


def supported_dtype(tensor: torch.Tensor) -> str | None:
    known = tensor.dtype in DTYPES
    return None if known else f"element type {str(tensor.dtype).removeprefix('torch.')} has no generated code"


def supported_device(tensor: torch.Tensor) -> str | None:
    known = tensor.device.type in DEVICES
    return None if known else f"device {tensor.device.type} has no generated code"


NODE_CHECKS: tuple[Callable[[fx.Node], str | None], ...] = (
    no_write,
    within_reach,
    no_random_numbers,
    no_host_synchronisation,
    initialised,
    steps_as_eager,
    single_arguments,
    single_results,
    one_device,
    no_constant,
    single_gradient,
    known_neighbours,
    understood_view,
    no_packed,
)
TENSOR_CHECKS: tuple[Callable[[torch.Tensor], str | None], ...] = (
    static_shape,
    not_empty,
    dense_layout,
    no_lazy_sign,
    supported_dtype,
    supported_device,
)
