"""Takes the dispatch modes of this thread away for a while; those of other threads stay where they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode


@contextmanager
def without_modes() -> Iterator[None]:
    """While open, no dispatch mode of this thread sees what operators do.

    PyTorch's own `_disable_current_modes` also pops modes of `torch.export`, which PyTorch keeps in one stack for all threads:
    it would take them from a thread that is exporting. They are popped here only if this thread is the one.
    """
    if exports():
        with _disable_current_modes():
            yield
        return
    modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def exports() -> bool:
    """Whether modes on PyTorch's pre-dispatch stack, which is one for all threads, are in force in this thread."""
    return torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
