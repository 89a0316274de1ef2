"""What views are views of: a tensor, or a number that backward conjugates."""

from __future__ import annotations

import torch
from torch import fx

from fusepass.patterns.aliasing import base, viewed
from fusepass.training.backend import Backend

aten = torch.ops.aten


def test_a_view_of_a_number_is_one_of_no_tensor() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    turned = graph.call_function(aten.t.default, (x,))
    number = graph.call_function(aten._conj.default, (1j,))
    assert viewed(turned) is base(turned) is x
    assert viewed(number) is None
    assert base(number) is number


def test_gradients_of_products_with_one_complex_number() -> None:
    """Backward has the number's conjugate twice, as a view of no tensor."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + x * 1j).abs() + (x * 1j).imag

    x = torch.tensor([[3.0, -4.0]], requires_grad=True)
    torch._dynamo.reset()
    torch.compile(function, backend=Backend("graph", {"tune": "off"}))(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().sign() * 2**0.5 + 1)
