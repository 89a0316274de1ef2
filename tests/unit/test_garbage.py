"""The garbage collector is paused where it should be, and left as it was found."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fusepass
from fusepass.compile.pipeline import _Clock
from fusepass.config import override
from fusepass.garbage import collector_paused, collector_resumed
from fusepass.training import backend
from fusepass.training.aot import with_gradients

_PROGRAM = """
import gc, sys, torch
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
import fusepass
model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.GELU()).eval()
gc.collect(); collections.clear()
optimised = fusepass.optimize(model, tune="off")
print(2 in collections, gc.isenabled())
with torch.no_grad():
    optimised(torch.ones(4, 8))
print("fusepass.codegen.render.cpu.library" in sys.modules, "fusepass.codegen.render.cuda.library" in sys.modules, gc.isenabled())
"""


def _fail_while_paused() -> None:
    with collector_paused():
        assert not gc.isenabled()
        raise KeyError


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError):
            _fail_while_paused()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_stage_that_waits_inside_a_pause_has_the_collector_of_before(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with collector_paused():
            with _Clock().stage("build", waits=True):
                assert gc.isenabled() == enabled
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with collector_resumed():
            assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_tracing_with_gradients_pauses_the_collector() -> None:
    seen: list[bool] = []

    def traced(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.isenabled())
        return with_gradients(*args, **kwargs)

    model = nn.Sequential(nn.LayerNorm(8), nn.GELU())
    with mock.patch.object(backend, "with_gradients", traced):
        fusepass.optimize(model, tune="off")(torch.ones(4, 8)).sum().backward()
    assert seen == [False]
    assert gc.isenabled()


def test_the_first_call_loads_without_full_collections_and_for_its_device_only(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "FUSEPASS_CACHE_DIR": str(tmp_path),
    }  # in which nothing is found that would be rendered
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["False", "True", "True", "False", "True"]


@pytest.mark.invariant(31)
def test_what_a_caller_deletes_is_gone() -> None:
    """The frame of the caller, which goes on, must not have been made to keep it."""
    model = nn.Sequential(nn.LayerNorm(8), nn.GELU()).eval()
    batch = torch.ones(4, 8)
    with override(tune="off"):
        optimised = fusepass.optimize(model)
        with torch.no_grad():
            optimised(batch)
    assert optimised.report().regions[0].ops[0].location == "0"
    left = weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(batch)
    del model, optimised, batch
    assert [each() for each in left] == [None] * 3
