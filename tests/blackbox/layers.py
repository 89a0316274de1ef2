"""Convolutions, products, pools, resampling, embeddings and recurrences as compilers' public suites have them."""

from __future__ import annotations

import torch

from tests.blackbox.case import Table, cases

TABLE: Table = {
    "r(2, 3, 9, 8) @ nn.Conv2d(3, 4, 3)": ("m(a)", "m(a).relu() + 1", "F.gelu(m(a * 2))", "m(a).sum((2, 3))", "m(a.contiguous(memory_format=torch.channels_last)).relu()", "m(a) + m(a.flip(2))"),
    "r(2, 4, 9, 8) @ nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False)": ("m(a)", "m(a.relu()).sigmoid()"),
    "r(2, 4, 9, 8) @ nn.Conv2d(4, 4, 3, padding='same', dilation=2, groups=4)": ("m(a)", "m(a) * a"),
    "r(2, 4, 5, 5) @ nn.Conv2d(4, 3, 1)": ("m(a).relu()", "m(a).mean((2, 3))"),
    "r(1, 4, 5, 5) @ nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())": ("m(a)", "m(a) + a"),
    "r(2, 3, 11) @ nn.Conv1d(3, 4, 3, padding=2)": ("m(a)", "F.glu(m(a), 1)"),
    "r(1, 2, 5, 6, 4) @ nn.Conv3d(2, 3, 2)": ("m(a)", "m(a).tanh()"),
    "r(2, 3, 5, 4) @ nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1)": ("m(a)", "m(a).relu()"),
    "r(3, 9, 8) @ nn.Conv2d(3, 2, 3, padding_mode='reflect', padding=1)": ("m(a)",),
    "r(3, 4), r(4, 5)": ("a @ b", "(a @ b).relu() + 1", "torch.addmm(torch.ones(5), a, b)", "torch.addmm(torch.ones(3, 5), a, b, beta=0.3, alpha=2)", "torch.mm(a * 2, b.exp())", "(a @ b).softmax(1)", "torch.mv(a, b[:, 0]), torch.dot(a[0], b[:, 1])", "torch.linalg.multi_dot([a, b, b.T])", "torch.chain_matmul(a, b)", "a @ b[:, 0] * 2", "torch.einsum('ij,jk->ki', a, b)", "torch.inner(a, b.T)", "torch.addmv(torch.ones(3), a, b[:, 0])", "torch.addr(torch.ones(3, 5), a[:, 0], b[0])"),
    "r(2, 3, 4), r(2, 4, 5)": ("torch.bmm(a, b)", "torch.baddbmm(a.new_ones(2, 3, 5), a, b, beta=0.5)", "torch.baddbmm(a.new_ones(1, 1, 5), a, b, alpha=0.5).relu()", "torch.addbmm(a.new_ones(3, 5), a, b)", "torch.matmul(a, b[0])", "(a[:, None] @ b).sum(1)", "torch.einsum('bij,bjk->bik', a, b).tanh()", "a.transpose(1, 2).bmm(a) * 2"),
    "r(3, 4) @ nn.Linear(4, 5)": ("m(a)", "F.gelu(m(a))", "m(a).softmax(-1)", "m(a) + m(a * 2)", "m(a.relu()).sum()", "m(a[0])", "m(a[None, None])", "F.dropout(m(a), 0.5, False)"),
    "r(3, 4) @ nn.Linear(4, 1)": ("m(a)", "m(a.relu()).sum()", "m(F.gelu(a)).squeeze(-1)", "m(a).sigmoid() * a"),
    "r(1, 4) @ nn.Linear(4, 1, bias=False)": ("m(a)", "m(a.tanh()).sum()", "m(a) * 2 + 1"),
    "r(2, 3, 4) @ nn.Bilinear(4, 4, 2)": ("m(a, a * 2)",),
    "r(2, 3, 8, 9)": (
        "F.max_pool2d(a, 2)", "F.max_pool2d(a, 3, 2, 1).relu()", "F.max_pool2d(a, (2, 3), (1, 2), dilation=2)", "F.max_pool2d(a, 3, 2, ceil_mode=True)", "F.max_pool2d(a, 2, return_indices=True)", "F.avg_pool2d(a, 2)", "F.avg_pool2d(a, 3, 2, 1)", "F.avg_pool2d(a, 3, 2, 1, count_include_pad=False)", "F.avg_pool2d(a, 3, 2, 1, ceil_mode=True)", "F.avg_pool2d(a, 2, divisor_override=3)", "F.avg_pool2d(a, (8, 9)), F.avg_pool2d(a, (1, 9))", "F.adaptive_avg_pool2d(a, 1)", "F.adaptive_avg_pool2d(a, (3, 4)) * 2", "F.adaptive_avg_pool2d(a, (None, 2))", "F.adaptive_avg_pool2d(a, (12, 11))", "F.adaptive_max_pool2d(a, (3, 2))", "F.adaptive_max_pool2d(a, 2, return_indices=True)", "F.lp_pool2d(a, 2, 2)", "F.fractional_max_pool2d(a, 2, output_size=3, _random_samples=a.new_full((2, 3, 2), 0.4))",
        "F.max_unpool2d(*F.max_pool2d(a[..., :8], 2, return_indices=True), 2)", "F.max_pool1d(a.flatten(1, 2), 3)", "F.avg_pool1d(a.flatten(1, 2), 2, 1, 1)", "F.max_pool3d(a, 2), F.avg_pool3d(a, 2, 1, 1)", "F.adaptive_avg_pool3d(a, 2), F.adaptive_max_pool1d(a.flatten(1, 2), 4)", "y = torch.tanh(a); return y > F.max_pool2d(y, 3, 1, 1), y", "F.max_pool2d(a, 2) + F.avg_pool2d(a, 2)", "F.max_pool2d(F.max_pool2d(a, 2), 2)",
        "F.interpolate(a, scale_factor=2)", "F.interpolate(a, size=(5, 4))", "F.interpolate(a, scale_factor=2, mode='bilinear')", "F.interpolate(a, size=(11, 5), mode='bilinear', align_corners=True)", "F.interpolate(a, scale_factor=1.5, mode='bicubic')", "F.interpolate(a, size=(4, 5), mode='area')", "F.interpolate(a, size=(5, 5), mode='nearest-exact')", "F.interpolate(a, size=(4, 4), mode='bilinear', antialias=True)", "F.interpolate(a[:, :, 0], scale_factor=2, mode='linear')", "F.interpolate(a[:, None], scale_factor=2, mode='trilinear')", "F.grid_sample(a, torch.linspace(-1, 1, 40).to(a.dtype).view(1, 4, 5, 2).expand(2, 4, 5, 2))", "F.grid_sample(a, torch.linspace(-1.5, 1.5, 40).to(a.dtype).view(1, 4, 5, 2).expand(2, 4, 5, 2), mode='nearest', padding_mode='border', align_corners=True)", "F.grid_sample(a, F.affine_grid(torch.eye(2, 3).to(a.dtype).expand(2, 2, 3) * 0.8, (2, 3, 4, 4), align_corners=False), padding_mode='reflection')",
        "F.dropout2d(a, 0.5, False)", "F.relu(a).mean((2, 3), keepdim=True) * a", "F.interpolate(a, scale_factor=3.0)", "F.pad(a, (1, 1, 2, 2), mode='reflect').sum(1)", "F.pad(a, (1, 2, 0, 1), mode='replicate') * 2", "F.max_pool2d(F.pad(a, (0, 1, 0, 1), value=-1.0), 3, 2)",
    ),
    "r(3, 8, 9)": ("F.max_pool2d(a, 2)", "F.avg_pool2d(a, 3, 2, 1)", "F.adaptive_avg_pool2d(a, 2)"),
    "r(1, 2, 3, 3)": ("F.avg_pool2d(a, 3, 3, 1)", "F.max_pool2d(a, 3)", "F.avg_pool2d(a, 2, 2, ceil_mode=True, count_include_pad=False)", "F.adaptive_avg_pool2d(a, 3)", "F.avg_pool2d(a, 1)"),
    "k(7, 3, 4) @ nn.Embedding(7, 5)": ("m(a)", "m(a).sum(1)", "m(a) * 2 + 1", "F.layer_norm(m(a), (5,))", "m(a) + m(a.flip(0))"),
    "k(7, 3, 4) @ nn.Embedding(7, 5, padding_idx=2)": ("m(a)", "m(a).relu()"),
    "k(7, 3, 4) @ nn.Embedding(7, 5, max_norm=1.0)": ("m(a)",),
    "k(7, 3, 4) @ nn.EmbeddingBag(7, 5)": ("m(a)", "m(a) * 2"),
    "k(7, 12), torch.tensor([0, 4, 9]) @ nn.EmbeddingBag(7, 5, mode='max')": ("m(a, b)",),
    "k(7, 12), torch.tensor([0, 4, 9]) @ nn.EmbeddingBag(7, 5, mode='sum')": ("m(a, b).tanh()",),
    "r(5, 2, 4) @ nn.LSTM(4, 3)": ("m(a)", "m(a)[0].relu()"),
    "r(5, 2, 4) @ nn.GRU(4, 3, batch_first=True)": ("m(a)",),
    "r(2, 4) @ nn.LSTMCell(4, 3)": ("m(a)",),
    "r(2, 4) @ nn.GRUCell(4, 3)": ("m(a)", "m(a) * 2"),
    "r(2, 5, 8) @ nn.MultiheadAttention(8, 2, batch_first=True)": ("m(a, a, a)[0]", "m(a, a * 2, a, need_weights=False)[0] + a"),
    "r(2, 5, 8) @ nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)": ("m(a)", "m(a).mean(1)"),
    "r(2, 2, 5, 4), r(2, 2, 5, 4), r(2, 2, 5, 4)": ("F.scaled_dot_product_attention(a, b, c)", "F.scaled_dot_product_attention(a, b, c, is_causal=True)", "F.scaled_dot_product_attention(a, b, c, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril())", "F.scaled_dot_product_attention(a, b, c, attn_mask=torch.linspace(-1, 1, 5).to(a.dtype).expand(5, 5), scale=0.3)", "((a @ b.mT) * 0.5).softmax(-1) @ c", "((a @ b.mT).masked_fill(torch.ones(5, 5).triu(1) > 0, float('-inf'))).softmax(-1) @ c"),
}  # fmt: skip
HALVES = (
    "r(2, 3, 8, 9)",
    "r(3, 4) @ nn.Linear(4, 5)",
    "r(2, 2, 5, 4), r(2, 2, 5, 4), r(2, 2, 5, 4)",
    "k(7, 3, 4) @ nn.Embedding(7, 5)",
    "r(2, 3, 4), r(2, 4, 5)",
)

CASES = (*cases("layers", TABLE), *cases("layers", {key: TABLE[key] for key in HALVES}, (torch.bfloat16,)))
