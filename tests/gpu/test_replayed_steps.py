"""Training steps as CUDA graphs on a device, beside the same steps launched."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.errors import FusepassWarning
from tests.support.precision import exact_products

pytestmark = [pytest.mark.gpu, pytest.mark.models]


@pytest.fixture(autouse=True)
def _surroundings() -> Iterator[None]:
    with exact_products():
        yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Running statistics, a residual and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm(self.first(x)))
        return self.head((y + self.second(y)).mean((2, 3)))


class Noisy(nn.Module):
    """Draws by generated kernels, by the library, or by its attention."""

    def __init__(self, kernels: float = 0.0, library: float = 0.0, attention: float = 0.0) -> None:
        super().__init__()
        self.library, self.attention = library, attention
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.norm, self.drop = nn.LayerNorm(64), nn.Dropout(kernels)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention).transpose(1, 2).flatten(-2)
        if self.library:
            y = y + self.library * torch.randn_like(y) + torch.rand_like(y)
        return x + self.drop(F.gelu(self.out(y)))


def both(model: nn.Module) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Any]]:
    """A model with graphs, and its like without."""
    like = copy.deepcopy(model)
    return (
        (model, fusepass.optimize(model, cuda_graphs=True, tune="off")),
        (like, fusepass.optimize(like, cuda_graphs=False, tune="off")),
    )


def close(actual: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-4)


def same(model: nn.Module, like: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), like.parameters(), strict=True):
        close(mine, theirs)
        close(mine.grad, theirs.grad)
    for mine, theirs in zip(model.buffers(), like.buffers(), strict=True):
        close(mine, theirs)


def told(fused: Any) -> str:
    (text,) = fused.report().cuda_graphs
    return str(text)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_is_the_launched_one_s(to_none: bool) -> None:
    pairs = both(Net().cuda())
    optimisers = [
        torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), capturable=False, foreach=False)
        for model, _ in pairs
    ]
    held = []
    for number in range(8):
        x, y = torch.rand(4, 3, 9, 9, device="cuda"), torch.randint(4, (4,), device="cuda")
        for (model, fused), optimiser in zip(pairs, optimisers, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = torch.tensor(1e-3 * (number + 1))
            optimiser.zero_grad(set_to_none=to_none)
            result = fused(x)
            F.cross_entropy(result, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            held.append(result)
        same(pairs[0][0], pairs[1][0])
    for mine, theirs in zip(held[::2], held[1::2], strict=True):
        close(mine, theirs)
    assert told(pairs[0][1]).startswith("training: replayed, 2 captured, ")


def test_batches_that_wait_and_gradients_that_accumulate() -> None:
    pairs = both(Net().cuda())
    for number in range(6):
        inputs = torch.rand(3, 4, 3, 9, 9, device="cuda")
        for model, fused in pairs:
            model.zero_grad(set_to_none=number % 2 == 0)
            first, second = fused(inputs[0]), fused(inputs[1])
            (first * second.sigmoid()).sum().backward(retain_graph=True)
            second.square().mean().backward()
            fused(inputs[2]).sum().backward()
            fused(inputs[2])  # without a backward
        same(pairs[0][0], pairs[1][0])
    assert told(pairs[0][1]).startswith("training: replayed, 4 captured, ")


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])  # of float32 attention is another kernel
@pytest.mark.parametrize(
    "draws",
    [
        {"kernels": 0.2},
        {"library": 0.2},
        {"attention": 0.2},
        {"kernels": 0.2, "library": 0.2},
        {"kernels": 0.2, "attention": 0.2},
    ],
    ids=" and ".join,
)
def test_draws_are_the_launched_one_s(draws: dict[str, float], kind: torch.dtype) -> None:
    pairs = both(Noisy(**draws).to("cuda", kind))
    for number in range(6):
        x = torch.rand(8, 32, 64, device="cuda", dtype=kind)
        results, states = [], []
        for model, fused in pairs:
            model.zero_grad()
            torch.manual_seed(number)
            torch.rand(7, device="cuda")
            results.append(fused(x))
            results[-1].float().square().sum().backward()
            states.append(torch.cuda.get_rng_state())
        assert torch.equal(*results)
        assert torch.equal(*states)
        for mine, theirs in zip(*(model.parameters() for model, _ in pairs), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-2, atol=2e-2)
    assert told(pairs[0][1]).startswith("training: replayed, 2 captured, ")


def test_backward_of_a_replayed_attention_may_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the generator's state on the host, where a replayed forward leaves it on the device."""
    pairs = both(Noisy(attention=0.2).cuda())
    for number in range(5):
        x = torch.rand(8, 32, 64, device="cuda")
        for model, fused in pairs:
            model.zero_grad()
            torch.manual_seed(number)
            loss = fused(x).square().sum()
            monkeypatch.setattr(torch.backends.cudnn, "deterministic", number == 4)  # what was captured is not for this
            loss.backward()
            monkeypatch.undo()
        same(pairs[0][0], pairs[1][0])
    assert told(pairs[0][1]).startswith("training: replayed, 2 captured, ")


