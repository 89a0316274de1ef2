"""What a type checker says of options: `make lint` fails where it accepts a wrong one, as the remark is unused then."""

from __future__ import annotations

from typing import Any

from torch import nn

import fusepass


def right(model: nn.Module, options: dict[str, Any]) -> list[nn.Module]:
    with fusepass.override(jobs=2, disable="teams"):
        return [
            fusepass.optimize(model),
            fusepass.optimize(model, tune="max", algebra="finite", cuda_graphs=True),
            fusepass.optimize(model, **options),
        ]


def wrong(model: nn.Module) -> None:
    fusepass.optimize(model, tun="max")  # type: ignore[call-arg]
    fusepass.optimize(model, tune="much")  # type: ignore[arg-type]
    fusepass.optimize(model, cuda_graphs="yes")  # type: ignore[arg-type]
    with fusepass.override(job=2):  # type: ignore[call-arg]
        pass
