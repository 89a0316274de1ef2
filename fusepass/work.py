"""A region on its way from a part of a graph to a call: what the stages of the pipeline find out about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fusepass.choice import Choice
from fusepass.codegen.generate import Generated
from fusepass.codegen.lowering.formats import AnchorFormat
from fusepass.patterns.partition import Region
from fusepass.report import RegionState
from fusepass.runtime import Meta, with_strides


@dataclass
class Work:
    """One region with what is known of it so far.

    Attributes:
        region: its nodes, in the captured graph.
        graph: its operators as a graph of their own; a placeholder for each of ``region.inputs``.
        constants: those inputs that are numbers fixed at capture, with their values.
        generated: program and source; None where the region is beyond code generation.
        variant: what sets the chosen program apart from others that the region could become.
        conversions: by the name of the library call's result, what changes a layout for the library.
        library: the built library; None where there is none.
        converters: the libraries of the conversions.
        choice: what was measured and chosen; None where nothing was to be chosen.
        call: the fused call, where it is in use.
        reason: why it runs as the original operators although it was meant to be fused.
        seconds: spent in compiler or cache.
    """

    region: Region
    graph: fx.GraphModule
    constants: dict[fx.Node, torch.Tensor]
    generated: Generated | None = None
    variant: str = AnchorFormat.CALLER.value
    conversions: dict[str, Generated] = field(default_factory=dict)
    library: Path | None = None
    converters: dict[str, Path] = field(default_factory=dict)
    choice: Choice | None = None
    call: Callable[..., Any] | None = None
    reason: str | None = None
    seconds: float = 0.0

    @property
    def arguments(self) -> list[fx.Node]:
        """The nodes whose values the fused call takes."""
        return [node for node in self.region.inputs if node not in self.constants]

    @property
    def device(self) -> torch.device:
        """Where its results lie."""
        device: torch.device = self.region.outputs[0].meta["val"].device
        return device

    @property
    def state(self) -> RegionState:
        """How it runs."""
        if self.reason is not None:
            return RegionState.FALLBACK
        if self.choice is not None and self.choice.leaves_eager:
            return RegionState.EAGER
        return RegionState.FUSED

    def original(self) -> Callable[..., Any]:
        """The region's own operators, as a function of the fused call's arguments."""
        graph, inputs, constants = self.graph.forward, self.region.inputs, self.constants
        expected = [Meta.of(node.meta["val"]) for node in self.region.outputs]

        def run(*arguments: torch.Tensor) -> Any:
            rest = iter(arguments)
            results = graph(*(constants[node] if node in constants else next(rest) for node in inputs))
            # An input may lie as another region wrote it, and layouts go from operator to operator.
            results = tuple(map(with_strides, results, expected))
            return results if len(results) > 1 else results[0]

        return run
