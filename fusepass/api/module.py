"""The module that `fusepass.optimize` gives back: a view of the original that runs specialisations of it."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from fusepass.api.methods import Watch, twin
from fusepass.api.view import graph_view
from fusepass.capture.trace import CaptureFailure
from fusepass.config import override
from fusepass.dispatch.signatures import Table
from fusepass.dispatch.specialise import Specialiser
from fusepass.errors import CaptureError
from fusepass.guards.edits import dict_version
from fusepass.report.report import Report
from fusepass.runtime.fast_path import MISSED
from fusepass.runtime.modes import obstacle
from fusepass.structure import Template

if TYPE_CHECKING:
    from fusepass.profiling.profile import Profile

_dynamo_is_compiling = torch.compiler.is_dynamo_compiling
_CALL: Callable[..., Any] = nn.Module.__call__
_OWN = frozenset({"original", "_specialiser", "_table", "_options", "_twin", "_watch"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(getattr(nn.modules.module, f"_global{name}") for name in _HOOKS)
_OWN_CALL = "its class has a __call__ of its own"
_NOT_SHARED = frozenset({"training", "_is_full_backward_hook"})


def optimized(original: nn.Module, options: Mapping[str, Any]) -> OptimizedModule:
    """An optimised view of `original`, indexable where `original` is (a ``Sequential``, say)."""
    if _has_own_call(type(original)):
        return UnusualModule(original, options)
    kind = OptimizedContainer if hasattr(type(original), "__getitem__") else OptimizedModule
    return _with_signature(kind, original)(original, options)


def _with_signature(kind: type[OptimizedModule], original: nn.Module) -> type[OptimizedModule]:
    """`kind` with a forward that says which arguments the original's takes: export, trainers and pipelines ask for their names."""
    try:
        known = inspect.signature(original.forward)
    except (TypeError, ValueError):  # one that is no Python has none
        return kind
    usual: Any = kind.forward
    forward = types.FunctionType(usual.__code__, usual.__globals__, usual.__name__, None, usual.__closure__)
    forward.__doc__ = usual.__doc__
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [each for each in known.parameters.values() if each.name != own.name]
    forward.__signature__ = known.replace(parameters=[own, *parameters])  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": forward})


def _has_own_call(kind: type[nn.Module]) -> bool:
    """Whether a call of such a module is more than its hooks and forward."""
    owner = next(base for base in kind.__mro__ if "__call__" in vars(base))
    return owner is not nn.Module and not issubclass(kind, fx.GraphModule | torch.jit.ScriptModule)


