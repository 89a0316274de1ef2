"""Keeps the forward that is being traced from changing torch's settings, random generators and logs."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fusepass.capture.fast_paths import called_as_in_inference
from fusepass.capture.functional import memory_order
from fusepass.capture.overlaps import Overlaps
from fusepass.capture.patched import unpatched
from fusepass.capture.recurrent import drops_out
from fusepass.codegen.lowering.decompositions import CORRECTED
from fusepass.codegen.lowering.modes import without_modes
from fusepass.errors import CaptureError


class NotBeside(Exception):
    """What a model does while it is captured may only be done by the thread that calls it; says why."""


@contextlib.contextmanager
def untouched_globals() -> Iterator[None]:
    """For a thread beside those that call the model: nothing that they share with it is changed, as it could not be put back.

    Random generators of Python and PyTorch, and setters of the process's settings, raise before they do anything. NumPy's generators
    cannot be watched: who calls the model has to look whether it draws from them.

    Raises:
        NotBeside: forward would change such state, or settings were changed meanwhile, by whomever.
    """
    settings: Any = torch._C._dynamo.guards.GlobalStateGuard()
    grad_mode, before = torch.is_grad_enabled(), sys.getprofile()
    refused: list[str] = []

    def see(frame: object, event: str, called: Any) -> None:
        if event == "c_call":
            what = _shared_state(called)
            if what is not None:
                refused.append(what)
                raise NotBeside(what)

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(before)
        torch.set_grad_enabled(grad_mode)
        if refused:  # forward may have caught it
            raise NotBeside(refused[0])
        if not settings.check():
            raise NotBeside(f"a global setting changed meanwhile: {settings.reason().strip()}")


def _shared_state(called: Any) -> str | None:
    """What threads share that a call of the builtin `called` changes; None where it changes nothing."""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if isinstance(owner, _GENERATORS):
        return None if name.startswith(("get", "initial_seed")) else f"forward uses a random generator ({name})"
    sets = name.startswith(("set_", "_set_", "_unset_")) and not name.startswith(_OF_THREAD)
    if sets and getattr(torch._C, name, None) is called:
        return f"forward changes a setting of the process ({name})"
    return None


_OF_THREAD = (
    "_set_conj", "_set_dispatch_mode", "_set_fwd_grad", "_set_grad", "_set_meta_in_tls", "_set_neg", "_set_only_lift",
    "_set_skip_next", "_set_tensor_metadata", "_set_torch_function", "_set_tracing", "_set_view_replay",
    "_unset_dispatch_mode", "set_autocast",
)  # fmt: skip
"""What setters of PyTorch's begin with that are of one thread, or of one tensor."""


@contextlib.contextmanager
def unchanged_globals() -> Iterator[None]:
    """Put the state of random generators and the grad mode back if tracing changes them.

    Raises:
        CaptureError: it did change them, or another of torch's global settings.
    """
    settings: Any = torch._C._dynamo.guards.GlobalStateGuard()
    grad_mode = torch.is_grad_enabled()
    before = _random_states()
    touched = _Touched()
    try:
        with touched:
            yield
    finally:
        changed_settings = None if settings.check() else settings.reason()
        torch.set_grad_enabled(grad_mode)
        now = _random_states()
        changed = not _same(now[_NUMPY], before[_NUMPY]) or (touched.found and not _same(now, before))
        if changed:
            _set_random_states(before if touched.found else (now[0], before[_NUMPY], now[2]))
    if changed_settings is not None:
        raise CaptureError(f"forward changes a global setting: {changed_settings.strip()}")
    if changed:
        raise CaptureError("forward seeds a random generator or draws from Python's or NumPy's")


class _Touched:
    """Sees, while it is open, whether this thread calls a method of a random generator; NumPy's cannot be seen.

    Attributes:
        found: whether it may have. Where there is no other thread, which could have changed the state of a generator as well, or
            where somebody else watches calls, nothing is watched.
    """

    found = True

    def __enter__(self) -> None:
        self._watches = threading.active_count() > 1 and sys.getprofile() is None
        if self._watches:
            self.found = False
            sys.setprofile(self._see)

    def __exit__(self, *_: object) -> None:
        if self._watches:
            sys.setprofile(None)

    def _see(self, frame: object, event: str, called: Any) -> None:
        if event == "c_call" and isinstance(getattr(called, "__self__", None), _GENERATORS):
            self.found = True


_GENERATORS = (random.Random, torch.Generator)
_NUMPY = 1  # of the states that `_random_states` gives, the one whose generator no profile sees


def _random_states() -> tuple[Any, ...]:
    with without_modes():
        return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def _set_random_states(states: tuple[Any, ...]) -> None:
    python, array, tensor = states
    with without_modes():
        random.setstate(python)
        numpy.random.set_state(array)
        torch.set_rng_state(tensor)


