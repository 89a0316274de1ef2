"""Signatures: what they notice, what they overlook on purpose, and what they cost."""

from __future__ import annotations

import contextlib
import time
import timeit
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from fusepass.capture.trace import Captured, capture
from fusepass.dispatch.signature import Signature, settings
from fusepass.guards.pystate import PythonState
from fusepass.runtime.modes import obstacle
from fusepass.structure import Template, flatten, key_paths, plain_key
from tests.support.precision import cudnn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.scale = 2.0
        self.flags = {"bias": False}
        self.sizes = [1, 2]
        self.config = SimpleNamespace(depth=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.scale


def signature(model: nn.Module, *tensors: Tensor) -> Signature:
    made = capture(model, tensors, {})
    assert isinstance(made, Captured), made
    begun = Signature(model, tensors)
    assert begun.complete(made)
    return begun


@pytest.fixture
def net() -> Net:
    return Net().eval()


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


X = torch.ones(2, 3)


def test_a_match_gives_the_arguments_of_the_graph(net: Net) -> None:
    made = signature(net, X)
    other = torch.zeros(2, 3)
    bound = made.bind((other,))
    assert bound is not None
    # The graph in eval mode does not take num_batches_tracked.
    expected = [net.linear.weight, net.norm.weight, net.norm.bias, net.norm.running_mean, net.norm.running_var, other]
    assert all(a is b for a, b in zip(bound, expected, strict=True))


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(4, 3),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(3, 2).t(),
        torch.ones(3).expand(2, 3),
        torch.ones(2, 3, device="meta"),
        torch.ones(2, 3).to_sparse(),
        nn.Parameter(torch.ones(2, 3)),
        torch.ones(2, 3, dtype=torch.complex64).conj(),
        [1.0],
        torch._efficientzerotensor((2, 3)),
        torch.nested.nested_tensor([torch.ones(1, 3), torch.ones(2, 3)]),
    ],
)
@pytest.mark.invariant(3)
def test_other_inputs_do_not_match(net: Net, other: Any) -> None:
    assert signature(net, X).bind((other,)) is None


def _train(net: Net) -> None:
    net.train()


def _inner_train(net: Net) -> None:
    net.norm.train()


CHANGES: list[Callable[[Net], object]] = [
    _train,
    _inner_train,
    lambda net: setattr(net, "scale", 2),
    lambda net: setattr(net, "scale", 3.0),
    lambda net: setattr(net.norm, "eps", 1e-3),
    lambda net: net.flags.update(bias=True),
    lambda net: net.flags.update(more=1),
    lambda net: net.sizes.append(3),
    lambda net: net.sizes.reverse(),
    lambda net: setattr(net.config, "depth", 2),
    lambda net: setattr(net, "added", 1),
    lambda net: delattr(net, "scale"),
    lambda net: setattr(net, "linear", nn.Linear(3, 3, bias=False)),
    lambda net: setattr(net, "norm", nn.Identity()),
    lambda net: net.add_module("more", nn.Identity()),
    lambda net: setattr(net.linear, "bias", nn.Parameter(torch.ones(3))),
    lambda net: setattr(net.linear, "weight", nn.Parameter(torch.ones(3, 4))),
    lambda net: net.register_parameter("more", nn.Parameter(torch.ones(3))),
    lambda net: net.linear.register_buffer("more", torch.ones(3)),
    lambda net: net.linear.register_forward_hook(lambda *_: None),
    lambda net: net.double(),
    lambda net: setattr(net.linear.weight, "data", torch.ones(3, 3).t()),
    lambda net: setattr(net.norm, "bias", net.norm.weight),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.invariant(3)
def test_changes_of_the_model_are_noticed(net: Net, change: Callable[[Net], object]) -> None:
    made = signature(net, X)
    assert made.bind((X,)) is not None
    change(net)
    assert made.bind((X,)) is None


def _hook(model: nn.Module) -> object:
    return model.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net[0].register_parameter("more", nn.Parameter(torch.ones(3))),
        lambda net: net[0].register_buffer("more", torch.ones(3)),
        lambda net: net[0].add_module("more", nn.Identity()),
        lambda net: _hook(net[0]),
        lambda net: net[0].register_forward_pre_hook(lambda *_: None),
        lambda net: net[1].state.update(more=1),
    ],
)
def test_what_was_empty_and_is_no_more_is_noticed(change: Callable[[nn.Sequential], object]) -> None:
    """Here nothing but dicts holds state, so that none of them is looked at while their versions stay."""
    net = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(3, 3, bias=False)).eval()
    net[1].state = {}
    made = signature(net, X)
    assert made.bind((X,)) is not None
    change(net)
    assert made.bind((X,)) is None
    assert made.bind((X,)) is None


