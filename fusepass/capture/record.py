"""Traces a model by running it once for real and writing down the ATen operators: nothing to import, exact layouts.

Buffers are clones and random numbers come from generators of its own, so the run leaves no trace. What this recorder does not
know how to make functional (writes to inputs, to parameters, or to memory shared in other ways than by slices) it declines; AOTAutograd,
which takes seconds to import, then traces the model instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from fusepass.capture.escapes import Declined
from fusepass.capture.functional import functional_form, memory_order, with_defaults
from fusepass.capture.own_draws import drawn
from fusepass.capture.recurrent import RECURRENT
from fusepass.codegen.lowering.tracer import Spec, Tracer
from fusepass.measure import extent
from fusepass.patterns.aliasing import BATCH_NORMS, is_view
from fusepass.patterns.effects import waits_for_host

aten = torch.ops.aten

View = tuple[OpOverload, tuple[Any, ...]]
"""An operator that gives a view of its first argument, and its other arguments."""

_PUT_BACK: Mapping[OpOverload, OpOverload] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
"""Operators that give a part of a tensor, and those that give the tensor with another such part."""


class Recorder(Tracer):
    """Records a functional graph of a real run.

    Args:
        model: names the modules that operators come from.

    Attributes:
        branches: what forward asked of tensors of one bool, in order: the node, and its value in this run.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(decompose=_composite, describe=Spec.of)
        self._paths = {id(module): (path, type(module)) for path, module in model.named_modules()}
        self._sharing: dict[int, WeakIdKeyDictionary] = {}
        self._fixed: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._views: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.branches: list[tuple[fx.Node, bool]] = []
        self._caller: FrameType | None = None

    def __enter__(self) -> Any:
        self._caller = sys._getframe(1)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        self._caller = None
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def fix(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, fx.Node]:
        """A placeholder that forward may not write, and the tensor for it: `tensor`, or an alias where that has one."""
        if self._nodes.get(tensor) is not None:
            tensor = tensor.detach()
        self._fixed[tensor] = True
        return tensor, self.placeholder(name, tensor)

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        super().bind(tensor, node)
        self._relatives(tensor)[tensor] = True

    def foreign(self, tensor: torch.Tensor) -> fx.Node:
        raise Declined("forward uses a tensor that is neither an input nor an attribute of a module")

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():  # what this class does is not what forward does
            return self._run(func, args, kwargs)

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tags = func.tags
        if func is aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            self.branches.append((self.node_of(args[0]), func(*args)))
            return self.branches[-1][1]
        if func.namespace == "profiler":  # what a profiler is told changes no result
            return func(*args, **kwargs)
        if waits_for_host(func, pytree.tree_leaves(args)):
            raise Declined(f"forward depends on the values of a tensor ({func})")
        if func is aten.lift_fresh.default:
            return self._constant(args[0])
        if func in BATCH_NORMS:
            return self._batch_norm(func, args)
        if func is aten.as_strided_.default:
            return self._channels_last(args)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in tags:
            result = drawn(func, args, kwargs, _cuda_devices(args, kwargs))
            self.record(func, args, kwargs, result)
            return result
        return super().run(func, args, kwargs)

    def record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> fx.Node:
        node = super().record(func, args, kwargs, result)
        node.meta |= self._origin()
        if is_view(func) and isinstance(result, torch.Tensor) and result is not args[0] and not kwargs:
            whole, views = self._viewed(args[0])
            self._views[result] = TensorWeakRef(whole), (*views, (func, args[1:]))
        return node

    def _viewed(self, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[View, ...]]:
        """The tensor that `tensor` is a view of, and by which operators; itself where it is none, or nobody has that tensor any more."""
        reference, views = self._views.get(tensor, (lambda: None, ()))
        whole = reference()
        return (tensor, ()) if whole is None else (whole, views)

    def _relatives(self, tensor: torch.Tensor) -> WeakIdKeyDictionary:
        """Every known tensor that lives in the storage of `tensor`."""
        return self._sharing.setdefault(tensor.untyped_storage()._cdata, WeakIdKeyDictionary())

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that forward makes of numbers: the same in every call."""
        if not tensor.untyped_storage().resizable():
            raise Declined("forward uses the memory of a NumPy array")
        self._fixed[tensor] = True
        super().foreign(tensor)
        self.record(aten.lift_fresh_copy.default, (tensor,), {}, tensor)
        return tensor

    def _batch_norm(self, func: OpOverload, args: tuple[Any, ...]) -> Any:
        """Batch norm with the running statistics as results, whichever library computes it: cuDNN's has one result more."""
        x, weight, bias, mean, var, training, momentum, eps = args
        if training:
            for statistic in (mean, var):
                if statistic is not None:  # the operator writes it, though its schema does not say so
                    self._check_writable(func, statistic)
        result = func(*args)
        normalised = tuple(result[:3])
        if not training:
            self.record(
                aten._native_batch_norm_legit_no_training.default,
                (x, weight, bias, mean, var, momentum, eps),
                {},
                normalised,
            )
            return result
        if mean is None:
            self.record(aten._native_batch_norm_legit.no_stats, (x, weight, bias, True, momentum, eps), {}, normalised)
            return result
        functional = aten._native_batch_norm_legit_functional.default
        self.record(functional, (x, weight, bias, mean, var, True, momentum, eps), {}, (*normalised, mean, var))
        return result

    def _channels_last(self, args: tuple[Any, ...]) -> Any:
        """A pool with one result a channel calls it channels last, as its input is: dimensions of size 1 get other strides."""
        target, shape, strides, *_ = args
        self._check_writable(aten.as_strided_.default, target)
        last = (0, *range(2, target.dim()), 1)
        behind = [target.shape[dim] for dim in last]
        back = [last.index(dim) for dim in range(len(last))]
        if target.dim() < 3 or not target.is_contiguous() or target.shape != torch.Size(shape):
            raise Declined("forward changes the strides of a tensor")
        viewed = target.view(behind)
        moved = viewed.permute(back)
        if moved.stride() != tuple(strides):
            raise Declined("forward changes the strides of a tensor")
        self.record(aten.view.default, (target, behind), {}, viewed)
        node = self.record(aten.permute.default, (viewed, back), {}, moved)
        result = aten.as_strided_.default(*args)
        self.bind(target, node)
        return result

    def _write(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An in-place operator, recorded as the functional one whose result replaces the tensor's value."""
        functional = functional_form(func)
        target = args[0] if args else None
        if functional is None or not isinstance(target, torch.Tensor):
            raise Declined(f"{func} has no functional form that is known here")
        draws = torch.Tag.nondeterministic_seeded in func.tags
        in_parts = len(self._relatives(target)) > 1 and not draws
        self._check_writable(func, target, in_parts=in_parts)
        args = with_defaults(func, args)
        others = [
            leaf for leaf in pytree.tree_leaves((args[1:], kwargs)) if isinstance(leaf, torch.Tensor | float | int)
        ]
        converts = func is not aten.copy_.default and any(
            torch.result_type(target, other) is not target.dtype for other in others
        )
        if converts or not _is_dense(self._viewed(target)[0] if in_parts else target):
            raise Declined(f"{func} converts what it writes, or leaves gaps")
        if in_parts:
            return self._write_part(func, functional, args, kwargs)
        if draws:
            result = drawn(func, args, kwargs, _cuda_devices(args, kwargs))
        else:
            result = func(*args, **kwargs)
        if func is aten.bernoulli_.float and not target.is_contiguous():
            self._bernoulli(target, args[1:], kwargs)
        else:
            self.record(functional, args, kwargs, target)
        return result

    def _write_part(
        self, func: OpOverload, functional: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """An in-place operator on a tensor that others share memory with: its result is put into the whole, of which the others are taken anew."""
        target: torch.Tensor = args[0]
        whole, views = self._viewed(target)
        others = [each for each in self._relatives(target) if each is not whole]
        part = functional(*args, **kwargs)
        self.record(functional, args, kwargs, part)
        around = [whole]
        for each in views[:-1]:
            around.append(self._taken(around[-1], each))
        func(*args, **kwargs)
        for place, (view, rest) in zip(reversed(around), reversed(views), strict=False):
            put_back = _PUT_BACK[view]
            made = place if place is whole else put_back(place, part, *rest)
            self.record(put_back, (place, part, *rest), {}, made)
            part = made
        if not views:
            self.bind(whole, self.node_of(part))
        for other in others:
            taken = whole
            for each in self._viewed(other)[1]:
                taken = self._taken(taken, each)
            self.bind(other, self.node_of(taken))
        return target

    def _taken(self, tensor: torch.Tensor, view: View) -> torch.Tensor:
        operator, rest = view
        taken: torch.Tensor = operator(tensor, *rest)
        self.record(operator, (tensor, *rest), {}, taken)
        return taken

    def _bernoulli(self, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Draws in the order of `target`'s memory, as eager does; the functional form would in the order of its dimensions."""
        order, back = memory_order(target)
        viewed, drawn = target.permute(order), target.permute(order)
        if not viewed.is_contiguous():
            raise Declined("random numbers for strides of a dimension of size 1")
        self.record(aten.permute.default, (target, order), {}, viewed)
        self.record(aten.bernoulli.p, (viewed, *args), kwargs, drawn)
        self.record(aten.permute.default, (drawn, back), {}, target)

    def _check_writable(self, func: OpOverload, target: torch.Tensor, *, in_parts: bool = False) -> None:
        """Decline a write to what may not be written, or what is shared; `in_parts` it may be, by views of one tensor that a part can be put back into."""
        whole, views = self._viewed(target) if in_parts else (target, ())
        others = [other for other in self._relatives(target) if other is not whole]
        apart = any(self._viewed(other)[0] is not whole for other in others) if in_parts else bool(others)
        lost = any(view not in _PUT_BACK for view, _ in views)
        if whole in self._fixed or self._nodes.get(whole) is None or apart or lost:
            raise Declined(f"{func} writes to an input, a parameter or shared memory")

    def _origin(self) -> dict[str, Any]:
        """Where forward called the running operator, in the form that torch's tracers use."""
        frames: list[str] = []
        modules: dict[str, tuple[str, type]] = {}
        for frame in _frames(sys._getframe(2), self._caller):
            found = self._paths.get(id(frame.f_locals.get("self")))
            if found is not None:
                modules.setdefault(found[0], found)
                code = frame.f_code
                frames.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n')
        return {"stack_trace": "".join(reversed(frames)), "nn_module_stack": dict(reversed(modules.items()))}


def _frames(frame: FrameType | None, outside: FrameType | None) -> Iterator[FrameType]:
    """`frame` and its callers within `outside`, innermost first.

    Who looks at the local variables of a frame makes it keep what they are, until it is left: models and batches of a
    program's main loop would stay in memory.
    """
    while frame is not None and frame is not outside:
        yield frame
        frame = frame.f_back


def _composite(func: OpOverload) -> Any | None:
    """What `func` is made of, if it has no kernels of its own: under inference mode nothing else takes it apart.

    PyTorch's Python takes some operators apart that have kernels, such as nearest upsampling, and then gets other strides.
    """
    if func in RECURRENT.values():
        return None
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return func.decompose if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite) else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether every element between the first and the last belongs to `tensor`, once."""
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)  # type: ignore[no-any-return]


def _cuda_devices(args: Any, kwargs: Mapping[str, Any]) -> list[int]:
    """The CUDA devices that a call may draw random numbers on."""
    devices = {leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    devices |= {torch.device(leaf) for leaf in (kwargs.get("device"),) if leaf is not None}
    current = torch.cuda.current_device if torch.cuda.is_available() else lambda: 0
    return sorted({current() if d.index is None else d.index for d in devices if d.type == "cuda"})


def cuda_devices(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The CUDA devices of `tensors`, by number."""
    return sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})


def cloned(states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`states` with copies of those that forward may write: all but parameters."""
    return [state if isinstance(state, nn.Parameter) else copy_of(state) for state in states]


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of `tensor`, which a clone lacks where elements overlap or have gaps between them."""
    tensor = tensor.detach()
    copy = tensor.clone()
    if copy.stride() == tensor.stride():
        return copy
    memory = tensor.as_strided((extent(tensor),), (1,)).clone().untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory, 0, tensor.shape, tensor.stride())
