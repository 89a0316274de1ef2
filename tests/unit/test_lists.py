"""Lists of tensors: equal chains over many tensors are one region with one kernel, on a CPU and as CUDA; what is no member stays an operator on lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fusepass.autotune.lists import list_candidate
from fusepass.autotune.work import Work
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.search.candidate import Candidate
from fusepass.compile.multiply_add import spell_out
from fusepass.compile.splice import subgraph
from fusepass.compile.writes import updates_of
from fusepass.config import override
from fusepass.patterns.dataflow import remove_dead
from fusepass.patterns.lists import LEAST, LISTS, find_lists
from fusepass.patterns.partition import Partition, partition
from fusepass.training.backend import Backend
from tests import compile_cuda
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import memory_of, tensor_of

aten = torch.ops.aten
H200 = DeviceFacts.h200()

SHAPES = [(3, 5), (9000,), (2, 3, 4, 4), (1,), (7,)]
"""Of the members: one has more than a block does, one lies channels last."""

Values = list[Tensor]


def _values(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Values:
    values = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    return [each.contiguous(memory_format=torch.channels_last) if each.dim() == 4 else each for each in values]


def _adam(p: Values, g: Values, m: Values, v: Values, steps: Values, rate: Tensor) -> tuple[Values, ...]:
    """As `torch.optim.AdamW` has it, but that counts are not kept."""
    m = torch._foreach_add(torch._foreach_mul(m, 0.9), g, alpha=0.1)
    v = torch._foreach_add(torch._foreach_mul(v, 0.99), torch._foreach_mul(g, g), alpha=0.01)
    correction = torch._foreach_sqrt(torch._foreach_neg(torch._foreach_sub(torch._foreach_pow(0.99, steps), 1)))
    root = torch._foreach_add(torch._foreach_div(torch._foreach_sqrt(v), correction), 1e-8)
    new = torch._foreach_add(torch._foreach_mul(p, 0.9), torch._foreach_div(torch._foreach_mul(m, rate), root))
    torch._foreach_copy_(p, new)
    return m, v


def _arguments(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    steps = [torch.tensor(3.0 + number) for number in range(len(SHAPES))]
    squares = [each.square() for each in _values()]
    return _values(dtype), _values(dtype), _values(), squares, steps, torch.tensor(-0.01)


def _graph(function: Callable[..., Any], *arguments: Any) -> fx.GraphModule:
    flat, spec = pytree.tree_flatten(arguments)

    def called(*leaves: Tensor) -> Any:
        return pytree.tree_leaves(function(*pytree.tree_unflatten(leaves, spec)))

    functional = torch.func.functionalize(called, remove="mutations_and_views")
    graph = make_fx(functional, tracing_mode="fake")(*flat)
    remove_dead(graph.graph)
    return graph


def _parts(function: Callable[..., Any], *arguments: Any) -> tuple[fx.GraphModule, Partition]:
    graph = _graph(function, *arguments)
    found = partition(graph, lists=find_lists(graph.graph))
    graph.graph.lint()
    return graph, found


def _work(graph: fx.GraphModule, parts: Partition) -> Work:
    (region,) = [each for each in parts.regions if each.members]
    return Work(region, subgraph(graph, region), {}, updates=updates_of(graph.graph, parts.regions).get(region, {}))


def _emulated(work: Work, candidate: Candidate, arguments: Any, shift: int) -> list[Tensor]:
    placeholders = {node.name: value for node, value in zip(_inputs(work), pytree.tree_leaves(arguments), strict=True)}
    outline = candidate.generated.outline
    given = {name: memory_of(placeholders[name]) for name in outline.inputs}
    results = emulate(outline, candidate.generated.source, given, shift=shift, in_place=True)
    return [tensor_of(results[name], outline.buffer(name)) for name in outline.outputs]


def _inputs(work: Work) -> list[fx.Node]:
    return list(work.region.inputs[0].graph.find_nodes(op="placeholder"))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_kernel_goes_over_all_members(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    arguments = _arguments(dtype)
    graph, parts = _parts(_adam, *arguments)
    work = _work(graph, parts)
    assert len(work.region.members) == len(SHAPES)
    assert len(work.updates) == len(SHAPES)  # parameters are written where they are
    candidate = list_candidate(work, H200)
    compile_cuda.keep(candidate.generated.source)
    position = {node: number for number, node in enumerate(graph.graph.output_node().args[0])}
    writes = {work.region.outputs[number]: write for number, write in work.updates.items()}
    for shift in (0, 1):
        results = _emulated(work, candidate, arguments, shift)
        twice = pytree.tree_map(lambda each: each.double().clone(), arguments)
        leaves = pytree.tree_leaves(twice)
        exact = graph(*leaves)
        inputs = dict(zip(_inputs(work), leaves, strict=True))
        for node, result in zip(work.region.outputs, results, strict=True):
            want = inputs[writes[node].args[0]] if node in writes else exact[position[node]]
            bound = 1e-2 if node.meta["val"].dtype is torch.bfloat16 else 2e-6
            torch.testing.assert_close(result.double(), want, rtol=bound, atol=bound)


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=Backend("graph", {"tune": "off", **options}, observe=_reports.append))


_reports: list[Any] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    _reports.clear()


def _exchange(x: Values, y: Values) -> None:
    """Each is made of the other's old value."""
    new = [torch.tanh(each) * 2 for each in y]
    torch._foreach_copy_(y, torch._foreach_mul(x, 3.0))
    torch._foreach_copy_(x, new)