def test_autocast_and_scaled_gradients() -> None:
    pairs = both(Net().cuda())
    optimisers = [torch.optim.SGD(model.parameters(), lr=0.01) for model, _ in pairs]
    scalers = [torch.amp.GradScaler("cuda", init_scale=128.0) for _ in pairs]
    for _ in range(6):
        x = torch.rand(4, 3, 9, 9, device="cuda")
        for (_, fused), optimiser, scaler in zip(pairs, optimisers, scalers, strict=True):
            optimiser.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = fused(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
        for mine, theirs in zip(*(model.parameters() for model, _ in pairs), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-3)
    assert told(pairs[0][1]).startswith("training: replayed, 2 captured, ")


def test_streams_and_gradients_that_are_read_late() -> None:
    """What a caller reads on another stream, while later steps run, is its own."""
    pairs = both(Net().cuda())
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for number in range(5):
                x = torch.full((4, 3, 9, 9), float(number), device="cuda") + torch.rand(3, 9, 9, device="cuda")
                late = []
                for model, fused in pairs:
                    model.zero_grad()
                    fused(x).square().sum().backward()
                    gradients = [each.grad for each in model.parameters() if each.grad is not None]
                    side.wait_stream(stream)
                    with torch.cuda.stream(side):
                        torch.cuda._sleep(1_000_000)
                        late.append([each.clone() for each in gradients])
                    for each in gradients:
                        each.record_stream(side)
                side.synchronize()
                for mine, theirs in zip(*late, strict=True):
                    close(mine, theirs)
        torch.cuda.synchronize()


def test_a_step_does_not_synchronise() -> None:
    fused = fusepass.optimize(Net().cuda(), cuda_graphs=True, tune="off")
    x = torch.rand(4, 3, 9, 9, device="cuda")
    for _ in range(3):
        fused(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.library.custom_op("fusepass_tests::waits", mutates_args=())
def waits(x: Tensor) -> Tensor:
    """Does on the host what no capture bears."""
    x.sum().item()
    return x.clone()


waits.register_fake(torch.empty_like)
waits.register_autograd(lambda ctx, gradient: gradient)


def test_a_capture_that_fails_leaves_everything_right() -> None:
    class Waits(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = waits(super().forward(x)) * 2
            return result

    model = Waits(nn.Linear(64, 64), nn.GELU()).cuda()
    like = copy.deepcopy(model)
    fused = fusepass.optimize(model, cuda_graphs=True, tune="off")

    def step() -> None:
        x = torch.rand(32, 64, device="cuda")
        for each in (fused, like):
            each.zero_grad()
            each(x).square().sum().backward()
        same(model, like)

    step()
    with pytest.warns(FusepassWarning, match="runs without a CUDA graph"):
        step()
    step()
    assert told(fused).startswith("training: not used: ")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.rand(1 << 20, device="cuda").sum() > 0


def test_memory_goes_with_the_model() -> None:
    def run() -> str:
        fused = fusepass.optimize(
            nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512)).cuda(), cuda_graphs=True, tune="off"
        )
        for _ in range(3):
            fused(torch.rand(2048, 512, device="cuda")).sum().backward()
        return told(fused)

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    assert run().startswith("training: replayed, 2 captured, ")
    torch._dynamo.reset()
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 16 << 20


def test_the_backend_replays_steps_with_reduce_overhead() -> None:
    model = Net().cuda()
    like = copy.deepcopy(model)
    compiled = torch.compile(model, backend="fusepass", mode="reduce-overhead")
    launched = torch.compile(like, backend="fusepass", options={"cuda_graphs": False})
    for _ in range(4):
        x = torch.rand(4, 3, 9, 9, device="cuda")
        for each in (compiled, launched):
            each(x).square().sum().backward()
        same(model, like)


class Deep(nn.Module):
    """Launches that take longer than their kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(
    ("make", "shape", "verdict"),
    [
        (Deep, (8, 32), "training: replayed, 2 captured, "),
        (
            lambda: nn.Sequential(nn.Linear(4096, 4096), nn.GELU()),
            (8192, 4096),
            "training: not used: its kernels take longer",
        ),
    ],
)
def test_unasked_the_faster_way_serves(make: Callable[[], nn.Module], shape: tuple[int, ...], verdict: str) -> None:
    model = make().cuda()
    like = copy.deepcopy(model)
    fused = fusepass.optimize(model, tune="off")
    for _ in range(20):
        x = torch.randn(*shape, device="cuda")
        for each in (fused, like):
            each.zero_grad()
            each(x).square().mean().backward()
        torch.cuda.synchronize()
        for mine, theirs in zip(model.parameters(), like.parameters(), strict=True):
            close(mine.grad, theirs.grad)
    assert told(fused).startswith(verdict)
