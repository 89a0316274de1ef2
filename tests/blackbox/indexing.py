"""Gathers, scatters and indexed reads and writes as compilers' public suites have them."""

from __future__ import annotations

import torch

from tests.blackbox.case import Table, cases

TABLE: Table = {
    "r(5, 6), k(5, 4)": (
        "a[b]", "a[b] * 2 + 1", "a[:, b]", "a[b, b]", "a[b, None]", "a[b[:, None], b]", "a[b - 5]", "a[-1, b]", "a[b][:, 1:3].sum(1)", "a.index_select(0, b), a.index_select(1, b)", "a.take(b)", "torch.take_along_dim(a, b[:, None], 0)", "a.index_fill(0, b, -1.0)", "a.index_add(0, b, a[:4] * 2)", "a.index_add(0, b, a[:4], alpha=0.5)", "a.index_copy(0, torch.tensor([3, 1]), a[:2] * 2)", "a.index_put((b,), a[0])", "a.index_put((b,), a[:4], accumulate=True)", "torch.index_put(a, (b, b), a.new_ones(4), accumulate=True)", "a.index_reduce(0, b, a[:4], 'amax')", "a.put(b, torch.arange(4).to(a.dtype))", "F.one_hot(b, 5).sum(0), F.one_hot(b) * 2", "F.embedding(b, a)", "a[b.clamp(0, 2)] + a[(b + 1) % 5]", "a[torch.tensor([[0, 1], [2, 3]])]", "a[1], a[1, 2], a[..., 0], a[None, :, None]", "a[[0, 2]], a[[True, False, True, False, True]]", "torch.gather(a, 1, b[:, None].expand(4, 2))", "a.repeat_interleave(torch.tensor([1, 2, 1, 1, 3]), 0, output_size=8)", "a[b.to(torch.int32)]", "a[:4][b > 1]", "a.scatter(0, b[None, :], 3.0)", "a.select(0, 3)[b]",
    ),
    "r(5, 6), k(5, 5, 6)": ("a.gather(0, b), a.gather(1, b)", "a.gather(0, b) * a", "a.scatter(0, b, a * 2)", "a.scatter(1, b, 3.0)", "a.scatter_add(0, b, a)", "a.scatter_add(1, b, a * 2).relu()", "torch.zeros_like(a).scatter_add(0, b, a)", "a.scatter_reduce(0, b, a * 2, 'sum')", "a.scatter_reduce(0, b, a, 'amax', include_self=False)", "a.scatter_reduce(1, b, a, 'mean')", "a.scatter_reduce(0, b, a, 'prod')", "a.scatter(0, b, a, reduce='multiply')", "a.softmax(1).gather(1, b).log()", "torch.take_along_dim(a, b, 1).sum(0)"),
    "r(5, 6), b(5, 6)": ("a[b]", "a[b].sum()", "a.masked_select(b)", "a.masked_fill(b, 2.0), a.masked_fill(~b, float('-inf')).softmax(1)", "a.masked_scatter(b, a.flip(0))", "torch.where(b, a, a * 2)", "b.nonzero()", "torch.where(b)[0]", "a * b, a[b.any(1)]", "torch.masked_fill(a, b, torch.tensor(3.0))", "a.index_put((b,), torch.tensor(1.0))", "torch.nonzero(a > 0).sum()", "b.argwhere().float()", "(a * b).sum(1) / b.sum(1)"),
    "r(4, 5, 6), k(4, 3), k(5, 3)": ("a[b, c]", "a[b, :, c]", "a[:, c].mean(1)", "a[b][:, c]", "a[b, c, 1:4] * 2", "a.index_put((b, c), a[0, 0])", "a[b, c].relu() + 1"),
    "r(3, 4)": ("torch.tril_indices(3, 4)", "a[torch.arange(3), torch.arange(3)]", "a[torch.tensor([0, 2]), 1:3]", "a.unique()", "torch.unique_consecutive(a.round())", "torch.histc(a, 4)", "a.flatten()[torch.arange(11, -1, -1)]", "a[:, [2, 0, 1, 3]] * 2", "a[a > 0]", "a[7]", "a[torch.tensor([9])]", "a.view(5, 5)", "a @ a", "torch.cat([a, a[:, :2]])", "a.index_select(0, torch.tensor([5]))", "a + torch.ones(5)"),
}  # fmt: skip

CASES = (*cases("indexing", TABLE), *cases("indexing", {key: TABLE[key] for key in list(TABLE)[:3]}, (torch.float16,)))
