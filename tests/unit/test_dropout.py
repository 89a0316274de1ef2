"""Dropout apart from its draw: which numbers elements have, in every kernel that makes them, and which draws are one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusepass
from fusepass.autotune import tune
from fusepass.codegen.forms import Forms
from fusepass.codegen.ir.random import place
from fusepass.codegen.lowering import dropout
from fusepass.codegen.lowering.dropout import kept as computed
from fusepass.compile.dropout import Rule, rule_of, split_by
from fusepass.compile.pipeline import CompiledGraph, compile_graph
from fusepass.report.choice import EAGER, Choice
from fusepass.report.report import RegionState
from fusepass.runtime.operators import shorten
from fusepass.training import joint
from tests.support.emulate import emulate, needs_compiler
from tests.support.moved import Given, generated

aten = torch.ops.aten
kept = torch.ops.fusepass.kept.default
CPU = torch.device("cpu")
F16, F32, F64 = torch.float16, torch.float32, torch.float64
RULE = Rule(2048, {F16: 8, torch.bfloat16: 8, F32: 4, F64: 2})


def _traced(function: Callable[..., object], *inputs: Tensor) -> fx.GraphModule:
    mode = FakeTensorMode()
    with mode:
        fakes = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in inputs]
    with mode, torch.no_grad():
        return make_fx(function)(*fakes)


def _split(function: Callable[..., object], *inputs: Tensor, rule: Rule = RULE) -> fx.GraphModule:
    """The graph of a function, as on a device with `rule`."""
    graph = _traced(function, *inputs)
    split_by(rule, graph.graph, CPU)
    graph.graph.lint()
    graph.recompile()
    return graph


def _called(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def _dropped(x: Tensor, p: float = 0.3) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = aten.native_dropout.default(x, p, True)
    return found


# ---- which numbers

KNOWN = [  # from Random123, the authors' library
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_is_what_its_authors_say(counter: list[int], key: list[int], words: list[int]) -> None:
    found = dropout.philox([torch.tensor([word]) for word in counter], [torch.tensor([word]) for word in key])
    assert [int(word) for word in found] == words


@pytest.mark.parametrize("width", [2, 4, 8])
def test_elements_share_no_number(width: int) -> None:
    places = torch.stack(place(torch.arange(2**15), 512, width))
    assert len(places.unique(dim=1).t()) == 2**15
    assert places[0].max() == 511
    assert places[2].max() == (1 if width == 2 else 3)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


STATES = [(0, 0), (5, 12), (2**63 + 11, 2**34), (2**64 - 1, 2**40 + 8)]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("seed_and_offset", STATES, ids=str)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((64, 48), F32), ((37, 42), F32), ((64, 200), torch.bfloat16), ((30, 100), F16), ((100, 50), F64), ((9004,), F32)],
    ids=str,
)
@pytest.mark.invariant(33)
def test_kernels_make_the_numbers(shape: tuple[int, ...], dtype: torch.dtype, seed_and_offset: tuple[int, int]) -> None:
    count = torch.Size(shape).numel()
    x, strides = torch.zeros(shape, dtype=dtype), torch.empty(shape).stride()
    placed = (RULE.threads(count), RULE.width(dtype, count))

    def function(state: Tensor, x: Tensor) -> Tensor:
        mask = kept(state, list(shape), list(strides), 0.3, dtype, *placed)
        return torch.where(mask, x + 1, x)

    state = torch.tensor([_signed(number) for number in seed_and_offset])
    compiled = _compiled(_traced(function, state, x))
    (found,) = compiled.call(state, x)
    assert torch.equal(found != 0, computed(state, shape, strides, 0.3, dtype, *placed))
    assert [region.state for region in compiled.report.regions] == [RegionState.FUSED]
    assert abs((found != 0).float().mean().item() - 0.7) < 0.05


def _compiled(graph: fx.GraphModule, forms: Forms | None = None, tune: str = "off") -> CompiledGraph:
    graph = graph if isinstance(graph.graph.output_node().args[0], tuple | list) else _in_tuple(graph)
    with fusepass.override(tune=tune):
        return compile_graph(graph, name="dropout", forms=forms)


def _in_tuple(graph: fx.GraphModule) -> fx.GraphModule:
    output = graph.graph.output_node()
    output.args = ((output.args[0],),)
    return graph


def test_a_float64_element_is_compared_in_float64() -> None:
    state, p = torch.tensor([1, 0]), 1 - 2.0**-33 * 3
    wide = computed(state, (1 << 16,), (1,), p, F64, 2048, 2)
    assert not wide.any()  # 1 - p rounded to float32 is the same, but numbers below it are rare
    assert dropout.share_kept(0.1, F64) == 0.9
    assert dropout.share_kept(0.1, F32) == torch.tensor(0.9).item() != 0.9


# ---- graphs


def _residual(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, kept_first = _dropped(x)
    second, kept_second = _dropped(F.layer_norm(first + r, (x.shape[-1],), w) * 2, 0.1)
    return second, kept_first, kept_second


def _inputs(*shape: int, dtype: torch.dtype = F32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)]


def _from_seed(call: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    torch.manual_seed(3)
    return call(*inputs)


@pytest.mark.parametrize("last", [False, True], ids=["first", "channels last"])
@pytest.mark.parametrize("shape", [(4, 8, 6, 10), (3, 7, 5, 10)], ids=str)
def test_what_is_fused_drops_what_its_operators_do(shape: tuple[int, ...], last: bool) -> None:
    inputs = _inputs(*shape)
    if last:
        inputs[:2] = [each.to(memory_format=torch.channels_last) for each in inputs[:2]]
    graph = _split(_residual, *inputs)
    compiled = _compiled(graph)
    expected, found = _from_seed(graph, inputs), _from_seed(compiled.call, inputs)
    for mask, wanted in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(mask, wanted)
    torch.testing.assert_close(found[0], expected[0])
    (region,) = compiled.report.regions
    assert region.state is RegionState.FUSED
    assert region.name.startswith("dropout_mul_mul_add_")


def test_masks_are_left_to_eager_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an operator a mask is one kernel, too, so a trial's times are those of calls."""

    def slower(eager: object, calls: Mapping[str, object], *_: object) -> Choice:
        return Choice(EAGER, seconds=((EAGER, 1e-6), *((name, 2e-6) for name in calls)), speedup=0.5)

    monkeypatch.setattr(tune, "fastest", slower)
    inputs = _inputs(8, 12)
    graph = _split(_residual, *inputs)
    compiled = _compiled(graph, tune="fast")
    assert [region.state for region in compiled.report.regions] == [RegionState.EAGER]
    for found, expected in zip(_from_seed(compiled.call, inputs), _from_seed(graph, inputs), strict=True):
        assert torch.equal(found, expected)


