"""Products of matrices whose rows begin anywhere: they share one padded copy, and give what they gave."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx

from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.lowering.tracer import Spec
from fusepass.compile.padded_products import pad_products
from fusepass.patterns.infer import infer

aten = torch.ops.aten
ROWS, WIDTH = 1024, 1032
"""Of which products with an odd number of some thousand columns are large."""


def graph_of(columns: int, *, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", uses: int = 3) -> fx.Graph:
    """What backward does of ``logits = x @ weight.T``, and one more product of the logits' gradient that reads its transpose."""
    graph = fx.Graph()

    def call(target: torch._ops.OpOverload, *args: object) -> fx.Node:
        made = graph.call_function(target, args)  # type: ignore[arg-type]
        made.meta["val"] = infer(target, args, {}, torch.device(device))
        return made

    given = []
    for name, shape in {
        "gradient": (ROWS, columns),
        "x": (ROWS, WIDTH),
        "weight": (columns, WIDTH),
        "other": (WIDTH, columns),
    }.items():
        given.append(graph.placeholder(name))
        given[-1].meta["val"] = Spec.described(shape, contiguous_strides(shape), dtype, torch.device(device))
    gradient, x, weight, other = given
    results = [
        call(aten.mm.default, gradient, weight),
        call(aten.mm.default, call(aten.t.default, gradient), x),
        call(aten.mm.default, other, call(aten.permute.default, gradient, [1, 0])),
        call(aten.mm.default, call(aten.transpose.int, x, 0, 1), gradient),
    ]
    graph.output(tuple(results[:uses]))
    for dead in results[uses:]:
        graph.erase_node(dead)
    return graph


def targets(graph: fx.Graph) -> Counter[object]:
    return Counter(node.target for node in graph.nodes if node.op == "call_function")


def values(graph: fx.Graph, columns: int) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(0)
    shapes = (ROWS, columns), (ROWS, WIDTH), (columns, WIDTH), (WIDTH, columns)
    given = [torch.randn(shape, generator=made).to(torch.bfloat16) for shape in shapes]
    result: tuple[torch.Tensor, ...] = fx.GraphModule({}, graph)(*given)
    return result


def test_products_of_an_odd_matrix_share_a_padded_copy() -> None:
    columns = 1037
    graph, before = graph_of(columns), graph_of(columns)
    pad_products(graph)
    # The gradient once, the weight, and the other operand of a product whose terms it is.
    assert targets(graph)[aten.constant_pad_nd.default] == 3
    for product in graph.find_nodes(op="call_function", target=aten.mm.default):
        read = {size for operand in product.args for size in operand.meta["val"].shape}
        assert not any(size % 8 for size in read)
    for found, wanted in zip(values(graph, columns), values(before, columns), strict=True):
        assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())
        torch.testing.assert_close(found, wanted, rtol=1.6e-2, atol=1e-3)


def test_what_is_described_is_what_comes() -> None:
    graph = graph_of(1037)
    pad_products(graph)
    results = graph.output_node().args[0]
    assert isinstance(results, tuple)
    for node, value in zip(results, values(graph, 1037), strict=True):
        assert isinstance(node, fx.Node)
        described = node.meta["val"]
        assert (described.shape, described.stride(), described.dtype) == (value.shape, value.stride(), value.dtype)


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(lambda: graph_of(1040), id="whole accesses"),
        pytest.param(lambda: graph_of(1037, dtype=torch.float32), id="float32"),
        pytest.param(lambda: graph_of(1037, device="cpu"), id="on a CPU"),
        pytest.param(lambda: graph_of(1037, uses=1), id="a single reader"),
        pytest.param(lambda: graph_of(37), id="small"),
    ],
)
def test_others_stay_as_they_are(graph: object) -> None:
    made = graph()  # type: ignore[operator]
    before = str(made)
    pad_products(made)
    assert str(made) == before


def test_columns_of_a_result_are_not_cut_off() -> None:
    """It would be a copy of the result, as its rows would begin anywhere."""
    graph = graph_of(1037, uses=4)
    pad_products(graph)
    (last,) = (node for node in graph.output_node().args[0][3:])  # type: ignore[index]
    assert last.args[1].op == "placeholder"
