"""The five mission models as the examples write them: values, buffers, what is fused, live parameters."""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.numerics.check import check, observe
from fusepass.report.report import RegionState
from tests.support.precision import cudnn

pytestmark = pytest.mark.models


@dataclass(frozen=True)
class Expected:
    """A model in examples/ and a word of each operator that its one region must have."""

    module: str
    operators: tuple[str, ...]

    def make(self, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        example = importlib.import_module(f"examples.{self.module}")
        return example.make_model().to(device), example.make_inputs(device, full=False)


MODELS = (
    Expected("conv_transpose3d_layer_norm_gelu", ("convolution", "layer_norm", "gelu")),
    Expected("conv_transpose3d_batch_norm_subtract_mean", ("convolution", "batch_norm", "mean", "sub")),
    Expected("conv_transpose2d_gelu_group_norm", ("convolution", "gelu", "group_norm")),
    Expected("conv_transpose3d_scale_batch_norm_pool", ("convolution", "mul", "batch_norm")),
    Expected("layer_norm_3d", ("layer_norm",)),
)
WITH_BATCH_NORM = tuple(model for model in MODELS if "batch_norm" in model.operators)

every_model = pytest.mark.parametrize("expected", MODELS, ids=lambda expected: expected.module)
every_batch_norm = pytest.mark.parametrize("expected", WITH_BATCH_NORM, ids=lambda expected: expected.module)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@every_model
@pytest.mark.invariant(15)
def test_values_and_buffers_follow_the_policy(expected: Expected, device: str) -> None:
    model, inputs = expected.make(device)
    outcome = check(model, fusepass.optimize(model), inputs)
    assert outcome.ok, outcome.explain()


@every_model
def test_the_whole_chain_is_one_region(expected: Expected, device: str) -> None:
    model, inputs = expected.make(device)
    fused = fusepass.optimize(model)
    with torch.no_grad():
        fused(*inputs)
    report = fused.report()
    assert len(report.regions) == 1, str(report)
    region = report.regions[0]
    assert region.state is RegionState.FUSED, region.reason
    assert report.fallbacks == ()
    assert region.kernels
    assert 0 < region.bytes_after < region.bytes_before or expected.module == "layer_norm_3d"
    targets = [op.target for op in region.ops]
    for word in expected.operators:
        assert any(word in target for target in targets), f"no {word} in {targets}"
    has_anchor = "convolution" in expected.operators
    assert (region.anchor is not None) == has_anchor


@every_model
@pytest.mark.invariant(17)
def test_the_same_inputs_give_the_same_bits(expected: Expected, device: str) -> None:
    model, inputs = expected.make(device)
    fused = fusepass.optimize(model)
    with cudnn(deterministic=True):
        first, second = observe(fused, inputs), observe(fused, inputs)
    assert torch.equal(first["output"], second["output"])
    for name, buffer in first["buffers"].items():
        assert torch.equal(buffer, second["buffers"][name])


@every_model
@pytest.mark.thinned(4)
def test_other_batches_values_and_strides_are_as_right(expected: Expected, device: str) -> None:
    model, (x,) = expected.make(device)
    fused = fusepass.optimize(model)
    twice = torch.cat([x, x.flip(0) - 0.5])
    strided = torch.empty_strided(x.shape, tuple(2 * stride for stride in x.stride()), device=x.device)
    strided.copy_(x + 3.0)
    for other in (x, twice, x * -100.0, strided):
        outcome = check(model, fused, (other,))
        assert outcome.ok, f"shape {tuple(other.shape)}, stride {other.stride()}: {outcome.explain()}"


@every_model
@pytest.mark.invariant(4)
def test_changed_parameters_show_in_the_next_call(expected: Expected, device: str) -> None:
    model, inputs = expected.make(device)
    fused = fusepass.optimize(model)
    before = observe(fused, inputs)["output"]
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(1.25 + index).add_(0.125)
    after = observe(fused, inputs)["output"]
    assert not torch.equal(before, after)
    outcome = check(model, fused, inputs)
    assert outcome.ok, outcome.explain()


@every_batch_norm
def test_running_statistics_accumulate_like_eager(expected: Expected, device: str) -> None:
    model, inputs = expected.make(device)
    fused = fusepass.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for factor in (1.0, 2.0, -3.0):
            model(inputs[0] * factor)
            fused(inputs[0] * factor)
    buffers = dict(fused.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=1e-4 if device == "cuda" else 1e-5, atol=1e-6)
    assert buffers["batch_norm.num_batches_tracked"] == 3


@every_batch_norm
def test_eval_and_train_switch_the_statistics(expected: Expected, device: str) -> None:
    model, inputs = expected.make(device)
    fused = fusepass.optimize(model)
    trained = observe(fused, inputs)["output"]
    for module in (model, fused):
        module.eval()
    outcome = check(model, fused, inputs)
    assert outcome.ok, outcome.explain()
    assert not torch.equal(observe(fused, inputs)["output"], trained)
    for module in (model, fused):
        module.train()
    outcome = check(model, fused, inputs)
    assert outcome.ok, outcome.explain()


@every_model
def test_the_state_dict_is_the_models(expected: Expected, device: str) -> None:
    model, inputs = expected.make(device)
    fused = fusepass.optimize(model)
    with torch.no_grad():
        fused(*inputs)
    state = model.state_dict()
    assert list(fused.state_dict()) == list(state)
    for name, tensor in fused.state_dict().items():
        assert tensor.data_ptr() == state[name].data_ptr()
