"""Wide products that are reduced by rows, as the logits of a loss are, in chunks: found however they are written, and never whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fusepass
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate, traffic
from fusepass.codegen.ir.updates import written_over
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.lowering.tracer import Spec
from fusepass.compile import chunks
from fusepass.compile.chunked import FEW, Chunked
from fusepass.compile.chunks import CHUNKS
from fusepass.compile.pipeline import CompiledGraph
from fusepass.compile.row_values import described
from fusepass.compile.splice import subgraph
from fusepass.compile.writes import updates_of
from fusepass.patterns.partition import partition
from fusepass.patterns.simplify import simplify
from fusepass.training import backend
from fusepass.training.backend import Backend
from fusepass.training.gradients import BENDS, DECOMPOSITIONS
from fusepass.training.joint import minimum_cut
from tests.support.interpreted import interpreted

SAMPLES, TOKENS, DEPTH, WORDS = 3, 6, 8, 37
ROWS = SAMPLES * TOKENS
WEIGHTS = torch.linspace(0, 2, WORDS)
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks of five rows, the last of which has three, and kernels that need no compiler."""
    monkeypatch.setattr(chunks, "LEAST_ROWS", 5)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(chunks, "WORTH_BYTES", 1)
    monkeypatch.setattr(chunks, "TILE", 1)
    with interpreted():
        yield


def logits(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b).view(-1, WORDS)


