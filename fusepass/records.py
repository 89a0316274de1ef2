"""The entries that a report is made of, as frozen values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path


class CaptureRoute(enum.StrEnum):
    """How a model became ATen graphs, from the most to the least complete way."""

    TRACED = "traced"
    DYNAMO = "dynamo"
    CHILDREN = "children"
    UNTOUCHED = "untouched"


class RegionState(enum.StrEnum):
    """Whether a region runs as generated kernels or as the original operators, by choice or for want of kernels."""

    FUSED = "fused"
    EAGER = "eager"
    FALLBACK = "fallback"


@dataclass(frozen=True)
class OpRecord:
    """One operator that a region replaced.

    Attributes:
        name: the node's name in the captured graph, such as ``"native_layer_norm"``.
        target: the ATen operator, such as ``"aten.native_layer_norm"``.
        location: where the model says it, ``"net.py:12 in forward"`` or the path of a module such as
            ``"encoder.layers.0"``; empty where neither is known.
    """

    name: str
    target: str
    location: str = ""


@dataclass(frozen=True)
class KernelRecord:
    """One generated kernel.

    Attributes:
        name: the function's name in the source.
        schedule: grid, threads and reduction strategy in words.
        bytes_read: bytes it loads from memory, each buffer counted as often as it is read.
        bytes_written: bytes it stores.
    """

    name: str
    schedule: str
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class SourceFile:
    """A generated source.

    Attributes:
        name: file name such as ``"conv_gelu.cu"``.
        path: where it lies in the cache; None where it was not written.
        text: its contents.
    """

    name: str
    path: Path | None
    text: str


@dataclass(frozen=True)
class RefusalReport:
    """An operator that was left alone.

    Attributes:
        node: its name in the captured graph.
        target: the ATen operator.
        reason: why it may not fuse, in words.
        location: as in `OpRecord`.
    """

    node: str
    target: str
    reason: str
    location: str = ""


@dataclass(frozen=True)
class RewriteReport:
    """One application of an algebraic rule. FLOPs and bytes are estimates, for the operators that went and came.

    Attributes:
        rule: the rule's name.
        node: the name, in the captured graph, of the node that was replaced.
        flops_before, flops_after: floating-point operations.
        bytes_before, bytes_after: memory traffic.
    """

    rule: str
    node: str
    flops_before: int = 0
    flops_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
