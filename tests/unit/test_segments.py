"""Graphs of a training step in segments: what is run before and behind the others, and that all together do what the whole does."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusepass.compile import segments
from fusepass.compile.segments import find_cut, segments_of

aten = torch.ops.aten
ROWS, WIDTH = 4, 500
LARGE = 4 * ROWS * WIDTH


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LARGE", LARGE)


class Writer:
    """Writes a graph of operators on tensors that are there."""

    def __init__(self, **arguments: Tensor) -> None:
        self.graph, self.arguments = fx.Graph(), list(arguments.values())
        self.nodes = {name: self.graph.placeholder(name) for name in arguments}
        for node, value in zip(self.nodes.values(), self.arguments, strict=True):
            node.meta["val"] = value

    def __call__(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        made = self.graph.call_function(target, args)
        made.meta["val"] = target(*fx.map_arg(args, lambda node: node.meta["val"]))
        return made

    def module(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule({}, self.graph)


def run_segments(module: fx.GraphModule, arguments: Sequence[Tensor], visible: int = sys.maxsize) -> segments.Segments:
    """The segments, which give what `module` does."""
    wanted = module(*arguments)
    cut = find_cut(module.graph, visible)
    assert cut is not None
    made = segments_of(module, cut)
    given, early = made.begin(arguments)
    found = made.end(arguments, early, made.body(given))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    return made


def backward() -> Writer:
    return Writer(x=torch.rand(ROWS, 8), weight=torch.rand(WIDTH, 8), tangents_1=torch.rand(ROWS, WIDTH))


def test_what_reads_a_large_gradient_comes_first() -> None:
    write = backward()
    x, weight, gradient = write.nodes.values()
    padded = write(aten.constant_pad_nd.default, gradient, [0, 4])
    inner = write(aten.mm.default, write(aten.slice.Tensor, padded, 1, 0, WIDTH), weight)
    outer = write(aten.mm.default, write(aten.t.default, gradient), x)
    rest = write(aten.mul.Tensor, write(aten.tanh.default, x), inner)
    made = run_segments(write.module(rest, outer), write.arguments)
    assert (made.early, made.late, made.unread) == ([1], [], [1, 2])
    given, _ = made.begin(write.arguments)
    assert [tuple(each.shape) for each in given] == [(ROWS, 8), (0,), (0,), (ROWS, 8)]


def test_an_operator_of_several_results_is_in_one_segment() -> None:
    write = backward()
    x, _, gradient = write.nodes.values()
    both = write(aten.var_mean.correction, gradient, [1])
    variance, mean = (write(operator.getitem, both, place) for place in range(2))
    made = run_segments(
        write.module(write(aten.mul.Tensor, x, write(aten.unsqueeze.default, mean, 1)), variance), write.arguments
    )
    assert made.early == [1]


@pytest.mark.parametrize("case", ["it gives as much", "others come before", "it draws", "small"])
def test_gradients_are_copied_where_nothing_is_won(case: str) -> None:
    write = backward()
    x, weight, gradient = write.nodes.values()
    match case:
        case "it gives as much":
            most = write(aten.exp.default, write(aten.slice.Tensor, gradient, 1, 0, 400))
            results = [write(aten.mul.Tensor, most, write(aten.sum.dim_IntList, x, [1], True))]
        case "others come before":
            value = x
            for _ in range(20):
                value = write(aten.tanh.default, value)
            results = [write(aten.mm.default, write(aten.t.default, gradient), value)]
        case "it draws":
            results = [write(aten.mm.default, write(aten.bernoulli.p, gradient, 0.5), weight)]
        case _:
            gradient.meta["val"] = torch.rand(ROWS, 8)
            results = [write(aten.mul.Tensor, gradient, x)]
    write.graph.output(tuple(results))
    assert find_cut(write.graph, sys.maxsize) is None


def test_what_makes_a_large_result_comes_last() -> None:
    write = Writer(x=torch.rand(ROWS, 8), weight=torch.rand(8, WIDTH))
    x, weight = write.nodes.values()
    saved = write(aten.tanh.default, x)
    logits = write(aten.view.default, write(aten.mm.default, saved, weight), [2, 2, WIDTH])
    module = write.module(logits, write(aten.sum.default, x), saved)
    made = run_segments(module, write.arguments, visible=2)
    assert (made.head, made.early, made.late, made.asked) == (None, [], [0], 1)
    assert made.body([*write.arguments])[0] is None


@pytest.mark.parametrize("case", ["saved", "read", "nothing is saved", "written"])
def test_results_are_copied_that_backward_or_others_read(case: str) -> None:
    write = Writer(x=torch.rand(ROWS, 8), weight=torch.rand(8, WIDTH))
    x, weight = write.nodes.values()
    logits = write(aten.mm.default, x, weight)
    results = [logits, write(aten.sum.default, logits) if case == "read" else write(aten.sum.default, x)]
    results += [] if case == "nothing is saved" else [logits if case == "saved" else x]
    if case == "written":  # behind the product, which would read what was written
        write(aten.add_.Tensor, weight, 1.0)
    write.graph.output(tuple(results))
    assert find_cut(write.graph, 2) is None