def mean(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(logits(x, w, b), t.view(-1))


def total(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(logits(x, w, b), t.view(-1), reduction="sum", ignore_index=3) * 0.3


def weighted(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(logits(x, w, b), t.view(-1), weight=WEIGHTS.to(x.dtype), ignore_index=5)


def smoothed(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(logits(x, w, b), t.view(-1), weight=WEIGHTS.to(x.dtype), ignore_index=5, label_smoothing=0.2)


def masked(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    loss, mask = F.cross_entropy(logits(x, w, b), t.view(-1), reduction="none"), (t.view(-1) % 3 != 0).to(x.dtype)
    return (loss * mask).sum() / mask.sum()


def shifted(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """As models of Hugging Face have it."""
    found = F.linear(x, w).to(torch.promote_types(x.dtype, torch.float32))
    return F.cross_entropy(found[..., :-1, :].contiguous().view(-1, WORDS), t[..., 1:].contiguous().view(-1))


def shifted_by_hand(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return -F.linear(x, w).log_softmax(-1)[:, :-1].gather(2, t[:, 1:, None]).mean()


def some_rows(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w, b)[:, 2:5:2].reshape(-1, WORDS), t[:, 2:5:2].reshape(-1))


def last_row(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w, b)[:, -1], t[:, -1])


def by_hand(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """With soft caps and a z-loss."""
    capped = 3 * torch.tanh(F.linear(x, w) / 3)
    each = capped.logsumexp(-1)
    return (each - capped.gather(-1, t[..., None])[..., 0]).mean() + 1e-2 * each.square().mean()


def indexed(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return -logits(x, w, b).log_softmax(-1)[torch.arange(ROWS), t.view(-1) - WORDS].mean()


def tied(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax((F.embedding(t, w).tanh() + x) @ w.t(), -1).view(-1, WORDS), t.roll(1, 1).view(-1))


def other_layout(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x.view(-1, DEPTH) @ w.view(DEPTH, WORDS), t.view(-1))


def perplexity(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return (mean(x, w, b, t) / 8).exp()


def focal(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    loss = F.cross_entropy(logits(x, w, b), t.view(-1), reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def distributions(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    wanted = torch.linspace(0, 1, ROWS * WORDS, dtype=x.dtype).view(ROWS, WORDS).softmax(-1)
    return F.kl_div(logits(x, w, b).log_softmax(-1), wanted, reduction="batchmean") + F.cross_entropy(
        logits(x, w, b), wanted
    )


def entropy(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    shares = logits(x, w, b).softmax(-1)
    return -(shares * shares.log()).sum(-1).mean()


def with_accuracy(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    found = logits(x, w, b)
    return F.cross_entropy(found, t.view(-1)) + (found.argmax(-1) == t.view(-1)).to(x.dtype).mean()


LOSSES = (
    mean, total, weighted, smoothed, masked, shifted, shifted_by_hand, some_rows, last_row, by_hand, indexed, tied, other_layout, perplexity,
    focal, distributions, entropy, with_accuracy,
)  # fmt: skip


def inputs(dtype: torch.dtype = torch.float32, rows: int = TOKENS) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    shapes = (SAMPLES, rows, DEPTH), (WORDS, DEPTH), (WORDS,)
    x, w, b = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    t = torch.randint(WORDS, (SAMPLES, rows), generator=draw)
    t[0, 0], t[1, 2], t[2, 4] = 5, 3, 5
    return x, w, b, t


def calls_in_chunks(graph: fx.Graph) -> list[Chunked]:
    return [node.target for node in graph.nodes if isinstance(node.target, Chunked)]


@dataclass
class Compiled:
    """A loss through the backend, and what it became."""

    loss: Loss
    graphs: list[CompiledGraph]

    @property
    def rewritten(self) -> bool:
        return any(each.rule == CHUNKS for made in self.graphs for each in made.report.rewrites)

    @property
    def reasons(self) -> list[str]:
        found = (each.reason for made in self.graphs for each in made.report.refusals)
        return [reason.removeprefix("it is not made in chunks: ") for reason in found if "in chunks" in reason]

    @property
    def chunked(self) -> Chunked:
        """The first call in chunks."""
        return next(call for made in self.graphs for call in calls_in_chunks(made.before.graph))


def compiled(loss: Any, **options: Any) -> Compiled:
    made: list[CompiledGraph] = []
    torch._dynamo.reset()
    return Compiled(torch.compile(loss, backend=Backend("loss", {"tune": "off", **options}, observe=made.append)), made)


def step(loss: Loss, *given: Tensor) -> list[Tensor]:
    """The loss, and the gradients of what has some, when the loss counts 1.7 times."""
    *floats, t = given
    leaves = [each.detach().clone().requires_grad_() for each in floats]
    result = loss(*leaves, t)
    (1.7 * result).backward()
    return [result.detach(), *(each.grad for each in leaves if each.grad is not None)]


def distances(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((got.double() - wanted).norm()) for got, wanted in zip(found, exact, strict=True)]


def judged(loss: Loss, found: list[Tensor], given: tuple[Tensor, ...]) -> None:
    """Hold `found` against float64: at most twice eager's error, and some roundings."""
    exact = step(loss, *(each.double() if each.is_floating_point() else each for each in given))
    pairs = zip(distances(found, exact), distances(step(loss, *given), exact), exact, strict=True)
    room = 2 * torch.finfo(given[0].dtype).eps
    for off, eager, wanted in pairs:
        assert off <= 2 * eager + room * float(wanted.norm()), (off, eager)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "partition_joint", minimum_cut)
    monkeypatch.setattr(backend, "DECOMPOSITIONS", DECOMPOSITIONS | BENDS)


class Largest(TorchDispatchMode):
    """Sees how many elements the largest result of an operator has."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(each.numel() for each in tree_leaves(result) if isinstance(each, Tensor))])
        return result


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.thinned(3)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_losses_are_made_in_chunks_however_they_are_written(loss: Loss) -> None:
    given, made = inputs(), compiled(loss)
    judged(loss, step(made.loss, *given), given)
    assert made.rewritten
    assert made.reasons == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [TOKENS, 3 * TOKENS], ids=["few chunks", "many chunks"])
@pytest.mark.thinned(2)
def test_sums_over_chunks_are_as_precise_as_whole_ones(dtype: torch.dtype, rows: int) -> None:
    given, made = inputs(dtype, rows), compiled(mean)
    judged(mean, step(made.loss, *given), given)
    assert made.rewritten
    assert (-(-SAMPLES * rows // made.chunked.rows) <= FEW) == (rows == TOKENS)


class Watched(Backend):
    """Runs what it compiles while `seen` looks."""

    seen = Largest()

    def specialise(self, *args: Any, **options: Any) -> CompiledGraph:
        made = super().specialise(*args, **options)

        def call(*arguments: Any) -> Any:
            with self.seen:
                return made.call(*arguments)

        return replace(made, call=call, without_python=lambda: (call, made.without_python()[1]))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_nothing_as_large_as_the_product_is_made() -> None:
    given = inputs(rows=4 * TOKENS)
    sizes = []
    for disable in ("0", CHUNKS):
        torch._dynamo.reset()
        watched = Watched("loss", {"tune": "off", "disable": disable})
        watched.seen = Largest()
        run = torch.compile(smoothed, backend=watched)
        step(run, *given)
        sizes.append(watched.seen.numel)
        watched.seen.numel = 0
        with torch.no_grad():
            run(*given)
        sizes.append(watched.seen.numel)
    wide = 4 * ROWS * WORDS
    assert sizes[2:] == [wide, wide]
    assert max(sizes[:2]) <= 4 * ROWS * DEPTH  # features and their gradient


def with_logits(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    found = logits(x, w, b)
    return F.cross_entropy(found, t.view(-1)), found


def of_each(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(logits(x, w, b), t.view(-1), reduction="none")


def normalised(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    found = logits(x, w, b)
    return F.cross_entropy(found - found.amax(0), t.view(-1))


def normed(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    found = logits(x, w, b)
    return torch.stack([F.cross_entropy(found, t.view(-1)), found.norm() * torch.rand(())])


def dropped(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.dropout(F.linear(x.detach(), w.detach()), 0.5).view(-1, WORDS).logsumexp(-1) + x.mean()


def added(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """A matrix that the library adds is no bias."""
    matrix = torch.linspace(0, 1, ROWS * WORDS, dtype=x.dtype).view(ROWS, WORDS)
    return F.cross_entropy(torch.addmm(matrix, x.view(-1, DEPTH), w.t()), t.view(-1))


REFUSED: dict[str, tuple[Any, str]] = {
    "a result": (with_logits, "a result has as many numbers"),
    "a gradient for each row": (of_each, "its gradient is not a known tensor times one number"),
    "rows joined": (normalised, "aten.amax.default joins rows"),
    "another gradient": (normed, "its gradient is not a known tensor times one number"),
    "random numbers": (dropped, "aten.native_dropout.default is not computed row by row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_in_chunks_says_why(name: str) -> None:
    loss, reason = REFUSED[name]
    given, made = inputs(), compiled(loss)
    results = made.loss(*(each.requires_grad_(each.is_floating_point()) for each in given))
    sum(each.sum() for each in tree_leaves(results)).backward()
    assert not made.rewritten
    assert reason in made.reasons[0]


def test_what_is_no_bias_is_added() -> None:
    given, made = inputs(), compiled(added)
    judged(added, step(made.loss, *given), given)


@pytest.mark.parametrize(
    ("option", "value"), [("algebra", "off"), ("rounding", "eager"), ("disable", CHUNKS), ("disable", "all")]
)
def test_options_keep_products_whole(option: str, value: str) -> None:
    given, made = inputs(), compiled(mean, **{option: value})
    step(made.loss, *given)
    assert not made.rewritten


@pytest.mark.parametrize(("name", "value"), [("LEAST_ROWS", ROWS), ("CHUNK_BYTES", 4 * ROWS * WORDS)])
def test_small_products_stay_whole(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    monkeypatch.setattr(chunks, name, value)
    given, made = inputs(), compiled(mean)
    judged(mean, step(made.loss, *given), given)
    assert not made.rewritten
    assert made.reasons[0] == f"its {ROWS} rows are one chunk, as each has about {ROWS} or more"


def test_products_that_take_little_memory_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for worth, rewritten in ((4 * ROWS * WORDS, True), (4 * ROWS * WORDS + 1, False)):
        monkeypatch.setattr(chunks, "WORTH_BYTES", worth)
        given, made = inputs(), compiled(mean)
        judged(mean, step(made.loss, *given), given)
        assert bool(made.rewritten) is rewritten
    assert made.reasons[0] == "its 0 MiB are not worth chunks"


@pytest.mark.parametrize(("budget", "rows"), [(1.0, 9), (0.5, 6), (0.0, 6)])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_memory_budget_is_of_chunks_too(monkeypatch: pytest.MonkeyPatch, budget: float, rows: int) -> None:
    """Chunks become smaller with it, of whole tiles, and are not made again in backward."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * 12 * WORDS)
    monkeypatch.setattr(chunks, "TILE", 3)
    given, made = inputs(), compiled(mean, memory_budget=budget)
    judged(mean, step(made.loss, *given), given)
    assert [len(calls_in_chunks(each.before.graph)) for each in made.graphs] == [1, 0]
    assert made.chunked.rows == rows


def test_losses_of_nothing_and_of_numbers_that_are_none_are_eager_s() -> None:
    x, w, b, t = inputs()
    made = compiled(mean)
    for rows, wrong in (
        (slice(0), 0.0),
        (slice(1), torch.nan),
        (slice(1), torch.inf),
        (slice(2), -torch.inf),
        (slice(1), 1e30),
    ):
        given = x.clone()
        given.view(-1, DEPTH)[3][rows] = wrong
        classes = t if rows.stop else torch.full_like(t, -100)
        for found, wanted in zip(step(made.loss, given, w, b, classes), step(mean, given, w, b, classes), strict=True):
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found.isinf(), wanted.isinf())
            torch.testing.assert_close(found, wanted, equal_nan=True)
    assert made.rewritten


def test_classes_that_are_none_raise() -> None:
    x, w, b, t = inputs()
    made = compiled(mean)
    step(made.loss, x, w, b, t)
    for wrong in (WORDS, -1):
        t[0, 1] = wrong
        with pytest.raises(RuntimeError, match="out of bounds: there are 37"):
            made.loss(x, w, b, t)


def test_backward_runs_any_number_of_times() -> None:
    """What forward made is multiplied where it is only if nobody asks for it again."""
    *floats, t = inputs()
    made = compiled(other_layout)
    leaves = [each.clone().requires_grad_() for each in floats]
    loss = made.loss(*leaves, t) * 3.0
    first = torch.autograd.grad(loss, leaves[:2], retain_graph=True)
    again = torch.autograd.grad(loss, leaves[:2])
    eager = torch.autograd.grad(other_layout(*leaves, t) * 3.0, leaves[:2])
    for one, other, wanted in zip(first, again, eager, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, wanted)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    for _ in range(2):  # gradients accumulate
        made.loss(*leaves, t).backward()
    torch.testing.assert_close(leaves[1].grad, 2 / 3 * eager[1])


class Head(nn.Module):
    """A language model's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DEPTH)
        self.head = nn.Linear(DEPTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, t: Tensor) -> Tensor:
        found = self.head(self.embed(t).tanh())
        return F.cross_entropy(found[:, :-1].flatten(0, 1), t[:, 1:].flatten())


def test_optimised_models_train_and_infer_in_chunks() -> None:
    model = Head()
    fused, t = fusepass.optimize(model, tune="off", training="fused"), inputs()[-1]
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(t)
        wanted.backward()
        gradient, model.head.weight.grad = model.head.weight.grad, None
        found = fused(t)
        found.backward()
        with torch.no_grad():
            torch.testing.assert_close(fused(t), wanted)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(model.head.weight.grad, gradient, atol=2e-3, rtol=2e-2)
    report = fused.report()
    assert [each.rule for each in report.rewrites].count(CHUNKS) == 2


def forward_of(loss: Callable[..., Tensor], *given: Tensor) -> fx.GraphModule:
    """Forward as the joint graph was cut, before anything is compiled."""
    halves: list[fx.GraphModule] = []

    def partitioned(graph: fx.GraphModule, *args: Any, **options: Any) -> Any:
        halves.extend(minimum_cut(graph, *args, **options))
        return halves

    torch._dynamo.reset()
    run = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), partition_fn=partitioned)
    leaves = [each.requires_grad_(each.is_floating_point()) for each in given]
    torch.compile(loss, backend=run)(*leaves).backward()
    return halves[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_who_traces_the_call_finds_one_chunk_and_no_writes(dtype: torch.dtype) -> None:
    graph = forward_of(weighted, *inputs(dtype))
    (values,) = [[node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]]
    given = [torch.rand(each.shape).to(each.dtype) if each.is_floating_point() else inputs()[-1] for each in values]
    traced = make_fx(graph)(*given)
    assert not any(node.target is torch.ops.aten.copy_.default or "out" in node.kwargs for node in traced.graph.nodes)
    for found, wanted in zip(traced(*given), graph(*given), strict=True):
        torch.testing.assert_close(found, wanted)
    assert calls_in_chunks(graph.graph)[0].classes


@pytest.mark.usefixtures("as_on_a_gpu")
def test_other_batches_have_whole_products() -> None:
    """The first size is made in chunks; what serves several is not."""
    made = compiled(mean)
    for samples in (3, 2, 4, 3):
        x, w, b, t = inputs()
        given = torch.cat([x, x])[:samples].contiguous(), w, b, torch.cat([t, t])[:samples].contiguous()
        judged(mean, step(made.loss, *given), given)
    assert len([each for each in made.graphs if calls_in_chunks(each.before.graph)]) == 1


@pytest.mark.parametrize(("words", "plan"), [(131072, "fetched ahead"), (50257, "registers, packed")])
def test_a_kernel_reads_and_writes_each_logit_once(words: int, plan: str) -> None:
    """That of a chunk on a GPU, which is written over."""
    x, w = torch.randn(16, 4, dtype=torch.bfloat16), torch.randn(words, 4, dtype=torch.bfloat16)

    def widened(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), t)

    forward = forward_of(widened, x, w, torch.arange(16))
    graph = described(calls_in_chunks(forward.graph)[0].step.graph, 2048, writes=True)
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = Spec.of(node.meta["val"], torch.device("cuda"))
        if "device" in node.kwargs:
            node.update_kwarg("device", torch.device("cuda"))
    simplify(graph)
    (region,) = regions = partition(graph).regions
    updates = {
        number: write.all_input_nodes[0].name for number, write in updates_of(graph.graph, regions)[region].items()
    }
    names = [node.name for node in region.inputs]
    made = generate(*lower(subgraph(graph, region), region.name, names, updates=updates), DeviceFacts.h200())
    program, (kernel,) = made.program, made.program.kernels
    assert plan in made.kernels[0].schedule
    assert sum(traffic(program, kernel)) < 1.01 * 2 * 2048 * words * 2
    assert [updated for _, updated in written_over(program)] == ["product"]