def test_a_change_back_is_a_match_again(net: Net) -> None:
    made = signature(net, X)
    linear = net.linear
    for _ in range(2):
        net.linear = nn.Linear(3, 3, bias=False)
        net.train()
        assert made.bind((X,)) is None
        net.linear = linear
        net.eval()
        assert made.bind((X,)) is not None


def test_every_way_to_change_a_dict_is_noticed(net: Net) -> None:
    ways: list[tuple[Callable[[dict[str, Any]], Any], Callable[[dict[str, Any]], Any]]] = [
        (lambda d: d.update(scale=3.0), lambda d: d.update(scale=2.0)),
        (lambda d: d.__setitem__("scale", 3.0), lambda d: d.__setitem__("scale", 2.0)),
        (lambda d: d.pop("scale"), lambda d: d.setdefault("scale", 2.0)),
        (lambda d: d.popitem(), lambda d: d.__setitem__("scale", 2.0)),  # the last one, as it was just set
        (lambda d: d.__ior__({"scale": 3.0}), lambda d: d.__ior__({"scale": 2.0})),
    ]
    made = signature(net, X)
    for change, back in ways:
        assert made.bind((X,)) is not None
        change(vars(net))
        assert made.bind((X,)) is None
        back(vars(net))
    object.__setattr__(net, "scale", 5.0)
    assert made.bind((X,)) is None


def test_changes_that_make_no_difference_are_overlooked(net: Net) -> None:
    made = signature(net, X)
    net.scale = float("2.0")
    net.norm.eps = float("1e-5")
    net.train().eval()
    net.linear.weight.add_(1)
    net.linear.weight.data = torch.zeros(3, 3)
    assert made.bind((X,)) is not None


def test_not_a_number_is_equal_to_itself_and_zeros_have_signs(net: Net) -> None:
    net.scale = float("nan")
    made = signature(net, X)
    net.scale = float("nan")
    assert made.bind((X,)) is not None
    net.scale = 0.0
    made = signature(net, X)
    net.scale = -0.0
    assert made.bind((X,)) is None


def test_reassigned_tensors_of_the_same_form_are_taken_up(net: Net) -> None:
    made = signature(net, X)
    net.linear.weight = nn.Parameter(torch.zeros(3, 3))
    net.norm.register_buffer("running_mean", torch.zeros(3))
    for _ in range(2):
        bound = made.bind((X,))
        assert bound is not None
        assert bound[0] is net.linear.weight
        assert bound[3] is net.norm.running_mean


@contextlib.contextmanager
def _products_in_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "setting",
    [
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        _deterministic,
        _products_in_tf32,
        lambda: torch.device("cpu"),
        lambda: torch._subclasses.FakeTensorMode(),
        lambda: torch.overrides.BaseTorchFunctionMode(),
        forward_ad.dual_level,
    ],
)
@pytest.mark.invariant(3)
def test_global_settings_are_noticed(net: Net, setting: Callable[[], Any]) -> None:
    made = signature(net, X)
    with setting():
        assert made.bind((X,)) is None
    assert made.bind((X,)) is not None


SETTINGS: list[Callable[[], Any]] = [
    lambda: cudnn(enabled=False),
    lambda: cudnn(allow_tf32=not torch.backends.cudnn.allow_tf32),
    lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
]