def test_one_library_serves_many_sizes() -> None:
    forms, built = Forms(), set[str]()
    for rows in (64, 80, 96, 128):
        inputs = _inputs(rows, 48)
        graph = _split(_residual, *inputs)
        compiled = _compiled(graph, forms)
        for found, expected in zip(_from_seed(compiled.call, inputs), _from_seed(graph, inputs), strict=True):
            torch.testing.assert_close(found, expected)
        built |= {source.text for region in compiled.report.regions for source in region.sources}
    assert len(built) == 2  # for the first sizes alone, and for any


def test_dropouts_with_nothing_between_them_have_one_draw() -> None:
    called = _called(_split(_residual, *_inputs(64, 48)).graph)
    assert called.count(torch.ops.fusepass.draw.default) == 1
    assert called.count(kept) == 2
    assert aten.native_dropout.default not in called


@pytest.mark.invariant(33)
def test_other_random_numbers_come_between() -> None:
    def function(x: Tensor) -> Tensor:
        first = _dropped(x.tanh())[0] + torch.rand_like(x)
        return _dropped(first * 2)[0]

    graph = _split(function, torch.randn(64, 48)).graph
    order = [target for target in _called(graph) if target in (torch.ops.fusepass.draw.default, aten.rand_like.default)]
    assert order == [torch.ops.fusepass.draw.default, aten.rand_like.default, torch.ops.fusepass.draw.default]