def _norms_between(x: Values, y: Values) -> None:
    """What comes before the norm and what comes behind it cannot run as one."""
    torch._foreach_mul_(x, y)
    torch._foreach_add_(x, 1.0)
    norm = torch.stack(torch._foreach_norm(x)).sum()
    torch._foreach_div_(x, norm)
    torch._foreach_sub_(y, x)


def _loops(x: Values, y: Values) -> None:
    for one, other in zip(x, y, strict=True):
        one.mul_(0.9).addcmul_(other, other, value=0.1)


FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "each made of the other": (_exchange, 1),
    "a norm in between": (_norms_between, 2),
    "a loop over tensors": (_loops, 1),
}
"""Functions of two lists, and how many lists of operators each has."""


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tensors_are_written_as_eager_writes_them(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, count = FUNCTIONS[name]
    x, y = _values(dtype), _values(dtype)
    exact = [[each.double() for each in values] for values in (x, y)]
    addresses = [each.data_ptr() for each in (*x, *y)]
    with torch.no_grad():
        _compiled(function)(x, y)
        function(*exact)
    for found, want in zip((*x, *y), (*exact[0], *exact[1]), strict=True):
        bound = 4e-3 if dtype is torch.float16 else 2e-6
        torch.testing.assert_close(found.double(), want, rtol=bound, atol=bound)
    assert addresses == [each.data_ptr() for each in (*x, *y)]
    (compiled,) = _reports
    regions = [region for region in compiled.report.regions if region.pattern == LISTS.name]
    assert len(regions) == count
    assert all("list of 5 members" in region.kernels[0].schedule for region in regions)


def test_what_a_kernel_cannot_read_stays_an_operator_on_lists() -> None:
    torch.manual_seed(0)
    x, y = _values(), _values()
    x[1] = torch.randn(9000, 2)[:, 0]  # with gaps
    exact = [[each.double() for each in values] for values in (x, y)]

    def function(x: Values, y: Values) -> None:
        torch._foreach_mul_(x, y)
        torch._foreach_add_(x, 1.0)

    graph, parts = _parts(function, x, y)
    (region,) = parts.regions
    assert len(region.members) == len(SHAPES) - 1
    left = [node for node in graph.graph.nodes if str(node.target).startswith("aten._foreach_")]
    assert [len(node.args[0]) for node in left] == [1, 1]
    with torch.no_grad():
        _compiled(function)(x, y)
        function(*exact)
    for found, want in zip(x, exact[0], strict=True):
        torch.testing.assert_close(found.double(), want, rtol=2e-6, atol=2e-6)


def _one_operator(x: Values, y: Values) -> None:
    torch._foreach_add_(x, y)


def _few(x: Values, y: Values) -> None:
    torch._foreach_add_(x[: LEAST - 1], y[: LEAST - 1])
    torch._foreach_mul_(x[: LEAST - 1], 2.0)


def _one_for_all(x: Values, y: Values) -> list[Tensor]:
    """Every operator reads what the others made."""
    total = y[0].sum()
    return [total := (each * total).sum() for each in x]


@pytest.mark.parametrize("function", [_one_operator, _few, _one_for_all])
def test_graphs_without_lists_stay_as_they_are(function: Callable[..., Any]) -> None:
    graph = _graph(function, _values(), _values())
    before = str(graph.graph)
    assert find_lists(graph.graph) == ()
    assert str(graph.graph) == before


def test_counts_of_batches_are_no_list() -> None:
    def function(counts: Values) -> None:
        for each in counts:
            each.add_(1)

    graph = _graph(function, [torch.tensor(number) for number in range(LEAST)])
    assert find_lists(graph.graph) == ()


def test_lists_can_be_switched_off() -> None:
    graph = _graph(_exchange, _values(), _values())
    before = str(graph.graph)
    with override(disable="lists"):
        assert find_lists(graph.graph) == ()
    assert str(graph.graph) == before


def test_without_a_kernel_operators_on_lists_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusepass.autotune import candidates
    from fusepass.codegen.lowering.lower import Unsupported

    def refuse(*arguments: Any) -> Any:
        raise Unsupported("nothing is expressed")

    monkeypatch.setattr(candidates, "list_candidate", refuse)
    x, y = _values(), _values()
    want = [each.double() * other.double() + 1 for each, other in zip(x, y, strict=True)]

    def function(x: Values, y: Values) -> None:
        torch._foreach_mul_(x, y)
        torch._foreach_add_(x, 1.0)

    with torch.no_grad(), pytest.warns(UserWarning, match="nothing is expressed"):
        _compiled(function)(x, y)
    for found, exact in zip(x, want, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-6)
    (compiled,) = _reports
    refused = [each.target for each in compiled.report.refusals if "foreach" in each.target]
    assert refused == ["aten._foreach_mul", "aten._foreach_add"]


def test_multiply_adds_are_spelled_out() -> None:
    from torch._inductor import inductor_prims  # registers them

    x, y, z = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)

    def function(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return inductor_prims.fma(x, y, z), inductor_prims.fma(x, 0.5, z)

    graph = make_fx(function)(x, y, z)
    spell_out(graph.graph)
    graph.recompile()
    assert "prims.fma" not in graph.code
    for found, want in zip(graph(x, y, z), (z + x.double() * y, z + x.double() * 0.5), strict=True):
        torch.testing.assert_close(found.double(), want.double(), rtol=2e-6, atol=2e-6)
