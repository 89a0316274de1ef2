"""Views, copies and joins as compilers' public suites have them, with sizes of zero and one among them."""

from __future__ import annotations

import torch

from tests.blackbox.case import Table, cases

TABLE: Table = {
    "r(2, 3, 4)": (
        "a.view(6, 4) * 2", "a.view(-1), a.view(2, 12) + 1", "a.reshape(4, 6).relu()", "a.permute(2, 0, 1) + 1", "a.transpose(0, 2).contiguous()", "a.mT @ a", "a.flatten(1).unsqueeze(0)", "a.unflatten(2, (2, 2)).sum(-1)", "a.squeeze(), a.unsqueeze(-1).squeeze(-1) * 2",
        "a.expand(5, 2, 3, 4).sum(0)", "a[:, :1].expand(2, 7, 4) * 2", "a[None].expand(2, -1, -1, -1).reshape(4, 3, 4)", "a.movedim(0, -1).relu()", "a.swapaxes(1, 2).reshape(-1) + 1", "a.unbind(1)[2] * a.unbind(1)[0]", "torch.stack(a.unbind(0), 2) * 2",
        "a.split(1, 1), a.split([1, 3], 2)[1] * 2", "torch.chunk(a, 3, 2)[1] + 1", "torch.tensor_split(a, 2, 1)[0].exp()", "torch.cat([a, a.relu(), a[:, :1]], 1)", "torch.cat([a, a[:0]])", "torch.stack([a, a * 2, a + 1], -1)", "torch.hstack([a, a]), torch.vstack([a, a]), torch.dstack([a, a])",
        "a.narrow(2, 1, 2) * 3", "a[..., ::2] + a[..., 1::2]", "a[1:, :, -2:].exp()", "a.select(1, -1).cos()", "a[:, 1, None] * a", "a.flip(0, 2) + a", "torch.rot90(a, 3, (0, 2))", "torch.roll(a, (1, -2), (0, 2)) * a", "a.roll(5) + 1", "a.tile(2, 1, 3), a.repeat(2, 1, 1, 1)", "a.repeat_interleave(2, 1)", "torch.repeat_interleave(a, 3)",
        "a.diagonal(0, 1, 2) * 2", "torch.diag_embed(a) + 1", "a.tril(1), a.triu(-1)", "a.unfold(2, 2, 1).sum(-1)", "a.unfold(1, 2, 2)", "a.as_strided((2, 2), (1, 5)) * 2", "a.as_strided((3, 3), (1, 1), 2).sum()", "a.broadcast_to(3, 2, 3, 4) + 1", "torch.broadcast_tensors(a, a[0, 0])[1] * 2", "a.ravel(), a.mT", "a.masked_fill(a > 0, -1.0)", "a.masked_fill(torch.tensor(True), 2.0)",
        "F.pad(a, (1, 2)), F.pad(a, (1, 0, 2, 1), value=3.0)", "F.pad(a, (-1, -1))", "F.pad(a, (2, -1, -1, 1), value=0.5) * 2", "F.pad(a, (1, 2), mode='reflect')", "F.pad(a, (2, 1), mode='replicate')", "F.pad(a, (3, 2), mode='circular')", "torch.constant_pad_nd(a, (0, 1), 2)",
        "a.new_ones(3) * a.sum(), a.new_full((2,), 3.0)", "torch.zeros_like(a), torch.ones_like(a, dtype=torch.int32), torch.full_like(a, 2)", "torch.empty_like(a).fill_(3) + a", "a.new_empty((2, 3)).zero_() + a.sum(-1)", "torch.eye(4) @ a[0].T, torch.ones(3, 3).tril()", "torch.arange(4) * a, torch.arange(0, 8, 2) + a", "torch.arange(1.0, 0.0, -0.25) * a", "torch.linspace(0, 1, 4) * a", "torch.linspace(-2, 2, 1), torch.logspace(0, 1, 4) + a",
        "a.contiguous(), a.clone(), a.view_as(a), a + 0", "a.view(torch.int32) + 1 if a.dtype == torch.float32 else a", "a.real, torch.view_as_real(torch.view_as_complex(a.reshape(2, 3, 2, 2).float())) * 2", "torch.meshgrid(a[0, 0], a[0, 1], indexing='ij')[0] * 2", "torch.cartesian_prod(a[0, 0], a[0, 1])", "torch.combinations(a[0, 0])", "torch.block_diag(a[0], a[1])", "torch.kron(a[0], a[1])", "torch.outer(a[0, 0], a[1, 1])", "torch.vander(a[0, 0])", "torch.atleast_2d(a[0, 0]) + 1", "a[0].T.reshape(2, 6) * 2", "a.transpose(0, 1).reshape(3, 8).sum(0)", "a.sum_to_size(3, 1)", "a.expand_as(a) * 2, a.unsqueeze(1).expand(2, 5, 3, 4).mean((0, 1))",
        "torch.slice_scatter(a, a[:, :1] * 2, 1, 1, 2)", "torch.select_scatter(a, a[:, 0] * 0, 1, 2)", "torch.diagonal_scatter(a[0], a[0, :, 0])", "torch.as_strided_scatter(a, a[0, 0], (4,), (2,))",
    ),
    "r(2, 3, 4, 5)": ("cl = a.contiguous(memory_format=torch.channels_last); return cl * 2, cl.relu().sum(1)", "a.permute(0, 2, 3, 1).contiguous() + 1", "F.pixel_shuffle(a.reshape(1, 12, 2, 5), 2)", "F.pixel_unshuffle(a[..., :4], 2)", "F.channel_shuffle(a.reshape(2, 4, 3, 5), 2)", "a.permute(0, 3, 1, 2).reshape(10, 12).T", "F.unfold(a, 2, stride=2)", "F.fold(a.reshape(2, 12, 5)[:, :, :4], (3, 3), 2)", "a.flatten(1, 2).transpose(1, 2)[:, ::2]"),
    "r(0, 3)": ("a * 2 + 1", "a.sum(), a.sum(0), a.sum(1), a.mean(0)", "torch.cat([a, a + 1])", "a.T.exp()", "a @ a.T, a.T @ a", "a.softmax(1)", "F.linear(a, a.new_ones(2, 3))", "a.reshape(3, 0) * 2", "a.prod(0), a.any(0), a.all(1)", "F.layer_norm(a, (3,))", "torch.cat([a, torch.ones(2, 3)]) * 2", "a.amax(1)", "a.argmax(1)"),
    "r(1, 1, 1)": ("a.sum(0), a.sum((0, 1, 2))", "a.softmax(0), a.var(0)", "a.expand(3, 4, 5) * 2", "a.squeeze() + a", "a.std(2, correction=0)", "F.layer_norm(a, (1,))", "a.permute(2, 1, 0) + 1", "F.max_pool2d(a, 1), F.avg_pool2d(a, 1)"),
    "r()": ("a * 2", "a.sum() + a.max()", "a.expand(3) * 2", "a.unsqueeze(0).cumsum(0)", "a.view(1, 1) @ a.view(1, 1)", "torch.stack([a, a])", "a.item() * torch.ones(2)", "a.softmax(0)", "torch.where(a > 0, a, -a)"),
    "r(4, 6).T": ("a * 2", "a.contiguous().view(-1)", "a.sum(0), a.sum(1)", "a.softmax(-1)", "a.reshape(2, 3, 4).exp()", "torch.empty_like(a).copy_(a)", "a.clone(), a.relu(), a.to(torch.float64)", "F.layer_norm(a, (4,))", "a.cumsum(0)", "a.as_strided((4, 6), (6, 1)) + 1", "torch.cat([a, a], 1)", "a @ a.T"),
    "r(4, 1, 6).expand(4, 5, 6)": ("a * 2", "a + a", "a.sum(1), a.sum(2)", "a.clone()", "a.contiguous().view(20, 6)", "a.softmax(1)", "a.reshape(-1) * 3"),
    "r(9)[1:]": ("a * 2", "a.view(2, 4).sum(0)", "a.cumsum(0)", "a.unfold(0, 3, 2) * 2", "a.as_strided((3,), (2,)) + 1"),
    "r(70000)": ("(a * 2).tanh()", "a.sum(), a.amax(), a.argmax()", "a.softmax(0).sum()", "a.cumsum(0)[::1000]", "a.view(7, 10000).var(1)", "a[::2] + a[1::2]"),
}  # fmt: skip

CASES = (
    *cases("shapes", TABLE),
    *cases("shapes", {key: TABLE[key] for key in ("r(4, 6).T", "r(0, 3)", "r(1, 1, 1)")}, (torch.float16,)),
)