def _same(first: Any, second: Any) -> bool:
    """Whether two states of generators are equal; they hold arrays, whose equality is elementwise."""
    if isinstance(first, tuple):
        if all(isinstance(number, int) for number in first):
            return bool(first == second)
        return all(map(_same, first, second))
    with without_modes():
        return bool(numpy.array_equal(first, second))


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep fake tensors of this thread from logging an error with a traceback when forward raises; the reason is kept."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    here = threading.get_ident()
    refuse: Callable[[logging.LogRecord], bool] = lambda record: record.thread != here  # noqa: E731
    logger.addFilter(refuse)
    try:
        yield
    finally:
        logger.removeFilter(refuse)


_lock = threading.Lock()
_here = threading.local()
_asking: set[Any] = set()


@contextlib.contextmanager
def whole_operators(tensors: Iterable[Any]) -> Iterator[None]:
    """While open, PyTorch's Python takes no operator apart whose parts give other results, and no upsampling that eager has a kernel for: its
    parts have other strides.

    In this thread alone: that Python, which is registered once for the process, is made to ask for whom it runs. Where one of
    `tensors` is empty it stays for upsampling, as shapes are told by Python that rejects an empty batch, and there are no strides to keep; and
    for sizes that are not known.
    """
    empty = any(size == 0 for tensor in tensors for size in getattr(tensor, "shape", ()) if isinstance(size, int))
    operators = [*CORRECTED, *(() if empty else _resampling())]
    with _lock:
        for operator in operators:
            if operator not in _asking:
                _asking.add(operator)
                for key, kernel in list(operator.py_kernels.items()):
                    operator.py_kernels[key] = _asks(operator, key, kernel)
                operator._dispatch_cache.clear()
    before: frozenset[Any] = getattr(_here, "whole", frozenset())
    _here.whole = frozenset(operators)
    try:
        yield
    finally:
        _here.whole = before


