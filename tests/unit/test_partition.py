"""Which regions come out of a graph, what goes in and out of them, and that running them changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fusepass.codegen.lowering.lower import lower
from fusepass.compile.splice import subgraph
from fusepass.config import override
from fusepass.patterns.opclass import OpClass
from fusepass.patterns.ordering import execution_order
from fusepass.patterns.partition import Partition, Region, partition
from fusepass.patterns.pattern import Pattern, patterns, register, unregister
from tests.support.aten import exported, run_regions, traced

Layers = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


class Model(nn.Module):
    """Modules, and a function of them and the inputs."""

    def __init__(self, call: Layers, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.call = call

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.call(*self.parts, *inputs)


def names(parts: Partition) -> list[str]:
    return [region.name for region in parts.regions]


def reasons(parts: Partition) -> dict[str, str]:
    return {refusal.node: refusal.reason for refusal in parts.refusals}


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


MODELS = {
    "anchor, norm, pointwise": (
        Model(lambda conv, norm, x: F.gelu(norm(conv(x))) * 2, nn.ConvTranspose3d(3, 4, 2, 2), nn.LayerNorm(8)),
        image(2, 3, 4, 4, 4),
        [("conv_transpose3d_layer_norm_gelu_mul", "anchor", 5, 1)],
    ),
    "running statistics leave the region": (
        Model(lambda conv, norm, x: norm(conv(x)).relu(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
        image(2, 3, 8, 8),
        [("conv2d_batch_norm_relu", "anchor", 7, 3)],
    ),
    "batch norm in eval mode": (
        Model(lambda conv, norm, x: norm(conv(x)).relu(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(),
        image(2, 3, 8, 8),
        [("conv2d_batch_norm_relu", "anchor", 7, 1)],
    ),
    "a branch that running statistics normalise": (
        Model(
            lambda a, b, m, n, x: (m(a(x)) + n(b(x))).relu(),
            *(nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)),
        ).eval(),
        image(2, 3, 8, 8),
        [("conv2d_batch_norm_batch_norm_add_relu", "anchor", 12, 1)],
    ),
    "two anchors": (
        Model(lambda a, b, x: torch.logsumexp(b(torch.sigmoid(a(x))), 1), nn.Linear(8, 8), nn.Linear(8, 8)),
        image(4, 8),
        [("linear_sigmoid", "anchor", 3, 1), ("linear_logsumexp", "anchor", 3, 1)],
    ),
    "pooling and its values": (
        Model(lambda x: F.max_pool2d(x.relu(), 2).tanh()),
        image(1, 2, 8, 8),
        [("relu_max_pool2d_tanh", "pooling", 1, 1)],
    ),
    "one normalisation": (Model(lambda x: F.softmax(x, 1)), image(4, 8), [("softmax", "normalisation", 1, 1)]),
    "one pooling": (Model(lambda x: F.avg_pool2d(x, 2)), image(1, 2, 8, 8), [("avg_pool2d", "pooling", 1, 1)]),
    "one large reduction": (Model(lambda x: x.sum(1)), image(512, 512), [("sum", "reduction", 1, 1)]),
    "one small reduction": (Model(lambda x: x.sum(1)), image(4, 4), []),
    "one pointwise operator": (Model(lambda x: x.relu()), image(4, 8), []),
    "an operand used twice": (Model(lambda x: (x * x).exp()), image(4, 8), [("mul_exp", "pointwise", 1, 1)]),
    "a diamond": (
        Model(lambda x: (lambda y: y.exp() + y.tanh())(x.relu())),
        image(4, 8),
        [("relu_exp_tanh_add", "pointwise", 1, 1)],
    ),
    "sibling reductions": (
        Model(lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)),
        image(4, 8),
        [("mean_sub_std_div", "reduction", 1, 1)],
    ),
    "a chain of reductions": (
        Model(lambda x: torch.logsumexp(x.exp().mean(2), 1).relu()),
        image(4, 8, 8),
        [("exp_mean_logsumexp_relu", "reduction", 1, 1)],
    ),
    "largest value and its position": (
        Model(lambda x: (lambda m: (m.values.exp(), m.indices))(x.tanh().max(1))),
        image(4, 8),
        [("tanh_max_exp", "reduction", 1, 2)],
    ),
    "halves of one tensor": (
        Model(lambda x: (lambda a, b: a * b.sigmoid())(*x.chunk(2, 1))),
        image(2, 8),
        [("sigmoid_mul", "pointwise", 1, 1)],
    ),
    "a residual": (
        Model(
            lambda a, b, x: (lambda y: b(y).relu() + y)(a(x).relu()),
            nn.Conv2d(3, 3, 3, padding=1),
            nn.Conv2d(3, 3, 3, padding=1),
        ),
        image(1, 3, 8, 8),
        [("conv2d_relu", "anchor", 3, 1), ("conv2d_relu_add", "anchor", 3, 1)],
    ),
    "a value used inside and outside": (
        Model(lambda x: (lambda y: (y.exp(), torch.special.bessel_j0(y)))(x.relu() * 2)),
        image(4, 8),
        [("relu_mul_exp", "pointwise", 1, 2)],
    ),
    "the whole chain behind an anchor stays one region": (
        Model(lambda f, x: F.softmax(f(x).relu() + 1, 1).sum(0), nn.Linear(8, 8)),
        image(4, 8),
        [("linear_relu_add_softmax_sum", "anchor", 3, 1)],
    ),
    "what an anchor waits for is another region": (
        Model(lambda f, x: (lambda y: f(y) + y)(x.relu().tanh()), nn.Linear(8, 8)),
        image(4, 8),
        [("relu_tanh", "pointwise", 1, 1), ("linear_add", "anchor", 3, 1)],
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_regions(case: str) -> None:
    model, x, expected = MODELS[case]
    graph, arguments = exported(model, x)
    wanted = graph(*arguments)
    parts = partition(graph)
    found = [(region.name, region.pattern, len(region.inputs), len(region.outputs)) for region in parts.regions]
    assert found == expected
    results = run_regions(graph, parts, arguments)
    assert len(results) == len(wanted)
    for result, value in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, value, rtol=0, atol=0)


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.invariant(7)
def test_every_operator_is_in_a_region_or_refused(case: str) -> None:
    model, x, _ = MODELS[case]
    graph, _ = exported(model, x)
    parts = partition(graph)
    inside = [node for region in parts.regions for node in region.nodes]
    assert len(inside) == len(set(inside))
    refused = {refusal.node for refusal in parts.refusals}
    views = {"t", "view", "split"}
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            known = node in inside, node.name in refused, str(node.target).split(".")[1] in views
            assert any(known), node
            assert known[:2] != (True, True), node


def test_bytes_of_a_chain() -> None:
    graph = traced(lambda x: (x.relu() * 2).exp(), torch.randn(4, 8))
    (region,) = partition(graph).regions
    assert region.bytes_before == 6 * 128
    assert region.bytes_after == 2 * 128
    assert region.bytes_saved == 4 * 128


def test_a_norm_is_read_twice_and_a_slice_costs_no_more_than_itself() -> None:
    (region,) = partition(traced(lambda x: F.softmax(x, 1), torch.randn(4, 8))).regions
    assert (region.bytes_before, region.bytes_after) == (3 * 128, 2 * 128)
    (region,) = partition(traced(lambda x: x[:1].relu().exp(), torch.randn(4, 8))).regions
    assert (region.bytes_before, region.bytes_after) == (4 * 32, 2 * 32)


def test_locations_name_the_line_of_the_model() -> None:
    graph, _ = exported(Model(lambda conv, x: conv(x).relu(), nn.Conv2d(3, 4, 3)), torch.randn(1, 3, 8, 8))
    (region,) = partition(graph).regions
    assert len(region.locations) == len(region.nodes) == 2
    for location in region.locations:
        assert location.startswith("test_partition.py:")
        assert location.endswith(" in forward") or location.endswith(" in <lambda>")


def test_names_are_unique_and_long_ones_are_cut() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(torch.special.bessel_j0(x.relu() + 1).relu() + 1)

    assert names(partition(traced(twice, torch.randn(4, 8)))) == ["relu_add", "relu_add_1"]
    long = traced(lambda x: x.relu().exp().tanh().sin().cos().neg().abs().sigmoid(), torch.randn(4))
    assert names(partition(long)) == ["relu_exp_tanh_sin_and_4_more"]


def test_patterns_can_be_disabled() -> None:
    graph = traced(lambda x: F.softmax(x.relu().exp(), 1), torch.randn(4, 8))
    with override(disable="normalisation"):
        assert names(partition(graph)) == ["relu_exp"]
    with override(disable="normalisation,pointwise"):
        assert names(partition(graph)) == []
    with override(disable="all"):
        assert names(partition(graph)) == []
    assert names(partition(graph)) == ["relu_exp_softmax"]


def test_a_user_can_add_a_pattern() -> None:
    tail = Pattern(
        name="softmax-tail",
        seed=frozenset({OpClass.NORMALISATION}),
        upstream=frozenset(),
        downstream=frozenset({OpClass.POINTWISE}),
        min_ops=2,
        why="only what follows",
    )
    register(tail)
    try:
        with pytest.raises(ValueError, match="a pattern called 'softmax-tail'"):
            register(Pattern("softmax-tail", tail.seed, tail.upstream, tail.downstream, 3, ""))
        assert patterns()[-1] is tail
        with override(disable="normalisation,pointwise"):
            parts = partition(traced(lambda x: F.softmax(x.relu(), 1).exp(), torch.randn(4, 8)))
    finally:
        unregister("softmax-tail")
    assert names(parts) == ["softmax_exp"]
    with pytest.raises(ValueError, match="min_ops"):
        Pattern("none", tail.seed, tail.upstream, tail.downstream, 0, "")


def test_partition_is_deterministic() -> None:
    model, x, _ = MODELS["a residual"]
    first, second = (partition(exported(model, x)[0]) for _ in range(2))
    assert names(first) == names(second)
    assert [[n.name for n in r.nodes] for r in first.regions] == [[n.name for n in r.nodes] for r in second.regions]


@pytest.mark.invariant(10)
def test_an_alias_that_the_caller_sees_stays_an_alias() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.relu() + 1
        return y, y.view(-1), x.t(), x.t().exp().tanh(), y.t().exp().sum()

    x = torch.randn(4, 8)
    graph = traced(function, x)
    parts = partition(graph)
    y, flat, transposed, *_ = run_regions(graph, parts, [x])
    assert flat.data_ptr() == y.data_ptr()
    assert transposed.data_ptr() == x.data_ptr()
    views = {torch.ops.aten.view.default, torch.ops.aten.t.default}
    assert parts.regions
    assert not any(node.target in views for region in parts.regions for node in region.outputs)


def test_a_view_that_two_regions_read_is_copied_for_each() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bias = y.view(1, 8)
        return torch.special.bessel_j0(x.relu() + bias), torch.special.bessel_j0(z.exp() * bias), bias

    x, y, z = torch.randn(4, 8), torch.randn(8), torch.randn(3, 8)
    graph = traced(function, x, y, z)
    parts = partition(graph)
    assert names(parts) == ["relu_add", "exp_mul"]
    for result, value in zip(run_regions(graph, parts, [x, y, z]), function(x, y, z), strict=True):
        torch.testing.assert_close(result, value, rtol=0, atol=0)
    assert all(set(node.users) <= set(r.nodes) for r in parts.regions for node in r.nodes if node not in r.outputs)


Chains = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def check_regions(function: Chains, x: torch.Tensor, y: torch.Tensor, expected: list[str]) -> None:
    """Assert that the regions of a function have these names, and give what it gives."""
    graph = traced(function, x, y)
    parts = partition(graph)
    assert names(parts) == expected
    for result, value in zip(run_regions(graph, parts, [x, y]), function(x, y), strict=True):
        torch.testing.assert_close(result, value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("chains", "shape", "expected"),
    [
        (lambda x, y: (x.relu() * 2, x.sigmoid() + 1), (1024, 512), ["relu_mul_sigmoid_add"]),
        (lambda x, y: (x.relu() * 2, y.sigmoid() + 1), (4, 8), ["relu_mul_sigmoid_add"]),
        (lambda x, y: (x.relu() * 2, y.sigmoid() + 1), (1024, 512), ["relu_mul", "sigmoid_add"]),
        (lambda x, y: (x.relu() * 2, y[:2].sigmoid() + 1), (4, 8), ["relu_mul", "sigmoid_add"]),
        (lambda x, y: (x.relu() * 2, y.t().sigmoid() + 1), (8, 8), ["relu_mul", "sigmoid_add"]),
        (lambda x, y: (torch.special.bessel_j0(x.relu() * 2).sigmoid() + 1, y), (4, 8), ["relu_mul", "sigmoid_add"]),
        (
            lambda x, y: (torch.special.bessel_j0(x.relu() * 2).sigmoid() + 1, y.tanh() * 2),
            (4, 8),
            ["relu_mul_tanh_mul", "sigmoid_add"],
        ),
        (
            lambda x, y: (
                torch.special.bessel_j0(x.relu() * 2) @ torch.special.bessel_j0(y.tanh() * 2),
                torch.special.bessel_j0(x.exp() - 1) + 1,
            ),
            (8, 8),
            ["relu_mul_tanh_mul_exp_sub"],
        ),
    ],
)
def test_chains_over_the_same_elements_are_one_region_where_it_pays(
    chains: Chains, shape: tuple[int, ...], expected: list[str]
) -> None:
    check_regions(chains, torch.randn(shape), torch.randn(shape), expected)


@pytest.mark.parametrize(
    ("function", "shape", "expected"),
    [
        (lambda x, y: (x * 2, x.sum(1)), (1024, 512), ["mul_sum"]),
        (lambda x, y: (x * 2, x.sum(1)), (4, 8), ["mul_sum"]),
        (lambda x, y: (x.sum(1), x.amax(1)), (1024, 512), ["sum_amax"]),
        (lambda x, y: (x.sigmoid(), x.tanh()), (1024, 512), ["sigmoid_tanh"]),
        (lambda x, y: (F.softmax(x, 1), x.relu(), x.argmax(1)), (1024, 512), ["softmax_relu_argmax"]),
        (lambda x, y: (x.relu() * 2, x.sum(1), x.exp() + 1), (1024, 512), ["relu_mul_sum_exp_add"]),
        (lambda x, y: (x.view(-1).relu(), x.t().sum(0)), (1024, 512), ["relu_sum"]),
        (lambda x, y: (x.relu(), y.tanh(), x + y), (1024, 512), ["relu_tanh_add"]),
        (lambda x, y: (torch.special.bessel_j0(x.relu()), x.sum(1)), (1024, 512), ["relu_sum"]),
        (lambda x, y: (F.pad(x, (1, 1)), x.half()), (1024, 512), ["pad"]),
        (lambda x, y: (x[:, :4].relu(), x[:, 4:].tanh()), (4, 8), []),
        (lambda x, y: (x[:, :4].relu() * x[:, 4:].tanh(), x.sum(1)), (4, 8), ["relu_tanh_mul_sum"]),
        (lambda x, y: (x[:, :4].relu() * x[:, :4].tanh(), x.sum(1)), (4, 8), ["relu_tanh_mul"]),
        (
            lambda x, y: (
                torch.ops.aten.mse_loss_backward(x[0, 0], x, y, 1),
                torch.ops.aten.mse_loss_backward(x[0, 0], y, x, 1),
            ),
            (1024, 512),
            ["mse_loss_backward_mse_loss_backward"],
        ),
        (lambda x, y: (x + y[:1], x[:1].sum(1), x[1:].exp()), (4, 8), []),
        (lambda x, y: (x * y[0], y[0].exp()), (4, 8), []),
        (lambda x, y: (x.relu(), x.index_select(0, y[:, 0].long())), (4, 8), ["cast_index_select"]),
        (lambda x, y: (x.relu(), x.cumsum(1), x.sum(1)), (1024, 512), ["relu_sum", "cumsum"]),
        (lambda x, y: (x @ y, x.relu()), (512, 512), []),
        (lambda x, y: (F.max_pool2d(x[None], 2), x[None].relu()), (1024, 512), ["max_pool2d"]),
        (lambda x, y: (F.interpolate(x[None], scale_factor=0.5), x.relu()), (1024, 512), ["upsample_nearest1d"]),
    ],
)
def test_what_reads_the_same_value_is_one_region(function: Chains, shape: tuple[int, ...], expected: list[str]) -> None:
    check_regions(function, torch.rand(shape), torch.rand(shape), expected)


def test_what_reads_the_same_value_and_waits_stays_apart() -> None:
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    graph = traced(lambda x: torch.special.bessel_j0(x.relu()) * x, x)
    parts = partition(graph)
    assert names(parts) == []
    assert reasons(parts)["relu"] == reasons(parts)["mul"] == "nothing beside it to fuse with"

    def crossed(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.special.bessel_j0(y.tanh()) * x, torch.special.bessel_j0(x.sigmoid()) * y

    graph = traced(crossed, x, y)
    parts = partition(graph)
    assert len(parts.regions) == 1  # either of two
    assert nx.is_directed_acyclic_graph(quotient(graph.graph, parts))
    for result, value in zip(run_regions(graph, parts, [x, y]), crossed(x, y), strict=True):
        torch.testing.assert_close(result, value, rtol=0, atol=0)


def test_a_value_that_independent_ones_read_counts_once() -> None:
    (region,) = partition(traced(lambda x: (x * 2, x.sum(1)), torch.randn(1024, 512))).regions
    whole = 4 * 1024 * 512
    assert region.pattern == "reduction"
    assert (region.bytes_before, region.bytes_after) == (3 * whole + 4096, 2 * whole + 4096)


def test_operators_of_disabled_patterns_are_no_independent_ones() -> None:
    graph = traced(lambda x: (x * 2, x.sum(1)), torch.randn(1024, 512))
    for pattern in ("reduction", "pointwise"):
        with override(disable=pattern):
            assert "mul_sum" not in names(partition(graph))
    assert names(partition(graph)) == ["mul_sum"]


def test_weights_are_transposed_inside_but_views_of_activations_stay_outside() -> None:
    graph, _ = exported(Model(lambda f, x: f(x).relu(), nn.Linear(8, 8)), torch.randn(2, 4, 8))
    (region,) = partition(graph).regions
    inside = {str(node.target) for node in region.nodes}
    assert "aten.t.default" in inside
    assert "aten.view.default" in {str(node.target) for node in region.inputs}


def test_a_view_that_the_anchor_reads_comes_from_outside() -> None:
    """Convolutional position encodings: tokens as an image, and what is convolved is also added."""

    def encode(conv: nn.Conv2d, tokens: torch.Tensor) -> torch.Tensor:
        pixels = tokens.transpose(1, 2).view(2, 4, 4, 4)
        return (conv(pixels) + pixels).relu()

    tokens = torch.randn(2, 16, 4)
    model = Model(encode, nn.Conv2d(4, 4, 3, padding=1, groups=4))
    graph, arguments = exported(model, tokens)
    parts = partition(graph)
    (region,) = parts.regions
    assert "view" in {node.name for node in region.inputs}
    lower(subgraph(graph, region), region.name, [node.name for node in region.inputs])
    (result,) = run_regions(graph, parts, arguments)
    torch.testing.assert_close(result, model(tokens), rtol=0, atol=0)


def write_after_read(x: torch.Tensor) -> torch.Tensor:
    y = x.relu().exp()
    torch.ops.aten.copy_.default(x, y * 3)
    return torch.special.bessel_j0(y).relu().tanh()


def read_after_write(x: torch.Tensor) -> torch.Tensor:
    y = x.relu().exp()
    torch.ops.aten.copy_.default(x, y * 3)
    return x.tanh() + y


def read_after_write_through_a_view(x: torch.Tensor) -> torch.Tensor:
    seen = x.view(-1)
    y = x.relu().exp()
    torch.ops.aten.copy_.default(x, y * 3)
    return seen.tanh() + y.view(-1)


@pytest.mark.parametrize("function", [write_after_read, read_after_write, read_after_write_through_a_view])
@pytest.mark.invariant(10)
def test_memory_is_written_after_earlier_and_before_later_readers(function: Layers) -> None:
    x = torch.randn(4, 8)
    graph = traced(function, x)
    mine, theirs = x.clone(), x.clone()
    parts = partition(graph)
    assert len(parts.regions) == 2
    assert reasons(parts)["copy_"] == "writes to its argument"
    torch.testing.assert_close(run_regions(graph, parts, [mine]), function(theirs), rtol=0, atol=0)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.invariant(10)
def test_random_numbers_are_drawn_in_the_same_order() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.relu().exp()
        first = torch.rand_like(x[0])
        second = torch.rand_like(x)
        return (y * second).tanh() + first

    x = torch.randn(4, 8)
    graph = traced(function, x)
    parts = partition(graph)
    torch.manual_seed(3)
    wanted = function(x)
    torch.manual_seed(3)
    torch.testing.assert_close(run_regions(graph, parts, [x]), wanted, rtol=0, atol=0)


def random_function(seed: int) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]:
    """A random graph over matrices of one shape, with operators that fuse, that do not, and that are anchors."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        draw = random.Random(seed)
        values = [x, w]
        unary = (
            torch.relu, torch.tanh, torch.t, torch.sin, torch.special.bessel_j0, lambda a: F.softmax(a, 1),
            lambda a: a - a.mean(0, keepdim=True), lambda a: a.view(2, -1).view(8, 8), lambda a: F.layer_norm(a, (8,)),
        )  # fmt: skip
        for _ in range(30):
            a, b = draw.choice(values[-6:]), draw.choice(values)
            values.append(
                draw.choice((torch.add, torch.mul, torch.mm))(a, b).tanh()
                if draw.random() < 0.4
                else draw.choice(unary)(a).contiguous()
            )
        return (*draw.sample(values, 3), values[-1])

    return function


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.invariant(8)
def test_random_graphs_keep_their_values_and_have_no_cycle(seed: int) -> None:
    inputs = [torch.randn(8, 8), torch.randn(8, 8)]
    function = random_function(seed)
    graph = traced(function, *inputs)
    parts = partition(graph)
    assert nx.is_directed_acyclic_graph(quotient(graph.graph, parts))
    for region in parts.regions:
        outside = {node for node in region.nodes if any(user not in region.nodes for user in node.users)}
        assert outside == set(region.outputs)
        assert sum(str(node.target) == "aten.mm.default" for node in region.nodes) <= 1
    for result, value in zip(run_regions(graph, parts, inputs), function(*inputs), strict=True):
        torch.testing.assert_close(result, value, rtol=0, atol=0)


def quotient(graph: fx.Graph, parts: Partition) -> nx.DiGraph[fx.Node | Region]:
    owner = {node: region for region in parts.regions for node in region.nodes}
    edges = ((owner.get(s, s), owner.get(n, n)) for n in graph.nodes for s in n.all_input_nodes)
    return nx.DiGraph((first, then) for first, then in edges if first is not then)


def test_execution_order_covers_everything_once() -> None:
    graph = traced(random_function(1), torch.randn(8, 8), torch.randn(8, 8))
    parts = partition(graph)
    order = execution_order(graph.graph, parts.regions)
    inside = {node for region in parts.regions for node in region.nodes}
    assert len(order) == len(set(order)) == len(parts.regions) + len(graph.graph.nodes) - len(inside)
    assert order[-1] is graph.graph.output_node()
