"""Every fused region as a registered operator, so that torch.compile, torch.export and dispatch modes see one."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import torch

from fusepass.runtime.region import FusedRegion

NAMESPACE = "fusepass"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_regions: dict[str, FusedRegion] = {}
_lock = threading.Lock()


def register(region: FusedRegion, identity: str) -> Any:
    """The operator ``torch.ops.fusepass.<name>_<digest>`` of a region, registered once per `identity`.

    Args:
        region: what it computes.
        identity: text that two regions share only if they compute the same on the same kind of arguments.
    """
    digest = hashlib.sha256(f"{identity}{region.inputs}{region.outputs}{region.device}".encode()).hexdigest()[:8]
    name = f"{region.name}_{digest}"
    with _lock:
        if name not in _regions:
            _define(name, region)
        # The newest region serves: it holds the live fallback counter and library.
        _regions[name] = region
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _define(name: str, region: FusedRegion) -> None:
    arguments = ", ".join(f"Tensor a{number}" for number in range(len(region.inputs)))
    many = len(region.outputs) > 1
    results = "(" + ", ".join(["Tensor"] * len(region.outputs)) + ")" if many else "Tensor"
    # Kernels read memory by the strides they were generated for.
    _library.define(f"{name}({arguments}) -> {results}", tags=(torch.Tag.needs_exact_strides,))

    def run(*inputs: torch.Tensor) -> Any:
        return _regions[name].checked(*inputs)

    def meta(*inputs: torch.Tensor) -> Any:
        made = tuple(
            torch.empty_strided(each.shape, each.strides, dtype=each.dtype, device="meta")
            for each in _regions[name].outputs
        )
        return made if many else made[0]

    _library.impl(name, run, "CompositeExplicitAutograd")
    # Fake tensors are served by it as well. `register_fake` would look for this line in every module there is.
    _library.impl(name, meta, "Meta")
