"""Keeps what is made of parameters from call to call, as long as the parameters have the values that it was made of.

Nothing that PyTorch counts tells that: a write through ``.data`` or NumPy changes no version. So each call reads the parameters once,
at the rate of memory, for a fingerprint of what is in them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from fusepass.codegen import build
from fusepass.codegen.detect import device_facts
from fusepass.codegen.fingerprint import ARGUMENTS, CHUNK, source

_Made = tuple[torch.Tensor, ...]


class Fingerprint:
    """Fingerprints of tensors, each of one shape, type and layout.

    Args:
        sizes: the bytes of each, from its first element in memory to its last.

    Raises:
        BuildError: there is no compiler, or it failed.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        made = source(device_facts(torch.device("cpu")).arch)
        self._run = build.load(build.build(made), made.entry, ARGUMENTS)
        self._count = len(sizes)
        self._bytes = (ctypes.c_int64 * self._count)(*sizes)
        chunks = (-(-size // CHUNK) for size in sizes)
        self._first = (ctypes.c_int64 * (self._count + 1))(*accumulate(chunks, initial=0))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Of what is in `tensors`, together."""
        places = (ctypes.c_void_p * self._count)(*[tensor.data_ptr() for tensor in tensors])
        count, sums = ctypes.c_int64(self._count), (ctypes.c_uint64 * 2)()
        given = (places, self._bytes, self._first, count, sums)
        self._run(*[ctypes.addressof(each) for each in given], None)
        return bytes(sums)


class Kept:
    """Gives what `make` makes of its arguments, which it is asked for again only when these have other contents.

    Layers of one kind may share a graph. So what was made for others is kept, too, as long as their first argument lives.

    Args:
        make: a function of tensors that depends on nothing else.
        sizes: the bytes of each argument.

    Raises:
        BuildError: there is no compiler, or it failed.
    """

    __slots__ = ("_fingerprint", "_made", "_make")

    def __init__(self, make: Callable[..., _Made], sizes: Sequence[int]) -> None:
        self._make = make
        self._fingerprint = Fingerprint(sizes)
        self._made: dict[bytes, tuple[weakref.ref[torch.Tensor], _Made]] = {}

    def of(self, *parameters: torch.Tensor) -> _Made:
        now = self._fingerprint(parameters)
        found = self._made.get(now)
        if found is None:
            first = parameters[0]
            # Before another is made, as two of them take memory; in one step, as other threads may look for theirs.
            self._made = {
                key: kept for key, kept in self._made.items() if (owner := kept[0]()) is not None and owner is not first
            }
            found = weakref.ref(first), self._make(*parameters)
            self._made[now] = found
        return found[1]
