"""Which random number of a generator's stream an element has: the rule of PyTorch's CUDA kernel for dropout."""

from __future__ import annotations

from typing import Any, TypeVar

OF_A_CALL = 4
"""Numbers that a generator gives at once."""

Whole = TypeVar("Whole", bound=Any)
"""An integer, an index or a tensor of integers."""


def place(element: Whole, threads: int, width: int) -> tuple[Whole, Whole, Whole]:
    """Where number `element` of a tensor gets its random number: the sequence of the generator, the call in it, and which of the numbers of that.

    Each of the `threads` of PyTorch's kernel has a sequence, and takes `width` elements at a time, neighbours in memory: a power of two, two or
    more. For these it calls as often as it needs to.
    """
    numbers, calls = min(width, OF_A_CALL), max(width // OF_A_CALL, 1)
    several = element // numbers
    group = several // calls
    return group % threads, group // threads * calls + several % calls, element % numbers
