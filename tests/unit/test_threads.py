"""Threads that call, trace and compile at once: results are eager's, and nobody notices what others trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from fusepass.capture.threads import tracing_apart
from fusepass.codegen.lowering.interpreter import Interpreter


def together(*functions: Callable[[], None]) -> list[BaseException]:
    """What these raise, each in a thread of its own."""
    raised: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.invariant(46)
def test_a_compiled_function_is_called_by_threads_with_sizes_that_change() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * 2 + 1).sum(-1)

    compiled = torch.compile(function, backend="fusepass", options={"tune": "off"})

    def calls() -> None:
        for size in range(2, 8):
            x = torch.randn(size, 5)
            torch.testing.assert_close(compiled(x), function(x))

    assert together(calls, calls, calls, calls) == []


@pytest.mark.invariant(46)
def test_tracing_apart_replaces_nothing_that_other_threads_call() -> None:
    call = nn.Module.__call__
    compiled = torch.compile(torch.cos, backend="eager")
    compiled(torch.ones(2))
    raised: list[BaseException] = []

    def check() -> None:
        assert nn.Module.__call__ is call
        compiled(torch.ones(2))

    def function(x: torch.Tensor) -> torch.Tensor:
        raised.extend(together(check))
        return torch.tanh(x) + 1

    with tracing_apart():
        traced = make_fx(function)(torch.ones(2))
    assert raised == []
    torch.testing.assert_close(traced(torch.zeros(2)), torch.ones(2))


@pytest.mark.invariant(46)
def test_graphs_that_are_run_leave_pytorchs_metadata_to_the_thread_that_traces() -> None:
    seen: list[object] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(dict(fx_traceback.get_current_meta()))
        return x

    graph = fx.Graph()
    graph.output(graph.call_function(noted, (graph.placeholder("x"),)))
    for node in graph.nodes:
        node.meta["partitioner_tag"] = "is_forward"
    module = fx.GraphModule(nn.Module(), graph)
    with (
        fx_traceback.preserve_node_meta(),
        mock.patch.object(fx_traceback, "current_meta", {"partitioner_tag": "mine"}),
    ):
        fx.Interpreter(module).run(torch.ones(1))
        assert together(lambda: Interpreter(module).run(torch.ones(1))) == []
    assert [each["partitioner_tag"] for each in seen] == ["is_forward", "mine"]
    assert [kind for kind in fx.Interpreter.__subclasses__() if kind.__module__.startswith("fusepass")] == [Interpreter]
