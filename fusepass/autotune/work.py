"""A region on its way from a part of a graph to a call: what the stages of the pipeline find out about it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fusepass.autotune.kind import kind_of
from fusepass.codegen.generate import Generated
from fusepass.codegen.search.candidate import Candidate, Common
from fusepass.codegen.search.schedules import ScheduleCandidate
from fusepass.patterns.partition import Region
from fusepass.report.choice import Choice
from fusepass.report.report import RegionState
from fusepass.runtime.meta import Meta, with_strides
from fusepass.runtime.region import FusedRegion


@dataclass
class Work:
    """One region with what is known of it so far.

    Attributes:
        region: its nodes, in the captured graph.
        graph: its operators as a graph of their own; a placeholder for each of ``region.inputs``. There until `let_go`.
        constants: those inputs that are numbers fixed at capture, with their values.
        exact_inputs: whether each call gives the graph's inputs with the strides that they are described with.
        updates: by the numbers of its outputs, the writes at the graph's end that alone read them; see `fusepass.compile.writes.updates_of`.
        anew: makes `graph` once more, for what is generated after that was let go of; None where nobody keeps what it is made of.
        record_key: under which `fusepass.autotune.recorded` is to keep what is generated of it; None where it need not.
        common: what its candidates have in common, where some are being generated.
        like: the earlier region of its graph that differs in nothing but names, if there is one.
        offered: names of the candidates that it may be tried in, the one to choose unmeasured first.
        beyond_budget: names of others that it may not be tried in, as `Config.tune_budget` is spent elsewhere.
        ruled_out: names of those offered that are not built, with how many times as long as the fastest one they take by the cost models.
        candidates: what was generated of these, different programs all, in that order; empty where the region is beyond
            code generation.
        candidate: the one in use, or to be used unless another one is chosen.
        schedules: departures of the first candidate's schedules that are worth a try, where another process found them.
        alone: why this process generated it although another was to.
        lost: candidates that could not be generated, built or loaded, by name, and why.
        choice: what was measured and chosen; None where nothing was to be chosen.
        call: the fused call, where it is in use.
        writes: those of its `updates` that a call of the graph leaves to its kernels.
        reason: why it runs as the original operators although it was meant to be fused.
        seconds: spent in compiler or cache.
    """

    region: Region
    graph: fx.GraphModule
    constants: dict[fx.Node, torch.Tensor]
    exact_inputs: bool = False
    updates: Mapping[int, fx.Node] = field(default_factory=dict)
    anew: Callable[[], fx.GraphModule] | None = None
    record_key: str | None = None
    common: Common = field(default_factory=Common, init=False, repr=False)
    like: Work | None = None
    offered: tuple[str, ...] = ()
    beyond_budget: tuple[str, ...] = ()
    ruled_out: Mapping[str, float] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    candidate: Candidate | None = None
    schedules: Sequence[ScheduleCandidate] | None = None
    alone: str | None = None
    lost: dict[str, str] = field(default_factory=dict)
    choice: Choice | None = None
    call: FusedRegion | None = None
    writes: Sequence[fx.Node] = ()
    reason: str | None = None
    seconds: float = 0.0

    @property
    def generated(self) -> Generated | None:
        """Program and source of the candidate in use."""
        return None if self.candidate is None else self.candidate.generated

    @property
    def arguments(self) -> list[fx.Node]:
        """The nodes whose values the fused call takes."""
        return [node for node in self.region.inputs if node not in self.constants]

    def is_exact(self, node: fx.Node) -> bool:
        """Whether `node` is an input of the graph that lies in each call as it is described."""
        return self.exact_inputs and node.op == "placeholder"

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

    @cached_property
    def kind(self) -> Hashable:
        """What it is but for names."""
        return kind_of(self.graph.graph, {node.name: repr(value.item()) for node, value in self.constants.items()})

    def let_go(self) -> None:
        """Forget what nobody asks for at the end of the pipeline: nodes are most of the memory that a signature takes."""
        vars(self).pop("kind", None)
        self.common = Common()
        del self.graph

    @cached_property
    def _operators(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Its own operators, of which nothing is kept but the code."""
        if self.anew is None:
            return self.run_on(self.graph)
        graph = self.anew()
        run = self.run_on(graph)
        del graph._graph
        return run

    def original(self) -> Callable[..., Any]:
        """The region's own operators, as a function of the fused call's arguments; its code is made when it is first called."""
        expected = [Meta.of(node.meta["val"]) for node in self.region.outputs]

        def run(*arguments: torch.Tensor) -> Any:
            # An input may lie as another region wrote it, and layouts go from operator to operator.
            results = tuple(map(with_strides, self._operators(*arguments), expected))
            return results if len(results) > 1 else results[0]

        return run

    def run_on(self, graph: fx.GraphModule) -> Callable[..., tuple[torch.Tensor, ...]]:
        """`graph`, which has the placeholders of the region's, as a function of the fused call's arguments."""
        if isinstance(graph, _LazyGraphModule):
            graph.real_recompile()
        forward, inputs, constants = graph.forward, self.region.inputs, self.constants

        def run(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rest = iter(arguments)
            return tuple(forward(*(constants[node] if node in constants else next(rest) for node in inputs)))

        return run
