"""The operator ``fusepass::kept`` on CUDA: a dropout mask in one generated kernel.

Inside a region the mask is part of the region's kernel. The operator runs where a region is left to its own operators, where a mask is in no
region, and in trials. Both come from the same lowering, so their bits are equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import fx

from fusepass.codegen import build
from fusepass.codegen.detect import device_facts
from fusepass.codegen.lowering.dropout import kept_by_pytorch
from fusepass.codegen.source import Source
from fusepass.config import current
from fusepass.errors import FusepassError
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.meta import Meta
from fusepass.runtime.region import FusedRegion

KEPT = torch.ops.fusepass.kept.default

fallbacks = FallbackCounter()
"""Counts the masks that PyTorch's operators made in this process."""

_SIZES = 512  # whose calls are remembered


def kept(state: torch.Tensor, size: Sequence[int], stride: Sequence[int], *rule: Any) -> torch.Tensor:
    """As `fusepass.codegen.lowering.dropout.kept`, in one launch, also while a CUDA graph is captured.

    If the kernel cannot be built, PyTorch's operators run, with one warning and a count in `fallbacks`.

    Raises:
        ValueError: the state is not int64 [2].
    """
    if not prod(size):
        return torch.empty_strided(size, stride, dtype=torch.bool, device=state.device)
    launch = _launch(state.device, tuple(size), tuple(stride), *rule)
    if isinstance(launch, str):
        fallbacks.count("fusepass::kept", launch, toolchain=True)
        return kept_by_pytorch(state, size, stride, *rule)
    mask: torch.Tensor = launch(state)
    return mask


_library = torch.library.Library("fusepass", "FRAGMENT")
_library.impl("kept", kept, "CUDA")


@functools.lru_cache(_SIZES)
def _launch(
    device: torch.device, size: tuple[int, ...], stride: tuple[int, ...], *rule: Any
) -> Callable[..., Any] | str:
    """The kernel as a function of the state, or the reason why there is none."""
    from fusepass.runtime.mask_kernel import NAME, generated  # with passes and renderers, which artifacts do without

    try:
        made = generated(device_facts(device), prod(size), *rule)
        library = build.build(made.source)
        state, mask = Meta((2,), (1,), torch.int64), Meta(size, stride, torch.bool)
        return FusedRegion(
            NAME, made, library, [state], [0], device, lambda given: kept_by_pytorch(given, size, stride, *rule),
            fallbacks, outputs=[mask], unaligned=library,
        ).checked  # fmt: skip
    except (FusepassError, OSError) as error:
        if current().debug:
            raise
        return f"it has no kernel: {next(iter(str(error).splitlines()), '')}"


def begin(masks: Iterable[fx.Node], tell: Callable[[Source], None]) -> None:
    """Tell `tell` the sources that masks on a GPU need when they run as operators."""
    from fusepass.runtime.mask_kernel import generated

    for node in masks:
        value, (_, size, _, *rule) = node.meta["val"], node.args
        if value.is_cuda and value.numel():
            with suppress(FusepassError):  # which `kept` tells of
                tell(generated(device_facts(value.device), prod(size), *rule).source)  # type: ignore[arg-type]
