"""What else is done with a module, done with an optimised one."""

from __future__ import annotations

import copy
import inspect
import types
import warnings
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.errors import FusepassWarning
from fusepass.numerics.check import check
from fusepass.report.report import CaptureRoute
from fusepass.training.backend import fusepass_backend

pytestmark = pytest.mark.models


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return F.gelu(self.norm(self.linear(x))) * scale


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 8)


@torch.no_grad()
def test_arguments_can_be_asked_for() -> None:
    assert list(inspect.signature(fusepass.optimize(Scaled())).parameters) == ["x", "scale"]


@torch.no_grad()
def test_torchscript_compiles_the_original(x: Tensor) -> None:
    model = Scaled().eval()
    scripted = torch.jit.script(fusepass.optimize(model))
    torch.testing.assert_close(scripted(x, 2.0), model(x, 2.0))
    assert set(scripted.state_dict()) == set(model.state_dict())


@torch.no_grad()
def test_torch_fx_traces_the_original(x: Tensor) -> None:
    optimised = fusepass.optimize(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    model = nn.Sequential(optimised, nn.ReLU())
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))
    with pytest.raises(TypeError, match="trace its `original`"):
        torch.fx.symbolic_trace(optimised)


@torch.no_grad()
def test_replicas_of_data_parallel_run_the_original(x: Tensor) -> None:
    model = Scaled().eval()
    optimised = fusepass.optimize(model)
    assert nn.DataParallel(optimised)(x).shape == (3, 16)
    replica = optimised._replicate_for_data_parallel()
    assert type(replica) is Scaled
    assert replica._parameters is not model._parameters
    for name, child in optimised._modules.items():
        setattr(replica, name, child)
    torch.testing.assert_close(replica(x), model(x))


