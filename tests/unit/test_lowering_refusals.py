"""What lowering cannot express it refuses with a reason; nothing else is ever raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload

from fusepass.codegen.lowering.registry import decomposed
from fusepass.codegen.lowering.tensor import Unsupported
from fusepass.codegen.lowering.tracer import Spec
from tests.support.regions import operator_region, region

X = torch.rand(4, 6, 5, dtype=torch.float64) * 0.9 + 0.05
REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "no lowering for aten.sort": lambda x: x.sort()[0],
    "no lowering for aten.topk": lambda x: x.topk(2)[0],
    "several elements may meet in one place": lambda x: x.scatter(0, torch.zeros_like(x).long(), x),
    "no lowering for aten.index_put": lambda x: x.index_put((x[:, 0, 0].long(),), x[:, 0]),
    "no lowering for aten.rand": lambda x: torch.rand_like(x) + x,
    "no lowering for prims.digamma": torch.digamma,
    "a tensor constant with more than one element": lambda x: x + torch.tensor([1.0, 2, 3, 4, 5]),
    "element type torch.complex128": lambda x: torch.complex(x, x).abs(),
    "an output whose memory has gaps": lambda x: x[:, ::2],
    "an output that overlaps itself": lambda x: x[:1].expand(4, 6, 5),
    "variance of": lambda x: x.new_zeros((3, 0)).var(1) + x.sum(),
    "as_strided of a tensor whose memory has gaps": lambda x: x[:, ::2].as_strided((2, 2), (1, 1), 0) + 1,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_reason(reason: str) -> None:
    with pytest.raises(Unsupported) as caught:
        region(REFUSED[reason], X)
    assert reason in str(caught.value)


OPERATORS = sorted(
    (t for t in decomposition_table if isinstance(t, OpOverload) and torch.Tag.pointwise in t.tags), key=str
)
SHARES = 4


def _arguments(target: OpOverload) -> tuple[Any, ...] | None:
    """Arguments that most operators accept; None where the schema asks for something unusual."""
    values: dict[str, Any] = {
        "Tensor": X, "number": 0.5, "float": 0.5, "int": 1, "SymInt": 1, "bool": False, "List[int]": [1],
        "List[SymInt]": [1], "Optional[Tensor]": None, "Optional[int]": 1, "Optional[float]": None,
        "Optional[number]": 0.5, "Optional[List[int]]": [1], "List[Tensor]": [X, X], "str": "none",
    }  # fmt: skip
    kinds = [str(a.type) for a in target._schema.arguments if not (a.has_default_value() or a.kwarg_only)]
    return tuple(values[kind] for kind in kinds) if all(kind in values for kind in kinds) else None


def _accepted(target: OpOverload, arguments: tuple[Any, ...]) -> bool:
    """Whether PyTorch itself computes it, and gives tensors alone."""
    if "out" in target._overloadname or target._schema.is_mutable:
        return False
    try:
        result = target(*arguments)
    except Exception:
        return False
    return all(isinstance(r, torch.Tensor) for r in (result if isinstance(result, tuple | list) else (result,)))


@pytest.mark.parametrize("share", range(SHARES))
def test_every_pointwise_operator_with_a_decomposition(share: int) -> None:
    """Values where it lowers, `Unsupported` where it does not."""
    torch.manual_seed(0)
    crashes, lowered = [], 0
    for target in OPERATORS[share::SHARES]:
        arguments = _arguments(target)
        if arguments is None or not _accepted(target, arguments):
            continue
        try:
            made = operator_region(target, *arguments)
            lowered += 1
        except Unsupported:
            continue
        except Exception as error:
            crashes.append(f"{target}: {type(error).__name__}: {error}")
            continue
        if torch.Tag.nondeterministic_seeded not in target.tags and "empty" not in str(target):
            try:
                made.check(exact=False, tolerance=1e-7)
            except AssertionError as error:
                crashes.append(f"{target}: {error}")
    assert not crashes, "\n".join(crashes)
    assert lowered > 10


def test_a_decomposition_allocates_nothing_on_a_device() -> None:
    """Which may not be there, and beside which meta tensors are of another device."""
    x = Spec.described((2, 3), (3, 1), torch.float32, torch.device("cuda"))
    make = torch.ops.aten.new_empty.default
    graph = decomposed(lambda a: (make(a, [4, 5], device=torch.device("cuda")) + a.sum(),), [x], ["x"])
    made = [node.meta["val"] for node in graph.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert {value.device.type for value in made} == {"meta"}