class OptimizedModule(nn.Module):
    """Called like `original`, and the same as it in everything else.

    It has no parameters, buffers, submodules or hooks of its own but shares the original's, by sharing the very
    dicts that hold them. Attributes and methods that it does not have are the original's, and what is assigned to it is
    assigned to the original. So state dicts, optimisers, ``to``, ``train`` and hooks work on either.

    Args:
        original: the model; it stays as it is.
        options: options of `fusepass.config.Config`, by name.
    """

    original: nn.Module
    _specialiser: Specialiser
    _table: Table  # the specialiser's: each step on the way to it costs where nothing is in the processor's caches
    _options: dict[str, Any]
    _twin: nn.Module | None  # what methods are bound to that are to run the optimised forward
    _watch: Watch

    def __init__(self, original: nn.Module, options: Mapping[str, Any]) -> None:
        # Not nn.Module.__init__, which would make dicts of its own.
        specialiser = Specialiser(original, options)
        own = {"original": original, "_options": dict(options), "_specialiser": specialiser}
        vars(self).update(own, _table=specialiser.table, _twin=None, _watch=Watch(original))
        self._share()

    def _share(self) -> None:
        """Have the original's dicts; it may have got others."""
        version, held = dict_version(vars(self.original)), vars(self.original)
        shared = {name: held[name] for name in vars(nn.Module()).keys() & held.keys() - _NOT_SHARED}
        vars(self).update(shared)
        self._specialiser.table.follow(version, (*(held[name] for name in _HOOKS), *_GLOBAL_HOOKS))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of every module. The usual call, with no hooks around it, takes a shorter way to the same result."""
        if not _dynamo_is_compiling():
            table = self._table
            training = self._specialiser.training
            if (
                training is not None
                and dict_version(vars(self.original)) == table.version
                and not any(table.hooks)
                and training.is_for((*args, *kwargs.values()))
            ):
                return training(args, kwargs)
            result = table.door(args, kwargs)
            if result is not MISSED:
                return result
            original, hooked = self.original, any(table.hooks)
            if hooked and type(original).__call__ is _CALL and dict_version(vars(original)) == table.version:
                return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            if not (kwargs or hooked):
                for made in table.recent:
                    result = made.serve(args)
                    if result is not MISSED:
                        table.served(made)
                        return result
            if type(original).__call__ is not _CALL and _has_own_call(type(original)):  # by now
                return self._specialiser.leave(original, args, kwargs, _OWN_CALL)
            if dict_version(vars(original)) != self._specialiser.table.version:
                self._share()
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's result."""
        if type(args) is tuple and not _dynamo_is_compiling():
            result = self._table.inside(args, kwargs)  # with hooks around it, else `__call__` would have come so far
            if result is not MISSED:
                return result
        # Both say it of the process: another thread may be the one.
        if _dynamo_is_compiling() or (torch.compiler.is_compiling() and _is_traced(args, kwargs)):
            return self._specialiser.trace(args, kwargs)
        if isinstance(args, fx.Proxy):
            raise TypeError(
                "torch.fx does not see its arguments; trace its `original`, or take `graph_module(*inputs)`"
            )
        if any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values())):
            return self.original.forward(*args, **kwargs)  # a model around it is traced by torch.fx
        return self._specialiser(args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """From now on calls of this run ``torch.compile`` of it, with these arguments; `original` stays as it is.

        As with every module, neither copies nor what is pickled are compiled.
        """
        compiled = torch.compile(self._call_impl, *args, **kwargs)
        vars(self).update(_compiled_call_impl=compiled, _table=Table())  # an empty one serves nothing before it

    def report(self) -> Report:
        """What was fused so far, what was not and why, and what ran as the original operators."""
        return self._specialiser.report()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is compiled in the background (``Config.compile``), at most `timeout` seconds; says whether that is so.

        Nothing is raised for what fails there: the report tells of it, as a warning does.
        """
        return self._specialiser.wait(timeout)

    def graph_module(self, *args: Any, **kwargs: Any) -> fx.GraphModule:
        """The rewritten graph for a call with these inputs, which is not made.

        It takes the same inputs, gives the same result, and has the original's parameters and buffers under their
        names. It is right for inputs like these only, and in the present mode; it compares nothing. Made under autocast it
        holds the casts, and is to be called outside of it. Where gradients would be needed, it is the graph for a call
        without them.

        Raises:
            CaptureError: the model cannot be traced as one graph; the text says why.
        """
        made = self._specialiser.prepare(args, kwargs)
        if isinstance(made, CaptureFailure):
            raise CaptureError(f"{type(self.original).__name__} has no single graph: {made.reason}") from made.error
        return graph_view(self.original, self._specialiser.original, made.captured, made.compiled.graph_module)

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Where the time of a call with these inputs goes: each region and operator, timed, beside its limit.

        The call itself is not made: inputs, parameters, buffers and random generators stay as they are. Where gradients
        would be needed, it is the profile of a call without them.

        Raises:
            CaptureError: the model cannot be traced as one graph; the text says why.
        """
        made = self._specialiser.profile(args, kwargs)
        if isinstance(made, CaptureFailure):
            raise CaptureError(f"{type(self.original).__name__} has no single graph: {made.reason}") from made.error
        return made

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not there yet, as in copy and pickle
            raise AttributeError(name)
        value = getattr(self.original, name)
        bound = type(value) is MethodType and value.__self__ is self.original
        return self._method(value) if bound else value

    def _method(self, method: MethodType) -> Any:
        """`method` of the original, as ``Config.methods`` says."""
        original, name = self.original, method.__name__
        if name in vars(nn.Module) or name in vars(original) or _has_own_call(type(original)) or _dynamo_is_compiling():
            return method
        with override(**self._options) as config:
            if not config.fuses:
                return method
            if config.methods == "original":
                return self._watch.of(method)
        made = self._twin
        if made is None or type(made).__bases__ != (type(original),) or vars(made) is not vars(original):
            made = vars(self)["_twin"] = twin(original, self.forward)
        return MethodType(method.__func__, made)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__" and isinstance(value, type) and issubclass(value, OptimizedModule):
            object.__setattr__(self, name, value)  # FSDP2 puts a class above the one that a module has
        else:
            setattr(self.original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.original, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.original)})

    def __repr__(self) -> str:
        return f"OptimizedModule({self.original!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedModule:
        return optimized(copy.deepcopy(self.original, memo), self._options)

    def __reduce__(self) -> tuple[Callable[..., OptimizedModule], tuple[nn.Module, dict[str, Any]]]:
        return optimized, (self.original, self._options)

    @property
    def __signature__(self) -> inspect.Signature:
        """The original's arguments, for those who ask for them before they call."""
        return inspect.signature(self.original.forward)

    def __prepare_scriptable__(self) -> nn.Module:
        """TorchScript compiles the original, which has types where this has any arguments."""
        return self.original

    def _replicate_for_data_parallel(self) -> nn.Module:
        """``nn.DataParallel`` runs replicas of the original: theirs are new tensors in each call."""
        return self.original._replicate_for_data_parallel()  # type: ignore[no-any-return]

    # What nn.Module does to itself or asks of itself, the original does, in its own way if it has one.

    def train(self, mode: bool = True) -> OptimizedModule:
        self.original.train(mode)
        return self

    def eval(self) -> OptimizedModule:
        self.original.eval()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> OptimizedModule:
        self.original.requires_grad_(requires_grad)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> OptimizedModule:
        self.original.apply(fn)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> OptimizedModule:
        self.original._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.original._load_from_state_dict(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.original._save_to_state_dict(*args, **kwargs)

    def get_extra_state(self) -> Any:
        return self.original.get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        self.original.set_extra_state(state)

    def extra_repr(self) -> str:
        return self.original.extra_repr()


def _is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is this thread that traces for torch.export, by modes or tensors that no usual call has."""
    return obstacle(Template.of((args, kwargs))[0]) is not None


class OptimizedContainer(OptimizedModule):
    """An optimised module whose original can be indexed; what it can besides, such as be iterated over, this can."""

    original: Any

    def __getitem__(self, index: Any) -> Any:
        return self.original[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.original[index] = value

    def __delitem__(self, index: Any) -> None:
        del self.original[index]

    def __len__(self) -> int:
        return len(self.original)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.original)

    def __contains__(self, item: Any) -> bool:
        return item in self.original


class UnusualModule(OptimizedModule):
    """One whose original's class has a ``__call__`` of its own, which may do anything before and after forward: it runs as it is."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled_call_impl is not None:
            return self._compiled_call_impl(*args, **kwargs)
        return self._specialiser.leave(self.original, args, kwargs, _OWN_CALL)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """From now on calls of this run ``torch.compile`` of the original's, with these arguments."""
        vars(self)["_compiled_call_impl"] = torch.compile(self.original.__call__, *args, **kwargs)
