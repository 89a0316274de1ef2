"""Precision settings for the span of a test.

``torch.testing._internal``, which the OpInfo tests import, forbids plain assignment to ``torch.backends.cudnn`` for the
rest of the process; its context manager stays allowed, but sets every flag that it is not given to a default.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def cudnn(**flags: Any) -> Iterator[None]:
    """``torch.backends.cudnn`` with `flags` changed and all others as they are."""
    backend = torch.backends.cudnn
    names = ("enabled", "benchmark", "deterministic", "allow_tf32")
    with backend.flags(**{name: getattr(backend, name) for name in names} | flags):
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """float32 products in float32: what is held against float64 would else show TF32's rounding, not fusion's."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        with cudnn(allow_tf32=False):
            yield
    finally:
        matmul.allow_tf32 = before
