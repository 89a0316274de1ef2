"""Each legality check refuses what it is for, and without it that is let through."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusepass.codegen.lowering import registry
from fusepass.patterns import legality, region_legality
from fusepass.patterns.legality import Refusal, node_refusal
from fusepass.patterns.opclass import OpClass, classify
from fusepass.patterns.partition import Partition, partition
from fusepass.patterns.pattern import Pattern, register, unregister
from tests.support.aten import traced

aten = torch.ops.aten


def describe(**options: Any) -> torch.Tensor:
    """A fake 4 x 8 tensor, on whatever device."""
    with FakeTensorMode():
        return torch.empty(options.pop("shape", (4, 8)), **options)


def call(target: OpOverload, *args: Any, gives: Any = None, **kwargs: Any) -> fx.Node:
    """A call of `target`; fake tensors among `args` become inputs of the graph. It gives a matrix unless told."""
    graph = fx.Graph()
    given = []
    for number, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            place = graph.placeholder(f"x{number}")
            place.meta["val"] = arg
            given.append(place)
        else:
            given.append(arg)
    node = graph.call_function(target, tuple(given), kwargs)
    node.meta["val"] = describe() if gives is None else gives
    return node


def with_users(node: fx.Node, *positions: int) -> fx.Node:
    """`node`, with the results at `positions` used."""
    for position in positions:
        item = node.graph.call_function(operator.getitem, (node, position))
        node.graph.output(item)
    return node


def constant_copy() -> fx.Node:
    graph = fx.Graph()
    constant = graph.get_attr("_tensor_constant0")
    constant.meta["val"] = describe(shape=())
    node = graph.call_function(aten.lift_fresh_copy.default, (constant,))
    node.meta["val"] = describe(shape=())
    return node


def tuple_user() -> fx.Node:
    node = call(aten.max.dim, describe(), 1, gives=(describe(), describe()))
    node.graph.output(node)
    return node


def no_result() -> fx.Node:
    node = call(aten._assert_tensor_metadata.default, describe())
    node.meta["val"] = None
    return node


def filled_elsewhere() -> fx.Node:
    node = call(aten.empty_like.default, describe())
    node.graph.call_function(aten.bernoulli.p, (node, 0.5))
    return node


def packed(node: fx.Node) -> fx.Node:
    node.meta[legality.PACKED] = 0
    return node


def symbolic() -> torch.Tensor:
    sizes = ShapeEnv()
    with FakeTensorMode(shape_env=sizes):
        return torch.empty(sizes.create_unbacked_symint(), 8)


NODES: dict[str, tuple[Callable[[], fx.Node], str]] = {
    "no_write": (lambda: call(aten.add_.Tensor, describe(), 1), "writes to its argument"),
    "no_random_numbers": (lambda: call(aten.rand_like.default, describe()), "draws random numbers"),
    "no_host_synchronisation": (lambda: call(aten.nonzero.default, describe()), "is needed on the host"),
    "within_reach": (lambda: call(aten.argsort.default, describe(), 0), "elements change places by their values"),
    "initialised": (filled_elsewhere, "no values yet"),
    "steps_as_eager": (
        lambda: call(aten.linspace.Tensor_Scalar, describe(shape=()), 3, 8, gives=describe(dtype=torch.int64)),
        "whole numbers",
    ),
    "single_arguments": (no_result, "something else than tensors"),
    "single_results": (tuple_user, "used as a tuple"),
    "one_device": (
        lambda: call(aten.add.Tensor, describe(), describe(device="cuda"), gives=describe(device="cuda")),
        "works on cpu and cuda",
    ),
    "no_constant": (constant_copy, "a constant"),
    "single_gradient": (
        lambda: with_users(
            call(
                aten.convolution_backward.default,
                *(describe(shape=(2, 4, 3, 3)), describe(shape=(2, 4, 5, 5)), describe(shape=(4, 4, 3, 3)), [4]),
                *([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]),
                gives=(describe(shape=(2, 4, 5, 5)), describe(shape=(4, 4, 3, 3)), describe(shape=(4,))),
            ),
            1,
        ),
        "which the library computes together",
    ),
    "known_neighbours": (
        lambda: call(
            aten.upsample_nearest1d.default, describe(shape=(1, 2, 14)), [46], gives=describe(shape=(1, 2, 46))
        ),
        "which neighbour is the nearest",
    ),
    "understood_view": (lambda: call(aten.as_strided.default, describe(), [4], [1]), "memory beside its input"),
    "no_packed": (lambda: packed(call(aten.relu.default, describe())), "whose weights are laid out once"),
    "static_shape": (lambda: call(aten.relu.default, symbolic()), "a shape is symbolic"),
    "not_empty": (lambda: call(aten.relu.default, describe(shape=(4, 0))), "a tensor is empty"),
    "dense_layout": (
        lambda: call(aten.relu.default, torch.eye(3).to_sparse(), gives=describe()),
        "layout sparse_coo",
    ),
    "no_lazy_sign": (
        lambda: call(aten.relu.default, torch._neg_view(torch.ones(4, 8)), gives=describe()),
        "a tensor is lazily negated",
    ),
    "supported_dtype": (
        lambda: call(aten.exp.default, describe(dtype=torch.complex64)),
        "element type complex64 has no generated code",
    ),
    "supported_device": (
        lambda: call(aten.exp.default, describe(device="meta"), gives=describe(device="meta")),
        "device meta has no generated code",
    ),
}


def names(function: Callable[..., Any], *inputs: torch.Tensor) -> list[str]:
    return [region.name for region in partition(traced(function, *inputs)).regions]


def check_no_cycle() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp().relu()
        return (y + torch.special.bessel_j0(y)).tanh()

    assert names(function, torch.randn(4, 8)) == ["exp_relu", "add_tanh"]


def check_one_anchor() -> None:
    everything = frozenset(OpClass)
    register(Pattern("greedy", frozenset({OpClass.ANCHOR}), everything, everything, 2, "takes all it can"))
    try:
        parts = partition(traced(lambda x: (x @ x).relu() @ x, torch.randn(8, 8)))
    finally:
        unregister("greedy")
    assert [region.name for region in parts.regions] == ["mm_relu"]
    assert [refusal.reason for refusal in parts.refusals] == ["a region has one convolution or matrix product"]


def check_anchor_first() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.relu()
        return y @ x + y

    parts = partition(traced(function, torch.randn(8, 8)))
    assert [region.name for region in parts.regions] == ["mm_add"]
    assert [refusal.node for refusal in parts.refusals] == ["relu"]


def check_anchor_soon() -> None:
    """As the gradient of tied weights: that of the head could be there long before that of the embedding."""

    def joins(columns: int, operators: int) -> bool:
        def function(logits: torch.Tensor, features: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            head = logits @ features
            for _ in range(operators):
                x = torch.sort(x, 0).values  # runs as it is
            return (head + x).tanh()

        parts = partition(traced(function, *map(torch.empty, ((8192, columns), (columns, 4), (8192, 4)))))
        return "mm_add_tanh" in [region.name for region in parts.regions]

    assert joins(64, 20)
    assert joins(4096, 2)
    assert not joins(4096, 20)


def check_not_too_many_ops() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(region_legality.MOST_OPS + 5):
            x = x.sin()
        return x

    parts = partition(traced(function, torch.randn(4)))
    assert [len(region.nodes) for region in parts.regions] == [region_legality.MOST_OPS, 5]


def check_not_too_many_arguments() -> None:
    def function(*inputs: torch.Tensor) -> torch.Tensor:
        total = inputs[0]
        for value in inputs[1:]:
            total = total + value
        return total

    parts = partition(traced(function, *(torch.randn(4) for _ in range(100))))
    assert sum(len(region.nodes) for region in parts.regions) == 99
    for region in parts.regions:
        assert len(region.inputs) + len(region.outputs) <= region_legality.MOST_ARGUMENTS


def check_reads_a_tensor() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.full((4, 8), 2.0).exp().tanh(), x

    parts: Partition = partition(traced(function, torch.randn(2)))
    assert parts.regions == ()
    assert {refusal.reason for refusal in parts.refusals} == {"the region would read no tensor"}


REGIONS: dict[str, Callable[[], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_no_cycle,
        check_one_anchor,
        check_anchor_first,
        check_anchor_soon,
        check_not_too_many_ops,
        check_not_too_many_arguments,
        check_reads_a_tensor,
    )
}
TABLES = (
    (legality, "NODE_CHECKS"),
    (legality, "TENSOR_CHECKS"),
    (region_legality, "REGION_CHECKS"),
    (region_legality, "FINAL_CHECKS"),
)


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Take the check called `name` out of its table."""
    for module, table in TABLES:
        kept = tuple(check for check in getattr(module, table) if check.__name__ != name)
        monkeypatch.setattr(module, table, kept)


