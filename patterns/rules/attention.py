"""Attention that is written out becomes the library's, which keeps the scores on the chip."""

from __future__ import annotations

import math
from itertools import dropwhile
from math import prod

import torch
from torch import fx

from fusepass.codegen.lowering.anchors import allows_tf32
from fusepass.patterns.analysis.attention import Added, Attention, Scores, looks_back, multiple
from fusepass.patterns.analysis.reordered import ORDERS, RESHAPES, Reordered
from fusepass.patterns.language import op, var
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.attended import Operands, attended
from fusepass.patterns.rules.builder import Builder, shape_of

aten = torch.ops.aten

_FEW_KEYS = 256
"""In float32 the library's kernel multiplies on the tensor cores as our products do, three times for each result, but in
smaller tiles: with more keys than this, none of them hidden, what it saves in memory is less than what it loses there
(H200: 1.58 and 1.30 ms for 8 x 16 x 1024 x 128, 440 and 462 us with the linear layers of 64 x 6 x 256 x 64)."""

_FEWEST_BIASED = 128
"""Keys from which on the library's kernel for halves takes what is added to scores at no loss: it reads as much of it for
each tile (H200: 208 us for 2048 x 4 x 49 x 32, as long as two products and a softmax)."""

_FEWEST_ON_CUDA = 40
"""Keys from which on the library's kernels, whose tiles have room for 64, are faster than products and a softmax (H100, bfloat16, us: 8192 x 16 x
32 140 and 67, 4096 x 32 x 32 75 and 46, 2048 x 49 x 32 42 and 54, 4096 x 64 x 64 77 and 106)."""

_FEWEST_ON_CPU = 16
"""Keys from which on the library's kernel for a CPU sees that all scores of a query are NaN: a vector of float32 of AVX-512. It takes the
maximum of fewer by comparisons, finds nothing above minus infinity, and gives zeros."""

_LEAST_WORK_ON_CPU = 2**17
_MOST_SCORES_ON_CPU = 2**23
"""Of bfloat16, multiplications from which on, and scores up to which, two products and a softmax are faster on a CPU than the library's
attention kernel, which multiplies in bfloat16 by AMX alone (Zen 4, one core, ms, kernel and products: 192 x 49 x 32 with a bias 2.67 and 1.70,
8 x 64 x 64 with a bias 0.22 and 0.16, 12 x 197 x 64 2.35 and 1.71, 12 x 512 x 64 12.3 and 7.7; one query, 12 x 256 x 64 0.33 and 0.10;
12 x 1024 x 64 as long)."""

_BIAS_ALIGNMENT = 16
"""Elements of which a row of what is added has to begin at a multiple, in the kernel for it."""

_NOTHING_LEFT = -1e30
"""With this added, scores of up to 1e22 are all the same in float32."""

_SHOWN = RESHAPES | ORDERS | {aten.select.int, aten.slice.Tensor}
"""Views that show another tensor of the same shape in the same way."""


def _heads_apart(
    found: Match, node: fx.Node, lead: tuple[int, int], *, turned: bool = False, source: fx.Node | None = None
) -> fx.Node:
    """A batch of matrices, ``[N, A, B]``, as ``[*lead, A, B]``, or as that transposed, made of what it is a copy or a view of.

    `source` takes the place of that.
    """
    build, seen = Builder(found), Reordered.of(node)
    apart = seen.reshaped((*lead, *shape_of(node)[1:]))
    if apart is None:
        raise Declined("batch and heads do not come apart")
    groups = [apart.groups[dim] for dim in ((0, 1, 3, 2) if turned else range(4))]
    split = build.split(source or _original(seen.source), apart.sizes)
    shown = build.permute(split, [place for group in groups for place in group])
    return _uncopied(found, build.split(shown, [prod(apart.sizes[place] for place in group) for group in groups]))


def _original(node: fx.Node) -> fx.Node:
    """What `node` is a copy of, all of it."""
    while node.target in (aten.clone.default, aten.expand.default):
        (source,) = node.all_input_nodes
        if shape_of(source) != shape_of(node):
            break
        node = source
    return node


