"""Recurrent layers of the library are recorded whole: taken apart they are some ten operators for each step and layer.

Nothing would be won by it: the library does all steps in one call, on a GPU in a few kernels. And dropout between layers would
draw its random numbers in another order.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

RECURRENT = {
    torch.gru: aten.gru.input,
    torch.lstm: aten.lstm.input,
    torch.rnn_relu: aten.rnn_relu.input,
    torch.rnn_tanh: aten.rnn_tanh.input,
}
"""What `torch.nn` calls, and the operator that it is for sequences which are padded."""


def is_whole(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of `func` is to be recorded as one operator.

    Not under autocast, which casts inside of the layer; not of packed sequences, whose steps depend on values.
    """
    if func not in RECURRENT or len(args) < 4:
        return False
    x, _, _, of_padded, *_ = args
    return isinstance(of_padded, bool) and not torch.is_autocast_enabled(x.device.type)


def drops_out(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of `func` draws random numbers, for dropout between layers."""
    if func not in RECURRENT or len(args) < 9:
        return False
    dropout, training = args[5:7] if isinstance(args[3], bool) else args[6:8]
    return bool(dropout and training)


def run_whole(func: Any, args: tuple[Any, ...]) -> Any:
    """The result of `func`, of which the active dispatch mode sees one operator: autograd's dispatch would take it apart."""
    with torch._C._AutoDispatchBelowAutograd():
        return RECURRENT[func](*args)
