"""Reductions, norms, scans, sorts and losses as compilers' public suites have them."""

from __future__ import annotations

import torch

from tests.blackbox.case import Table, cases

TABLE: Table = {
    "r(4, 5, 6)": (
        "a.sum(), a.sum(1), a.sum((0, 2), keepdim=True)", "a.sum(-1, dtype=torch.float64)", "a.mean(), a.mean(0), a.mean((1, 2))", "a.prod(1), a.prod()", "a.amax(1), a.amin((0, 2))", "a.max(1), a.min(2, keepdim=True)", "a.max(), a.min()", "a.aminmax(dim=1), a.aminmax()", "a.argmax(1), a.argmin(), a.argmax(2, keepdim=True)", "a.var(1), a.std(0)", "a.var((0, 2), correction=0), a.std((1, 2), keepdim=True)", "torch.var_mean(a, 2), torch.std_mean(a, (0, 1))", "a.var(), a.std(correction=2)",
        "a.norm(), a.norm(1, 1), a.norm(float('inf'), 2)", "torch.linalg.vector_norm(a, 3, (0, 1)), torch.linalg.vector_norm(a, 0, 1)", "torch.linalg.vector_norm(a, -float('inf'), 2)", "torch.linalg.matrix_norm(a)", "a.logsumexp(1), a.logsumexp((0, 2))", "a.softmax(1), a.log_softmax(2)", "a.softmax(-1, dtype=torch.float64)", "F.softmin(a, 1)", "(a > 0).any(1), (a > 0).all(), (a > 0).sum(2)", "a.any(), a.all(1)", "torch.count_nonzero(a > 0, 1)", "a.nansum(1), a.nanmean(2)", "a.median(1), a.median()", "a.nanmedian(2).values", "a.mode(1).values", "a.quantile(0.3, 1)", "a.kthvalue(2, 1)",
        "a.cumsum(1), a.cumsum(2)", "a.cumprod(2)", "a.cummax(1), a.cummin(2)", "a.logcumsumexp(1)", "a.flip(1).cumsum(1).flip(1)", "a.cumsum(1, dtype=torch.float64)", "a.diff(dim=1)", "torch.trapezoid(a, dim=1)", "torch.cumulative_trapezoid(a, dim=2)", "a.sort(1), a.sort(2, descending=True)", "a.argsort(1)", "a.sort(dim=1, stable=True).values * 2", "a.topk(2), a.topk(3, 1, largest=False)", "torch.msort(a)", "torch.renorm(a, 2, 1, 0.5)", "a.sum(()), a.mean((0, 1, 2), keepdim=True)",
        "F.normalize(a), F.normalize(a, p=3.0, dim=0)", "a - a.mean(1, keepdim=True)", "(a - a.mean(2, True)) / (a.std(2, keepdim=True) + 1e-5)", "a / a.norm(dim=1, keepdim=True)", "a * (a == a.amax(1, keepdim=True))", "torch.where(a == a.amax(0, keepdim=True), a * 2, a * 0.1)", "a.exp() / a.exp().sum(1, keepdim=True)", "a.sum(1).softmax(0)", "(a * 2).max(2).values.sum(0)", "a.mean(1) + a.amax(1), a.var(1) * 2", "a.tanh().amax(0), a.tanh()", "a.unique().sum()" , "torch.histc(a, 5, -2, 2)", "torch.bincount(a.flatten().abs().long())", "torch.searchsorted(a.sort().values, a)", "torch.bucketize(a, torch.tensor([-1.0, 0.0, 1.0]))", "torch.trace(a[0]), torch.logdet(a[0, :, :5] @ a[0, :, :5].T + torch.eye(5))", "torch.cov(a[0]), torch.corrcoef(a[0])", "torch.einsum('ijk,ijk->i', a, a)", "torch.tensordot(a, a, ([1, 2], [1, 2]))", "a.sum(0).cumsum(0).amax(1)", "torch.cdist(a, a * 2)", "F.pdist(a[0])", "F.cosine_similarity(a, a.roll(1, 0), dim=1)", "F.pairwise_distance(a, a.roll(1))",
    ),
    "r(1, 7)": ("a.sum(0), a.mean(0), a.amax(0)", "a.var(1), a.std(1)", "a.softmax(0)", "a.cumsum(0)", "a.var(0)", "a.prod(0), a.argmax(0)"),
    "r(3, 4096)": ("a.sum(1), a.mean(0)", "a.softmax(1)", "a.var(1), a.norm(dim=1)", "a.argmax(1), a.amax(1)", "a.cumsum(1)[:, -1]", "F.layer_norm(a, (4096,))"),
    "r(300, 40)": ("a.sum(0), a.amax(0)", "a.var(0)", "a.argmin(0)", "a.softmax(0)", "a.mean()", "a.cumsum(0)"),
    "r(4, 3, 16) * 3 + 100": ("a.var(1), a.std((0, 1))", "torch.var_mean(a, 2)", "F.layer_norm(a, (16,))", "F.group_norm(a, 3)", "a.std(1) * 2", "a.log_softmax(1)"),
    "r(6, 5), k(5, 6)": ("F.cross_entropy(a, b)", "F.cross_entropy(a, b, label_smoothing=0.2, reduction='sum')", "F.cross_entropy(a, b, ignore_index=2)", "F.cross_entropy(a, b, weight=torch.linspace(0.5, 1, 5), reduction='none')", "F.nll_loss(a.log_softmax(1), b)", "F.nll_loss(a.log_softmax(1), b, reduction='none', ignore_index=1)", "F.multi_margin_loss(a, b)", "F.cross_entropy(a, F.one_hot(b, 5).to(a.dtype) * 0.7)", "F.multilabel_margin_loss(a, b[:, None].expand(6, 5).contiguous())", "F.multilabel_margin_loss(a, torch.where(torch.arange(5) < b[:, None], torch.arange(5), -1), reduction='none')"),
    "r(2, 5, 3, 4), k(5, 2, 3, 4)": ("F.cross_entropy(a, b)", "F.nll_loss(a.log_softmax(1), b, ignore_index=0)"),
    "r(4, 6), r(4, 6)": (
        "F.mse_loss(a, b), F.l1_loss(a, b, reduction='sum')", "F.smooth_l1_loss(a, b, beta=0.5), F.huber_loss(a, b, delta=0.7)", "F.binary_cross_entropy_with_logits(a, b.sigmoid())", "F.binary_cross_entropy(a.sigmoid(), b.sigmoid())", "F.binary_cross_entropy_with_logits(a, b.sigmoid(), pos_weight=torch.ones(6) * 2, reduction='none')", "F.kl_div(a.log_softmax(1), b.softmax(1), reduction='batchmean')", "F.kl_div(a.log_softmax(1), b.log_softmax(1), log_target=True, reduction='sum')", "F.soft_margin_loss(a, b.sign())", "F.hinge_embedding_loss(a, b.sign())", "F.margin_ranking_loss(a[:, 0], a[:, 1], b[:, 0].sign())", "F.cosine_embedding_loss(a, b, b[:, 0].sign())", "F.triplet_margin_loss(a, b, a * b)", "F.poisson_nll_loss(a, b.abs())", "F.gaussian_nll_loss(a, b, a.abs() + 0.1)", "F.multilabel_soft_margin_loss(a, (b > 0).to(a.dtype))",
    ),
    "r(5, 3, 4) @ nn.LayerNorm(4)": ("m(a)", "m(a).relu() + a", "m(a * 2).sum(1)", "m(a).transpose(1, 2)", "F.gelu(m(a + 1)) * a"),
    "r(3, 6, 4, 4) @ nn.GroupNorm(3, 6)": ("m(a)", "F.silu(m(a))", "m(a.relu()) + a", "m(a.contiguous(memory_format=torch.channels_last))"),
    "r(4, 6, 5, 3) @ nn.BatchNorm2d(6)": ("m(a)", "m(a).relu() * 2", "m(a) + a", "m(a.contiguous(memory_format=torch.channels_last))"),
    "r(4, 6, 5) @ nn.BatchNorm1d(6, momentum=None)": ("m(a)", "m(a).tanh()"),
    "r(4, 6, 5, 3) @ nn.BatchNorm2d(6).eval()": ("m(a)", "m(a).relu()"),
    "r(4, 6, 5) @ nn.InstanceNorm1d(6, affine=True)": ("m(a)", "m(a) * a"),
    "r(4, 6) @ nn.RMSNorm(6)": ("m(a)", "m(a) * a.sigmoid()"),
    "r(2, 6, 5, 5)": ("F.local_response_norm(a, 3)", "F.instance_norm(a)", "F.batch_norm(a, None, None, training=True)", "F.group_norm(a, 2) * 2"),
}  # fmt: skip
HALVES = (
    "r(4, 5, 6)",
    "r(4, 6), r(4, 6)",
    "r(5, 3, 4) @ nn.LayerNorm(4)",
    "r(3, 6, 4, 4) @ nn.GroupNorm(3, 6)",
    "r(4, 6, 5, 3) @ nn.BatchNorm2d(6)",
)

CASES = (*cases("reductions", TABLE), *cases("reductions", {key: TABLE[key] for key in HALVES}, (torch.bfloat16,)))
