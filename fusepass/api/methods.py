"""Methods of a model that call its forward, such as ``generate``, when they are called on the optimised one."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from types import MethodType, new_class
from typing import Any

from torch import nn

from fusepass.errors import warn


def twin(original: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A module that is `original` in everything but `forward`: of a subclass of its class, with the very dict of its attributes.

    So methods that are bound to it read and write the original's attributes, and find ``super()`` and `isinstance` as they
    expect. Copies and pickles of it are those of the original.
    """
    kind = type(original)

    @functools.wraps(kind.forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    own = {
        "forward": run,
        "__copy__": lambda self: copy.copy(original),
        "__reduce_ex__": lambda self, protocol: (_itself, (original,)),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    made: Any = object.__new__(new_class(kind.__name__, (kind,), {}, lambda names: names.update(own)))
    made.__dict__ = vars(original)
    return made  # type: ignore[no-any-return]


def _itself(module: nn.Module) -> nn.Module:
    """What pickles and copies of a twin are made by, of the original."""
    return module


class Watch:
    """Finds methods that run the original's forward although the caller may expect the optimised one, and warns of each once.

    A method is watched the first time that it is called, by a hook of the original.
    """

    def __init__(self, original: nn.Module) -> None:
        self._original = original
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def of(self, method: MethodType) -> Callable[..., Any]:
        """`method` of the original, or what watches it and then calls it."""
        name = method.__name__
        if name in self._seen:
            return method

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                again = name in self._seen
                self._seen.add(name)
            if again:
                return method(*args, **kwargs)
            me, ran = threading.get_ident(), []
            hook = self._original.register_forward_pre_hook(lambda *_: ran.append(threading.get_ident() == me))
            try:
                return method(*args, **kwargs)
            finally:
                hook.remove()
                if any(ran):
                    warn(
                        f"{type(self._original).__name__}.{name} runs the original forward, not the optimised one; "
                        f'without methods="original" it would run that'
                    )

        return watched