def test_every_check_is_tested() -> None:
    listed = [check.__name__ for module, table in TABLES for check in getattr(module, table)]
    assert sorted(listed) == sorted([*NODES, *REGIONS])


@pytest.mark.parametrize("name", NODES)
def test_an_operator_is_refused_with_its_reason(name: str) -> None:
    make, reason = NODES[name]
    node = make()
    refusal = node_refusal(node)
    assert isinstance(refusal, Refusal)
    assert reason in refusal.reason
    assert (refusal.node, refusal.target) == (node.name, str(node.target).rpartition(".")[0])


@pytest.mark.parametrize("name", NODES)
@pytest.mark.invariant(9)
def test_without_the_check_the_operator_is_let_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NODES[name][0]()
    without(monkeypatch, name)
    assert node_refusal(node) is None


@pytest.mark.parametrize("name", REGIONS)
def test_a_region_stays_legal(name: str) -> None:
    REGIONS[name]()


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.invariant(9)
def test_without_the_check_the_region_would_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, name)
    with pytest.raises(AssertionError):
        REGIONS[name]()


def test_a_number_on_the_cpu_may_join_work_on_a_gpu() -> None:
    graph = fx.Graph()
    x, number = graph.placeholder("x"), graph.get_attr("_tensor_constant0")
    x.meta["val"], number.meta["val"] = describe(device="cuda"), describe(shape=())
    node = graph.call_function(aten.minimum.default, (x, number))
    node.meta["val"] = describe(device="cuda")
    assert node_refusal(node) is None
    number.meta["val"] = describe(shape=(8,))
    refusal = node_refusal(node)
    assert refusal is not None
    assert "works on cpu and cuda" in refusal.reason