@torch.no_grad()
def test_export_may_leave_a_size_open(x: Tensor) -> None:
    model = Scaled().eval()
    optimised = fusepass.optimize(model, x)
    program = torch.export.export(optimised, (x,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    more = torch.randn(7, 8)
    torch.testing.assert_close(program.module()(more), model(more))


@torch.no_grad()
def test_a_padded_batch_that_eager_makes_a_nested_tensor() -> None:
    """Eager writes zeros where the padding is, and does so by the values of the mask; compilers of whole graphs do not."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    optimised, x = fusepass.optimize(model), torch.randn(2, 6, 16)
    behind = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for padding in (behind, behind.flip(1), behind):
            wanted = model(x, src_key_padding_mask=padding)
            torch.testing.assert_close(optimised(x, src_key_padding_mask=padding), wanted)
    assert optimised.report().capture is CaptureRoute.CHILDREN
    assert "enable_nested_tensor=False" in str(optimised.report()).replace("\n    ", " ")
    assert fusepass.explain(model, x).capture is CaptureRoute.TRACED


@torch.no_grad()
def test_containers_do_what_the_original_does(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Tanh()).eval()
    optimised = fusepass.optimize(model)
    optimised(x)
    optimised[1] = nn.ReLU()
    del optimised[2]
    optimised.append(nn.LayerNorm(8))
    assert list(optimised) == list(model)
    assert model[0] in optimised
    assert nn.Tanh() not in optimised
    torch.testing.assert_close(optimised(x), model(x))


@torch.no_grad()
def test_an_optimised_part_of_a_model_is_no_fallback(x: Tensor) -> None:
    model = nn.Sequential(fusepass.optimize(nn.Sequential(nn.Linear(8, 8), nn.GELU())), nn.LayerNorm(8)).eval()
    optimised = fusepass.optimize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusepassWarning)
        torch.testing.assert_close(optimised(x), model(x))
    assert [region.name for region in optimised.report().regions] == ["linear_gelu_layer_norm"]
    assert optimised.report().fallbacks == model[0].report().fallbacks == ()


def test_a_graph_can_be_kept_for_another_backward(x: Tensor) -> None:
    torch._dynamo.reset()
    model = Scaled()
    loss = torch.compile(model, backend="fusepass")(x).square().sum()
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), first, rtol=0, atol=0)
    wanted = torch.autograd.grad(model(x).square().sum(), parameters)
    torch.testing.assert_close(first, wanted, rtol=1e-4, atol=1e-5)


def test_modes_of_torch_compile(x: Tensor) -> None:
    torch._dynamo.reset()
    model = Scaled().eval()
    with torch.no_grad():
        compiled = torch.compile(model, backend="fusepass", mode="max-autotune-no-cudagraphs", options=None)
        torch.testing.assert_close(compiled(x), model(x))
    graph = torch.fx.symbolic_trace(model)
    with pytest.raises(ValueError, match="'fastest'; allowed is one of default, reduce-overhead, max-autotune"):
        fusepass_backend(graph, [x], mode="fastest")
    with pytest.raises(TypeError, match="unknown option tunes; the options are"):
        fusepass_backend(graph, [x], options={"tunes": "max"})


def test_a_slip_in_a_name_to_disable_is_told() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    optimised = fusepass.optimize(model, disable="avg-pool-of-everything,teams,pointwise,common-subexpression")
    with torch.no_grad(), pytest.warns(FusepassWarning) as told:
        optimised(torch.randn(3, 8))
    (text,) = (str(warning.message) for warning in told)
    assert text.startswith("'avg-pool-of-everything' is disabled, but no")
    assert text.endswith("'average-pool-of-everything'")


@torch.no_grad()
def test_a_buffer_that_forward_overwrites_without_reading_it() -> None:
    """Spectral norm in training does so with its two vectors."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.GELU())
    twin = copy.deepcopy(model)
    optimised, x = fusepass.optimize(model), torch.randn(3, 8)
    for _ in range(3):
        torch.testing.assert_close(optimised(x), twin(x))
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert optimised.report().capture is CaptureRoute.TRACED


CONFIG: Any = None
SCALE = 2.0
SETTINGS = {"shift": 1.0}


def shifted(x: Tensor) -> Tensor:
    return x + SETTINGS["shift"]


@torch.no_grad()
@pytest.mark.invariant(3)
def test_plain_values_around_the_module_are_seen_to_change(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    power = 2

    class Around(nn.Module):
        slope = 0.1

        def forward(self, x: Tensor) -> Tensor:
            return shifted(self.activation(x)) * SCALE

        def activation(self, x: Tensor) -> Tensor:
            return F.leaky_relu(x, self.slope) ** power

    model = Around()
    optimised = fusepass.optimize(model, tune="off")
    seen = []

    def compare() -> None:
        torch.testing.assert_close(optimised(x), model(x))
        seen.append(optimised(x))
        assert len(seen) < 2 or not torch.equal(seen[-1], seen[-2])

    compare()
    monkeypatch.setitem(SETTINGS, "shift", 3.0)
    compare()
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    compare()
    Around.slope = 0.5
    compare()
    power = 3
    compare()
    power = 2
    torch.testing.assert_close(optimised(x), model(x))
    assert len(optimised.report().regions) == 5, "the one for the values before serves again"


@torch.no_grad()
def test_lists_and_attributes_of_modules_are_seen_to_change(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    config = types.ModuleType("config")
    config.shift = 1.0
    monkeypatch.setitem(globals(), "CONFIG", config)
    factors = [1.0]

    class Around(nn.Module):
        offsets: ClassVar = [0.5]

        def __init__(self) -> None:
            super().__init__()
            self.scaled = lambda x: x * factors[0]

        def forward(self, x: Tensor, *, more: list[float] = factors) -> Tensor:
            return self.scaled(x).relu() + CONFIG.shift + sum(self.offsets) + sum(more)

    model = Around()
    optimised = fusepass.optimize(model, tune="off")
    for change in (lambda: None, lambda: factors.append(2.0), lambda: Around.offsets.append(2.0)):
        change()
        torch.testing.assert_close(optimised(x), model(x))
    factors[0] = 3.0
    torch.testing.assert_close(optimised(x), model(x))
    config.shift = 5.0
    torch.testing.assert_close(optimised(x), model(x))


@torch.no_grad()
def test_what_forward_asserts_of_values_is_raised_as_by_the_original(x: Tensor) -> None:
    class Checked(Scaled):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            assert (x >= 0).all(), "negative"
            return super().forward(x, scale)

    model = Checked().eval()
    optimised, x = fusepass.optimize(model), x.abs()
    for _ in range(2):
        torch.testing.assert_close(optimised(x), model(x))
        with pytest.raises(AssertionError, match="negative"):
            optimised(-x)
    assert optimised.report().capture is CaptureRoute.TRACED


def test_a_model_that_exec_defines() -> None:
    """Nothing in it says which module it belongs to, as in what code generators and notebooks make."""
    namespace: dict[str, Any] = {"nn": nn}
    exec("class Made(nn.Module):\n    def forward(self, x):\n        return x.sin() * 2 + 1", namespace)
    model = namespace["Made"]()
    outcome = check(model, fusepass.optimize(model), (torch.randn(3, 5),))
    assert outcome.ok, outcome.explain()
