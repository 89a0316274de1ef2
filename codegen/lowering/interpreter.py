"""PyTorch's interpreter of graphs without what it says of itself in global variables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx


class Interpreter(fx.Interpreter):
    """Runs a graph node by node; other threads do not see which.

    PyTorch's own puts the node's metadata into `torch.fx.traceback.current_meta`, one for all threads, while any of them traces with
    metadata kept: the graph that AOTAutograd makes there would get ours, and perhaps a forward operator count as one of backward.
    """

    @contextmanager
    def _set_current_node(self, node: fx.Node) -> Iterator[None]:
        yield