def test_unused_positions_of_maxima_do_not_matter() -> None:
    gives = (describe(), describe(dtype=torch.int64))
    node = call(aten.max_pool2d_with_indices.default, describe(), [2, 2], gives=gives)
    assert node_refusal(with_users(node, 0)) is None


class _Words:
    """A vocabulary of the given operators."""

    def __init__(self, *targets: OpOverload) -> None:
        self.targets = targets

    def supports(self, target: OpOverload) -> bool:
        return target in self.targets


def classes(function: Callable[..., Any], *inputs: torch.Tensor) -> list[OpClass | str]:
    nodes = [node for node in traced(function, *inputs).graph.nodes if isinstance(node.target, OpOverload)]
    found = [classify(node, registry) for node in nodes]
    return [each.reason if isinstance(each, Refusal) else each for each in found]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.nn.functional.gelu(x), OpClass.POINTWISE),
        (lambda x: torch.nn.functional.mish(x), OpClass.POINTWISE),
        (lambda x: x.t(), OpClass.VIEW),
        (lambda x: x.expand(2, 4, 8), OpClass.VIEW),
        (lambda x: torch.cat([x, x]), OpClass.POINTWISE),
        (lambda x: x.amax(1), OpClass.REDUCTION),
        (lambda x: x.logsumexp(1), OpClass.REDUCTION),
        (lambda x: x.std(), OpClass.REDUCTION),
        (lambda x: x.softmax(1), OpClass.NORMALISATION),
        (lambda x: torch.nn.functional.layer_norm(x, (8,)), OpClass.NORMALISATION),
        (lambda x: torch.nn.functional.group_norm(x, 2), OpClass.NORMALISATION),
        (lambda x: torch.nn.functional.avg_pool2d(x[None], 2), OpClass.POOLING),
        (lambda x: x @ x.t(), OpClass.ANCHOR),
        (lambda x: x.cumsum(0), OpClass.SCAN),
        (lambda x: x.argsort(0), "a sort: elements change places by their values"),
        (lambda x: x.sort(), "a sort: elements change places by their values"),
        (lambda x: torch.polygamma(2, x), "no generated code for it"),
        (lambda x: x.to(torch.complex64), "element type complex64 has no generated code"),
    ],
)
def test_classes(function: Callable[..., Any], expected: OpClass | str) -> None:
    assert classes(function, torch.randn(4, 8))[-1] == expected


def test_what_is_not_in_the_vocabulary_is_decomposed_or_refused() -> None:
    (node,) = (n for n in traced(lambda x: x.softmax(1), torch.randn(4, 8)).graph.nodes if n.op == "call_function")
    refusal = classify(node, _Words())
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith("no generated code for ")
    assert (refusal.node, refusal.target) == ("_softmax", "aten._softmax")


@pytest.mark.parametrize(("training", "reason"), [(True, "writes to its argument"), (False, None)])
def test_running_statistics_are_written_though_no_schema_says_so(training: bool, reason: str | None) -> None:
    statistics = [describe(shape=(8,)) for _ in range(4)]
    node = call(aten.cudnn_batch_norm.default, describe(), *statistics, training, 0.1, 1e-5)
    assert legality.no_write(node) == reason