def _uncopied(found: Match, node: fx.Node) -> fx.Node:
    """`node`, or the same view of what it is a view of a copy of, if its rows are as close there: the library reads them anywhere."""
    between, source = list[fx.Node](), node
    while source.target in _SHOWN:
        between.append(source)
        source = source.all_input_nodes[0]
    if source.target is not aten.clone.default:
        return node
    shown = source.all_input_nodes[0]
    try:
        for view in reversed(between):
            shown = found.call(view.target, shown, *view.args[1:])
    except Declined:
        return node
    return shown if shown.meta["val"].stride(-1) == 1 else node


def _lead(scores: Scores, queries: fx.Node) -> tuple[int, int]:
    """Batch and heads, as somebody sees them apart."""
    lead = scores.shape[:-2]
    if len(lead) == 1:
        seen = Reordered.of(queries)
        lead = tuple(seen.sizes[place] for place in seen.groups[0])
    if len(lead) > 2:
        raise Declined("there are more dimensions than batch and heads")
    batch, heads = (*lead, 1, 1)[:2]
    return batch, heads


def _hiding(scores: Scores, dtype: torch.dtype) -> tuple[float, bool]:
    """What is added where a mask hides, and whether rows of which masks leave nothing are averages of all values then; else NaN.

    Where a number hides, all keys weigh alike in these rows. The kernel does so itself beside what leaves nothing of any score.
    """
    values = {added.value for added in scores.added if added.hides is not None}
    if values <= {-math.inf}:
        return -math.inf, False
    behind = dropwhile(lambda added: added.hides is None, scores.added)
    if len(values) > 1 or any(added.hides is None for added in behind):
        raise Declined("rows of which masks leave nothing have weights of their own")
    if torch.finfo(dtype).min < _NOTHING_LEFT:
        return _NOTHING_LEFT, False
    if any(added.hides is None for added in scores.added):
        raise Declined("what is added may be minus infinity where nothing is hidden")
    return -math.inf, True


def _bias(found: Match, scores: Scores, lead: tuple[int, int], dtype: torch.dtype, hiding: float) -> fx.Node | None:
    """All that is added to the scores as one tensor, `hiding` where a mask hides; None for nothing."""
    build, total, rank = Builder(found), None, len(scores.shape)
    masks = [added for added in scores.added if added.hides is not None]
    for added in (each for each in scores.added if each.hides is None):
        node = _beside(found, added, rank, lead)
        if node.meta["val"].dtype is not dtype:
            raise Declined("what is added has another type")
        scaled = build.scale(node, added.factor)
        total = scaled if total is None else build.add(total, scaled)
    if total is None and masks:
        total = found.call(aten.full.default, [1, 1], 0.0, dtype=dtype, device=found.device, pin_memory=False)
    for added in masks:
        mask = _beside(found, added, rank, lead)
        hidden = mask if added.hides else found.call(aten.logical_not.default, mask)
        total = found.call(aten.masked_fill.Scalar, total, hidden, hiding)
    return total


def _beside(found: Match, added: Added, rank: int, lead: tuple[int, int]) -> fx.Node:
    """What is added, with a shape that broadcasts with that of the scores once batch and heads are apart there."""
    shape = shape_of(added.node)
    if prod(shape[:-2]) == 1:
        return added.node
    if added.rank != rank:
        raise Declined("what is added does not tell batch and heads apart")
    return found.call(aten.view.default, added.node, [*lead, *shape[1:]]) if rank == 3 else added.node


