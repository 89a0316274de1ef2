"""Tracing with gradients: without TorchInductor, for inputs in lists, and with a backward that Dynamo leaves alone."""

from __future__ import annotations

import logging
import operator
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._functorch.aot_autograd import make_boxed_func

from fusepass.capture.threads import replaced, unreplaced
from fusepass.patterns.simplify import share_common
from fusepass.training import aot, joint
from fusepass.training.aot import with_gradients
from tests.golden_sources import graphs

aten = torch.ops.aten


def traced(graph: fx.GraphModule, inputs: Sequence[Any], seen: list[str]) -> Callable[..., Any]:
    def compiler(kind: str) -> Callable[..., Any]:
        def compile_graph(made: fx.GraphModule, _: Any) -> Any:
            seen.append(f"{kind} {torch.compiler.is_dynamo_compiling()}")
            return make_boxed_func(made)

        return compile_graph

    return with_gradients(graph, inputs, fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))


def graph_of(take: Callable[[fx.Graph], fx.Node]) -> fx.GraphModule:
    """What Dynamo would give for the exponential of `take`'s node."""
    graph = fx.Graph()
    graph.output((graph.call_function(torch.exp, (take(graph),)),))
    return fx.GraphModule({}, graph)


def test_both_compilers_are_asked_and_gradients_are_right() -> None:
    seen: list[str] = []
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    (y,) = traced(graph_of(lambda graph: graph.placeholder("x")), [x], seen)(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close((y, gradient), (x.exp(), x.exp()))
    assert seen == ["forward False", "backward False"]


def test_inputs_may_be_in_a_list() -> None:
    seen: list[str] = []
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    graph = graph_of(lambda graph: graph.call_function(operator.getitem, (graph.placeholder("xs"), 0)))
    (y,) = traced(graph, [[x]], seen)([x])
    torch.testing.assert_close(y, x.exp())
    assert seen == ["forward False"]


@pytest.mark.parametrize("kept", [False, True])
def test_graphs_are_printed_for_logs_that_are_kept(kept: bool) -> None:
    printed: list[fx.GraphModule] = []
    show = unreplaced(fx.GraphModule, "print_readable")

    def count(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> str:
        printed.append(graph)
        return show(graph, *args, **kwargs)

    handlers = [logging.NullHandler()] if kept else []
    x = torch.randn(5, requires_grad=True)
    with mock.patch.object(aot.trace_log, "handlers", handlers), replaced(fx.GraphModule, "print_readable", count):
        traced(graph_of(lambda graph: graph.placeholder("x")), [x], [])(x)
    assert bool(printed) == kept


def test_graphs_are_printed_for_who_asks_by_name() -> None:
    log = logging.getLogger("torch._functorch._aot_autograd.graph_compile.__aot_graphs")
    before = log.level
    try:
        log.setLevel(logging.INFO)
        with mock.patch.object(aot.trace_log, "handlers", []), aot._unread():
            assert "forward" in graph_of(lambda graph: graph.placeholder("x")).print_readable(print_output=False)
    finally:
        log.setLevel(before)


def test_nobody_writes_the_code_of_graphs_that_are_cut() -> None:
    written: list[fx.Graph] = []
    cut, write = joint.min_cut_rematerialization_partition, fx.Graph.python_code

    def count(graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        written.append(graph)
        return write(graph, *args, **kwargs)

    def counted(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(fx.Graph, "python_code", count):
            return cut(*args, **kwargs)

    with mock.patch.object(joint, "min_cut_rematerialization_partition", counted):
        halves = graphs.step(nn.Linear(2, 2, device="meta"), (torch.empty(3, 2, device="meta"),))
    assert written == []
    assert all("return" in half.code for half in halves.values())


def test_a_step_is_traced_without_torch_inductor() -> None:
    program = """
import sys
import torch
from tests.golden_sources import graphs
graphs.step(torch.nn.Linear(2, 2, device="meta"), (torch.empty(3, 2, device="meta"),))
print([name for name in ("debug", "lowering", "pattern_matcher") if f"torch._inductor.{name}" in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_equal_operators_are_one_but_for_draws_and_signs_of_zero() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    targets = [
        (aten.add.Tensor, 0.0),
        (aten.add.Tensor, 0.0),
        (aten.add.Tensor, -0.0),
        (aten.bernoulli.p, 0.5),
        (aten.bernoulli.p, 0.5),
    ]
    nodes = [graph.call_function(target, (x, number)) for target, number in targets]
    nodes += [graph.call_function(aten.exp.default, (node,)) for node in nodes]
    for node in graph.nodes:
        node.meta["val"] = torch.empty(3, device="meta")
    total = nodes[5]
    for node in nodes[6:]:
        total = graph.call_function(aten.add.Tensor, (total, node))
        total.meta["val"] = torch.empty(3, device="meta")
    graph.output((total,))
    share_common(graph)
    graph.lint()
    kept = [node for node in nodes if node.graph is graph and node in {*graph.nodes}]
    assert kept == [nodes[place] for place in (0, 2, 3, 4, 5, 7, 8, 9)]


def test_results_that_are_returned_stay_two() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(aten.exp.default, (x,)) for _ in range(2))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(3, device="meta")
    graph.output((first, second))
    share_common(graph)
    (output,) = graph.find_nodes(op="output")
    assert output.args[0] == (first, second)