LEFT: dict[str, tuple[Callable[[Tensor], object], Tensor]] = {
    "all dropped": (lambda x: _dropped(x.tanh(), 1.0), torch.randn(8, 6)),
    "none dropped": (lambda x: _dropped(x.tanh(), 0.0), torch.randn(8, 6)),
    "not in training": (lambda x: aten.native_dropout.default(x.tanh(), 0.3, False), torch.randn(8, 6)),
    "empty": (lambda x: _dropped(x.tanh()), torch.randn(0, 6)),
    "an odd number": (lambda x: _dropped(x.tanh()), torch.randn(7, 5)),
    "gaps": (lambda x: _dropped(x[:, ::2])[0].tanh(), torch.randn(8, 6)),
    "a type without a rule": (lambda x: _dropped(x.tanh()), torch.randn(8, 6, dtype=torch.bfloat16)),
    "between products": (lambda x: _dropped(x @ x)[0] @ x, torch.randn(8, 8)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_pytorch(name: str) -> None:
    function, x = LEFT[name]
    graph = _split(function, x, rule=Rule(2048, {F32: 4}))
    assert _called(graph.graph).count(aten.native_dropout.default) == 1
    assert kept not in _called(graph.graph)


def test_the_rule_is_tried_with_tensors_that_have_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(index: int) -> Rule:
        assert torch.ones(3).tolist() == [1, 1, 1]
        assert index == 0
        return RULE

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("fusepass.compile.dropout._tried", tried)
    with FakeTensorMode():
        assert rule_of(torch.device("cuda", 0)) is RULE
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert rule_of(torch.device("cuda", 0)) is None


def test_infinities_are_dropped_to_nan_as_by_eager() -> None:
    x = torch.full((64, 48), torch.inf)
    graph = _split(lambda x: _dropped(x.abs())[0] * 1.0, x)
    (found,) = _compiled(graph).call(x)
    assert set(found.unique().tolist()) >= {torch.inf}
    assert found.isnan().float().mean() == pytest.approx(0.3, abs=0.03)
    assert not (found == 0).any()


def test_fake_tensors_draw_nothing() -> None:
    before = torch.get_rng_state()
    with FakeTensorMode():
        for device in (CPU, torch.device("cuda", 0)):
            states = torch.ops.fusepass.draw.default([4, 8], device=device)
            assert [(state.shape, state.dtype) for state in states] == [((2,), torch.int64)] * 2
            mask = kept(states[0], [3, 8], [1, 3], 0.5, F32, 256, 4)
            assert (mask.device, mask.dtype, mask.stride()) == (device, torch.bool, (1, 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_call_draws_without_the_dispatcher() -> None:
    graph = _split(_residual, *_inputs(64, 48))
    shorten(graph)
    assert dropout.draw in _called(graph.graph)
    assert torch.ops.fusepass.draw.default not in _called(graph.graph)


def test_draws_begin_where_the_last_one_ends() -> None:
    states = dropout.states_at(2**64 - 1, 8, (0, 4, 12), CPU)
    assert [state.tolist() for state in states] == [[-1, 8], [-1, 12], [-1, 20]]


def test_draws_apart_are_eager_s() -> None:
    """Whether a call foresees them or not: on a CPU, where states are random numbers, each is drawn when its turn comes."""

    def function(x: Tensor) -> tuple[Tensor]:
        first = _dropped(x.tanh())[0] + torch.rand_like(x)
        return (_dropped(first * 2)[0],)

    inputs = [torch.randn(64, 48)]
    graph = _split(function, *inputs)
    compiled = _compiled(graph)
    for found, expected in zip(_from_seed(compiled.call, inputs), _from_seed(graph, inputs), strict=True):
        torch.testing.assert_close(found, expected)


def test_results_of_the_operator_do_not_share_memory() -> None:
    states = torch.ops.fusepass.draw.default([4, 8, 12], device=CPU)
    assert len({state.untyped_storage().data_ptr() for state in states}) == 3


# ---- gradients


def _cut(function: Callable[[Tensor], Tensor], x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[fx.Graph, fx.Graph]:
    """Forward and backward, as on a GPU with `RULE`."""
    monkeypatch.setattr(joint, "split_dropout", lambda graph: split_by(RULE, graph, CPU))
    found: list[fx.Graph] = []

    def compiler(graph: fx.GraphModule, _: object) -> Callable[..., object]:
        found.append(graph.graph)
        run: Callable[..., object] = make_boxed_func(graph.forward)
        return run

    run = aot_function(function, compiler, compiler, partition_fn=joint.minimum_cut)
    run(x.requires_grad_()).sum().backward()
    return found[0], found[1]


def test_backward_makes_the_mask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = _cut(lambda x: _dropped(x.tanh())[0].exp(), torch.randn(64, 48), monkeypatch)
    assert _called(forward).count(torch.ops.fusepass.draw.default) == 1
    assert torch.ops.fusepass.draw.default not in _called(backward)
    assert kept in _called(backward)
    saved = [node.meta["val"].dtype for node in backward.find_nodes(op="placeholder")]
    assert torch.bool not in saved
    assert torch.int64 in saved


# ---- CUDA


def _masked(x: Tensor, state: Tensor) -> Tensor:
    count = x.numel()
    mask = kept(state, [*x.shape], [*x.stride()], 0.1, x.dtype, RULE.threads(count), RULE.width(x.dtype, count))
    return x * mask * (1 / 0.9)


def _gradient(x: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    found = aten.gelu_backward.default(_masked(g, state), x)
    return found, found.sum(0)


def _normalised(x: Tensor, state: Tensor) -> Tensor:
    return F.layer_norm(x + _masked(x, state), x.shape[-1:])


def _function(x: Tensor, state: Tensor) -> Tensor:
    return torch.tanh(_masked(F.gelu(x), state))


def _plain_function(x: Tensor) -> Tensor:
    return torch.tanh(F.gelu(x) * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, F32, F64], ids=str)
@pytest.mark.parametrize("shape", [(4096, 2048), (1021, 766), (16, 512, 64)], ids=str)
def test_numbers_do_not_take_the_axes_apart(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Where an element stands among the random numbers is no place in memory: loops are as without it."""
    given, state = Given(shape, dtype), Given((2,), torch.int64)
    assert _loops(_function, given, state) == _loops(_plain_function, given)
    assert _loops(_gradient, given, given, state) == _loops(_plain_gradient, given, given)


def _loops(function: Callable[..., object], *inputs: Given) -> list[tuple[list[int], list[int]]]:
    kernels = [kernel for each in generated(function, *inputs) for kernel in each.program.kernels]
    return [([axis.size for axis in kernel.rows], [axis.size for axis in kernel.cols]) for kernel in kernels]


def _plain_gradient(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    found = aten.gelu_backward.default(g * 2, x)
    return found, found.sum(0)


@needs_compiler
@pytest.mark.parametrize("function", [_function, _gradient, _normalised])
@pytest.mark.parametrize("shape", [(64, 48), (130, 254), (6, 1030)], ids=str)
def test_cuda_kernels_make_the_numbers(function: Callable[..., object], shape: tuple[int, ...]) -> None:
    x, state = torch.randn(shape), torch.tensor([12345, 2**33 + 16])
    inputs = [x, x * 2, state] if function is _gradient else [x, state]
    (made,) = generated(function, *(Given(tuple(each.shape), each.dtype) for each in inputs))
    memory = {name: inputs[int(name[1:])].flatten().numpy() for name in made.program.inputs}
    found = emulate(made.program, made.source, memory)
    expected = function(*inputs)
    for name, wanted in zip(made.program.outputs, expected if isinstance(expected, tuple) else [expected], strict=True):
        torch.testing.assert_close(torch.from_numpy(found[name]).view(wanted.shape), wanted, rtol=1e-4, atol=1e-4)