@pytest.mark.parametrize(
    ("model", "x", "noticed"),
    [
        (nn.Conv2d(3, 4, 3), torch.ones(1, 3, 5, 5), (False, False, False)),
        (nn.Softmax(-1), X, (False, False, True)),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), torch.ones(2, 3, 4), (False, False, True)),
    ],
)
@pytest.mark.invariant(3)
def test_settings_are_noticed_where_they_matter(model: nn.Module, x: Tensor, noticed: tuple[bool, ...]) -> None:
    made = signature(model, x)
    for setting, matters in zip(SETTINGS, noticed, strict=True):
        with setting():
            assert (made.bind((x,)) is None) == matters
    assert made.bind((x,)) is not None


@pytest.mark.parametrize(
    ("target", "noticed"),
    [
        ("convolution", (True, True, False)),
        ("native_layer_norm", (True, False, False)),
        ("relu", (False, False, False)),
    ],
)
def test_cudnn_s_settings_matter_on_cuda(target: str, noticed: tuple[bool, ...]) -> None:
    graph = fx.Graph()
    node = graph.call_function(getattr(torch.ops.aten, target).default, (graph.placeholder("x"),))
    with FakeTensorMode():
        node.meta["val"] = torch.empty(1, device="cuda")
    graph.output(node)
    readers = settings(SimpleNamespace(graph=SimpleNamespace(graph=graph)))  # type: ignore[arg-type]
    before = [read() for read in readers]
    for setting, matters in zip(SETTINGS, noticed, strict=True):
        with setting():
            assert ([read() for read in readers] != before) == matters


def test_a_default_device_is_part_of_the_signature(net: Net) -> None:
    with torch.device("cpu"):
        made = signature(net, X)
        assert made.bind((X,)) is not None
        assert obstacle([X]) is None
    assert made.bind((X,)) is None


def test_obstacles() -> None:
    seen: list[str | None] = []

    def look(x: Tensor) -> Tensor:
        seen.append(obstacle([x]))
        return x.sum()

    look(X)
    torch.vmap(look)(X)
    with torch.enable_grad():
        torch.func.grad(look)(X)
    torch.jit.trace(look, X, check_trace=False)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        look(X)
    with torch.overrides.BaseTorchFunctionMode():
        look(X)
    with forward_ad.dual_level():
        look(X)
    look(X.as_subclass(type("Sub", (Tensor,), {})))
    assert seen == [
        None,
        "a torch.func transform is active",
        "a torch.func transform is active",
        "torch.jit is tracing",
        "a torch dispatch mode is active",
        "a torch function mode is active",
        "forward-mode differentiation is active",
        "an input is a Sub",
    ]


def test_plain_keys_tell_types_apart() -> None:
    values: list[Any] = [1, 1.0, True, 0.0, -0.0, "1", None, (1,), (1.0,), torch.float32, float("nan")]
    assert len({plain_key(value) for value in values}) == len(values)
    assert plain_key(float("nan")) == plain_key(float("nan"))


def test_templates_round_trip() -> None:
    value = {"a": [X, None, (1, "b")], "c": (X,)}
    tensors, template = Template.of(value)
    assert [tensor is X for tensor in tensors] == [True, True]
    again = template.fill([1, 2])
    assert again == {"a": [1, None, (1, "b")], "c": (2,)}
    assert len(flatten(value)[0]) == len(key_paths(value)) == 5
    assert not Template.of({"a": [X, None, (1.0, "b")], "c": (X,)})[1].same_form(template)


def test_a_list_of_the_model_costs_no_look_at_all_else(net: Net) -> None:
    made = signature(net, X)
    assert made.bind((X,)) is not None
    with mock.patch.object(PythonState, "unchanged", side_effect=AssertionError("all was compared")):
        assert made.bind((X,)) is not None
    net.sizes[1] = 3
    assert made.bind((X,)) is None
    net.sizes[1] = 2
    assert made.bind((X,)) is not None


def test_looking_up_is_quick(net: Net) -> None:
    made = signature(net, X)
    best = min(timeit.repeat(lambda: made.bind((X,)), number=1000, repeat=20, timer=time.process_time)) / 1000
    assert best < 20e-6  # measured 2 to 5 us of the processor's time; other work may share the machine