def _library(found: Match) -> fx.Node:
    attention = Attention.of(found.root)
    if attention is None:
        raise Declined("it is no attention")
    scores, value = attention.scores, found.root.meta["val"]
    queries, keys = scores.left.meta["val"], scores.right.meta["val"]
    if not (queries.dtype is keys.dtype is value.dtype) or 0 in (*queries.shape, *keys.shape, *value.shape):
        raise Declined("there is nothing to attend to, or not in one type")
    rows, columns = scores.shape[-2:]
    causal = len(scores.added) == 1 and looks_back(scores.added[0], rows, columns)
    _refuse_where_worse(value, columns, causal, biased=bool(scores.added) and not causal)
    build = Builder(found)
    shown = _original(Reordered.of(scores.left).source)
    unscaled, times = (len(shown.users) == 1 and multiple(shown)) or (shown, 1.0)
    left = unscaled if shown is scores.left else scores.left
    lead = _lead(scores, left)
    queried = _heads_apart(found, left, lead, source=None if left is unscaled else unscaled)
    keyed = _heads_apart(found, scores.right, lead, turned=True)
    values = _heads_apart(found, attention.values, lead)
    hiding, averages = (-math.inf, False) if causal else _hiding(scores, value.dtype)
    bias = None if causal else _bias(found, scores, lead, value.dtype, hiding)
    shape = (*shape_of(queried)[:3], columns)
    expanded = None if bias is None else build.expand(_aligned(build, bias), shape)
    result = attended(found, Operands(queried, keyed, values, expanded, causal, scores.scale * times))
    if causal:
        result = _poisoned(build, result, values, -2)  # hidden or not; the library does not look at what is hidden
    if causal or bias is not None:
        result = _poisoned(build, result, queried, -1)  # few keys are seen, whose scores may all be minus infinity
    if bias is not None and not (hiding > -math.inf and all(added.hides is not None for added in scores.added)):
        most = found.call(aten.amax.default, bias, [-1], True)
        if averages:
            alive = found.call(aten.gt.Scalar, most, -math.inf)
            average = found.call(aten.mean.dim, values, [-2], True)
            result = found.call(aten.where.self, alive, result, average, like=result)
        else:
            result = build.add(result, build.scale(most, 0.0))  # NaN where all is hidden; lies as the library's does
    return build.view(result, shape_of(found.root))


def _poisoned(build: Builder, result: fx.Node, operand: fx.Node, dim: int) -> fx.Node:
    """`result` with NaN wherever something along `dim` of `operand` is not finite."""
    return build.add(result, build.sum(build.scale(operand, 0.0), (dim,)))


def only_products_use_bfloat16() -> bool:
    """Whether this CPU has instructions for products in bfloat16 that the library's attention kernel does without: it uses AMX alone."""
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def _refuse_where_worse(value: torch.Tensor, keys: int, causal: bool, biased: bool) -> None:
    if value.device.type != "cuda":
        if keys < _FEWEST_ON_CPU:
            raise Declined("scores that are NaN, fewer than a vector, are hidden ones for the library")
        work, scores = value.numel() * keys, value.numel() // value.shape[-1] * keys
        measured = work >= _LEAST_WORK_ON_CPU and scores <= _MOST_SCORES_ON_CPU
        if value.dtype is torch.bfloat16 and measured and only_products_use_bfloat16():
            raise Declined("products are faster in bfloat16")
        return
    if value.dtype is torch.float64:
        raise Declined("the library has no kernel for it")
    if value.dtype is torch.float32 and allows_tf32():
        raise Declined("products that may round to TF32 are faster")
    if keys < _FEWEST_ON_CUDA:
        raise Declined("products of few keys are faster")
    if value.dtype is torch.float32 and (biased or (keys > _FEW_KEYS and not causal)):
        raise Declined("products of large tiles are faster")
    if biased and keys < _FEWEST_BIASED:
        raise Declined("what is added to few scores is added faster behind a product")


def _aligned(build: Builder, bias: fx.Node) -> fx.Node:
    """`bias` with rows that begin at multiples of what the kernel asks for."""
    columns = shape_of(bias)[-1]
    short = -columns % _BIAS_ALIGNMENT
    if columns == 1 or not short or bias.meta["val"].device.type == "cpu":
        return bias
    return build.slice(build.pad(bias, -1, 0, short), -1, range(columns))


RULES: tuple[Rule, ...] = (
    Rule(
        name="attention",
        pattern=op(aten.bmm)(var("weights"), var("values")),
        rewrite=_library,
        why=(
            "the library's kernel computes softmax(scale * q @ k + bias) @ v without writing what stands between; what a mask "
            "leaves nothing of, and what it hides that is not finite, give NaN as before; numbers below -5e4 in the place of "
            "scores hide them, too"
        ),
    ),
)
