"""AOTAutograd as PyTorch has it for backends of torch.compile, without what that imports for its files of debugging: most of TorchInductor, a second and more."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch._dynamo import disable
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.aot_autograd import aot_module_simplified
from torch._logging._internal import trace_log

from fusepass.capture.threads import replaced

Compiler = Callable[..., Any]


def with_gradients(
    graph: fx.GraphModule, inputs: Sequence[Any], *, bw_compiler: Compiler, **options: Any
) -> Callable[..., Any]:
    """What ``aot_autograd(bw_compiler=bw_compiler, **options)`` makes of a graph of Dynamo's; inputs in lists, as compiled autograd has them, and
    ``TORCH_COMPILE_DEBUG`` are left to that."""
    if os.environ.get("TORCH_COMPILE_DEBUG") == "1" or any(isinstance(each, list | tuple | dict) for each in inputs):
        made: Callable[..., Any] = aot_autograd(bw_compiler=bw_compiler, **options)(graph, inputs)
        return made

    def compile_backward(*args: Any, **kwargs: Any) -> Any:
        # Dynamo is to look neither into the compiler, which may be called as late as in backward, nor into what it gives.
        return disable(disable(bw_compiler)(*args, **kwargs))

    with _unread():
        call: Callable[..., Any] = disable(
            aot_module_simplified(graph, inputs, bw_compiler=compile_backward, **options)
        )
    return call


@contextmanager
def _unread() -> Iterator[None]:
    """While open, AOTAutograd does not print its graphs for logs that nobody keeps."""
    logs = (logging.getLogger(graph_compile.__name__ + end) for end in (".__aot_graphs", ".__aot_joint_graph"))
    if trace_log.handlers or any(log.isEnabledFor(logging.INFO) for log in logs):
        yield
        return
    with replaced(fx.GraphModule, "print_readable", lambda *args, **kwargs: ""):
        yield
