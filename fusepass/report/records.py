"""The entries that a report is made of, as frozen values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from fusepass.report.choice import Choice
from fusepass.runtime.fallbacks import FallbackReport


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
class TensorRecord:
    """A tensor that an operator reads.

    Attributes:
        source: the name of what makes it, an operator or an input.
        type: such as ``"float32[2, 64, 8, 8]"``.
        bytes: of its elements.
    """

    source: str
    type: str
    bytes: int


@dataclass(frozen=True)
class GraphNode:
    """An operator, an input or the results of a captured graph.

    Attributes:
        name: as in the captured graph.
        kind: ``"input"``, ``"operator"`` or ``"output"``.
        target: the ATen operator; empty for the others.
        region: the name of the region that runs it as generated kernels; empty where none does.
        reads: the tensors that it reads.
    """

    name: str
    kind: str
    target: str = ""
    region: str = ""
    reads: tuple[TensorRecord, ...] = ()


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


@dataclass(frozen=True)
class RegionRecord:
    """One region of operators that runs as one fused call.

    Attributes:
        name: the region's name, which the rewritten graph and the sources use too.
        pattern: the pattern that grew it.
        ops: the operators it replaced, in graph order.
        kernels: the generated kernels, in launch order.
        bytes_before: bytes that the operators move, each run by itself.
        bytes_after: bytes that the anchor and the kernels move, each reading a buffer once and writing it once.
        anchor: which implementation its convolution or matrix product uses, ``"library: aten.convolution"``;
            None for a region without an anchor.
        device: such as ``"cuda:0"``.
        signature: types and shapes in words, ``"float32[2, 64, 8, 8] -> float32[2, 64]"``.
        state: whether it runs as generated kernels.
        reason: why it does not although it was meant to; None otherwise.
        choice: how it was decided that generated code, or its own operators, run it; None where nothing was decided.
        sources: the generated sources.
        build_seconds: seconds spent in compiler or cache.
        sizes: whether its library serves other sizes, too, and the numbers that it is called with for these, or why it
            does not; None for the first sizes, which have one of their own.
        like: the name of the earlier region that differs in nothing but names, as that of an equal layer does, whose kernels,
            library and choice it has; None where there is none.
        written: the inputs that its kernels write over, such as running statistics.
        ruled_out: candidates that were not built, by name, with how many times as long as the fastest one they take by the cost models.
        beyond_budget: names of candidates that were not generated, as ``Config.tune_budget`` was spent elsewhere.
    """

    name: str
    pattern: str
    ops: tuple[OpRecord, ...]
    kernels: tuple[KernelRecord, ...]
    bytes_before: int
    bytes_after: int
    anchor: str | None
    device: str
    signature: str
    state: RegionState = RegionState.FUSED
    reason: str | None = None
    sources: tuple[SourceFile, ...] = ()
    build_seconds: float = 0.0
    choice: Choice | None = None
    sizes: str | None = None
    like: str | None = None
    written: tuple[str, ...] = ()
    ruled_out: tuple[tuple[str, float], ...] = ()
    beyond_budget: tuple[str, ...] = ()

    @property
    def bytes_saved(self) -> int:
        """Bytes of memory traffic that fusing saves per call at most; 0 for a region of original operators."""
        return self.bytes_before - self.bytes_after if self.state is RegionState.FUSED else 0


@dataclass(frozen=True)
class ModelRecord:
    """What became of one model.

    Attributes:
        model: the model's class name.
        device: such as ``"cuda:0"``.
        capture: how the model was captured.
        regions: the fused regions.
        refusals: the operators that may not fuse.
        fallbacks: what ran as the original operators so far.
        reason: why a less complete capture was needed; None where it was not.
        rewrites: what algebraic rules did, in the order in which they did it.
        ops_total: operators in the captured graphs.
        ops_fused: how many of them run inside regions.
        seconds: seconds for each stage, by its name, in the order in which they ran.
        graphs: the captured graphs after the rules, in topological order.
        cuda_graphs: what became of ``Config.cuda_graphs``, in words, for each specialisation; empty where it is off.
        background: what is compiled beside the calls, in words, each with how far it is, and what failed there.
        backward: the same of the graphs that compute gradients, which all other attributes leave out; None where there are none.
    """

    model: str
    device: str
    capture: CaptureRoute
    regions: tuple[RegionRecord, ...] = ()
    refusals: tuple[RefusalReport, ...] = ()
    fallbacks: tuple[FallbackReport, ...] = ()
    reason: str | None = None
    rewrites: tuple[RewriteReport, ...] = ()
    ops_total: int = 0
    ops_fused: int = 0
    seconds: tuple[tuple[str, float], ...] = ()
    cuda_graphs: tuple[str, ...] = ()
    background: tuple[str, ...] = ()
    graphs: tuple[tuple[GraphNode, ...], ...] = ()
    backward: ModelRecord | None = None

    @property
    def fused_share(self) -> float:
        """Fraction of the operators that run inside regions, 0 to 1; 0 for a model without operators."""
        return self.ops_fused / self.ops_total if self.ops_total else 0.0

    @property
    def bytes_before(self) -> int:
        """Bytes that the operators of all regions move when each runs by itself."""
        return sum(region.bytes_before for region in self.regions)

    @property
    def bytes_saved(self) -> int:
        """Bytes of memory traffic saved per call at most, over the regions that run as generated kernels."""
        return sum(region.bytes_saved for region in self.regions)