def _asks(operator: Any, key: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, the Python of `operator` for `key`; while it is to be whole here, what PyTorch has for it in C++."""
    composite, autograd = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    # One kernel records gradients on all devices.
    keys = [composite, torch._C.DispatchKey.AutogradCPU] if key == autograd else [key, composite]
    found = next((each for each in keys if has(operator.name(), each)), autograd if key == autograd else None)

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        if operator not in getattr(_here, "whole", ()) or any(map(_is_open, args)):
            return kernel(*args, **kwargs)
        return NotImplemented if found is None else operator._op_dk(found, *args, **kwargs)

    return run


def _is_open(argument: object) -> bool:
    """Whether it is sizes of which one is not known, which some of what is in C++ does not take."""
    return isinstance(argument, Sequence) and any(isinstance(size, torch.SymInt) for size in argument)


def _resampling() -> list[Any]:
    """The operators of upsampling that PyTorch has Python for."""
    from torch._decomp import global_decomposition_table  # importing it registers that Python

    # Not each overload that has Python is in the table.
    known: list[Any] = [
        operator for operator in global_decomposition_table["post_autograd"] if "upsample" in operator.name()
    ]
    packets = {operator.overloadpacket for operator in known}
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [operator for operator in overloads if operator.py_kernels]


_REORDERED = frozenset(
    f"{name}_"
    for name in (
        "cumprod",
        "cumsum",
        "index_add",
        "index_copy",
        "masked_fill",
        "masked_scatter",
        "renorm",
        "tril",
        "triu",
    )
)
"""Methods that write to their tensor, and whose forms that do not give another memory format than it has."""


_DRAWING = ("alpha_dropout", "alpha_dropout_", "bernoulli_")
"""Functions whose random numbers go to the elements in the order of memory, by writes that tracing makes functional."""


_DRAWING_OUT = (
    torch.bernoulli,
    torch.multinomial,
    torch.normal,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.randperm,
)


class Watched(TorchFunctionMode):
    """Declines what forward does that no graph can say.

    Args:
        given: the memory (`memory_of`) of inputs and of the model's tensors.
    """

    def __init__(self, given: frozenset[int]) -> None:
        super().__init__()
        self._given = given

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = unpatched(func)
        self.watch(func, args, kwargs)
        return called_as_in_eager(func, args, kwargs or {})

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """To be told of each call before it runs.

        Raises:
            CaptureError: it puts other memory in place of a tensor's or resizes that, has autograd follow it, depends on where in its memory
                an input begins, which no signature has, or draws from a generator that forward may have made or seeded,
                which nobody sees.
        """
        if func == _SET_DATA:
            raise CaptureError("forward puts other memory in place of a tensor's (.data = ...)", final=True)
        name = getattr(func, "__name__", "").partition(".")[0]  # of an operator without its overload
        if name in _REPLACING_MEMORY:
            raise CaptureError(f"forward gives a tensor another shape or memory ({name})", final=True)
        if func in _ASKING_FOR_GRADIENTS:
            raise CaptureError("forward sets whether a tensor needs gradients", final=True)
        if _depends_on_offset(func, args, kwargs or {}) and memory_of(args[0]) in self._given:
            raise CaptureError("forward depends on where in memory an input begins (storage_offset)", final=True)
        if kwargs and kwargs.get("generator") is not None:
            raise CaptureError("forward draws from a generator that it names")


def memory_of(tensor: torch.Tensor) -> int:
    """An identity for the memory of `tensor`, which under functionalisation follows views of views."""
    return int(tensor.untyped_storage()._cdata)


def _depends_on_offset(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in (torch.as_strided, torch.Tensor.as_strided):
        return bool(args) and (len(args) > 3 or "storage_offset" in kwargs)
    return func is torch.Tensor.storage_offset


_REPLACING_MEMORY = frozenset({"resize_", "resize_as_", "set_", "set_data"})
"""Of functions and operators. Tracing makes views of what they resize, which have other elements where strides are not those of rows."""
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ASKING_FOR_GRADIENTS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class EagerWrites(Watched):
    """Lets PyTorch's tracing follow writes as eager makes them.

    Dropout that is switched off gives its input back, and no copy: a write to the one would not show in the other. And
    a written tensor keeps its strides, whatever those of the result are that an operator would give of its own (`out=`).

    Raises:
        CaptureError: eager's result of a write depends on how it goes through memory.
    """

    def __init__(self, given: frozenset[int]) -> None:
        super().__init__(given)
        self._overlaps = Overlaps()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = unpatched(func)
        self.watch(func, args, kwargs)
        kwargs = kwargs or {}
        self._overlaps.decline(func, args, kwargs)
        result = self._call(func, args, kwargs)
        self._overlaps.follow(args, kwargs, result)
        return result

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (nn.functional.dropout, torch.dropout, torch.dropout_) and _is_idle(*args, **kwargs):
            return args[0] if args else kwargs["input"]
        if drops_out(func, args):
            raise CaptureError("forward drops out between recurrent layers, which tracing does in another order")
        name = getattr(func, "__name__", "")
        if name in _REORDERED and func is getattr(torch.Tensor, name):
            return args[0].copy_(getattr(torch.Tensor, name[:-1])(*args, **kwargs))
        if name in _DRAWING and args and not args[0].is_contiguous():
            return _drawn_in_memory_s_order(func, *args, **kwargs)
        if kwargs.get("out") is not None:
            return _written_where_asked(func, args, kwargs)
        return called_as_in_eager(func, args, kwargs)


def called_as_in_eager(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` gives in eager, with its strides, where what it is made of under tracing has other ones."""
    result = called_as_in_inference(func, args, kwargs)
    return result.contiguous() if func is nn.functional.one_hot else result


def _written_where_asked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Has `func` fill tensors of its own, and copies them to those of ``out=``; what it would resize becomes its result.

    Raises:
        CaptureError: it draws random numbers, which go to elements in the order of memory, or would compute in the type
            of the tensor that it writes.
    """
    asked, form = pytree.tree_flatten(kwargs["out"])
    if func in _DRAWING_OUT:
        if not all(out.is_contiguous() for out in asked):
            raise CaptureError("forward draws random numbers into a tensor that is not contiguous (out=)", final=True)
        return func(*args, **kwargs)
    own = func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    if [result.shape for result in pytree.tree_leaves(own)] != [out.shape for out in asked]:
        return func(*args, **kwargs)
    if [result.dtype for result in pytree.tree_leaves(own)] != [out.dtype for out in asked]:
        raise CaptureError(
            "forward has an operator write to a tensor of another type than its result's (out=)", final=True
        )
    filled = [torch.empty(out.shape, dtype=out.dtype, device=out.device) for out in asked]
    func(*args, **(kwargs | {"out": pytree.tree_unflatten(filled, form)}))
    for mine, out in zip(filled, asked, strict=True):
        out.copy_(mine)
    return pytree.tree_unflatten(asked, pytree.tree_structure(own))


def _drawn_in_memory_s_order(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As eager draws for `tensor`; the functional forms that tracing makes go by the order of its dimensions."""
    order, back = memory_order(tensor)
    drawn: torch.Tensor = func(tensor.permute(order), *args, **kwargs)
    return drawn.permute(back)


def _is_idle(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> bool:
    """Whether dropout called so is switched off; `train` is what torch.dropout calls `training`."""
    return p == 0 or not training or not train
