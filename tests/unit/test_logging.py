"""What loggers are told, and which line a warning names."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.errors import FusepassWarning


class Net(nn.Module):
    """Two operators that fuse, and one that does not."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(F.gelu(x).softmax(1)).values


def optimised() -> nn.Module:
    return fusepass.optimize(Net(), tune="off", training="eager")


def test_loggers_hear_what_is_captured_compiled_and_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fusepass")
    model, x = optimised(), torch.rand(3, 5)
    model(x)
    captured, compiled = (record.getMessage() for record in caplog.records)
    assert captured.startswith("Net: captured for float32[3, 5] in ")
    assert compiled.startswith("Net: 2 of 3 operators in 1 fused regions of 1, compiled in ")
    assert {record.name.partition(".")[0] for record in caplog.records} == {"fusepass"}
    caplog.clear()
    model(x)
    assert not caplog.records
    caplog.set_level(logging.DEBUG, logger="fusepass")
    optimised()(x)
    said = [record.getMessage() for record in caplog.records]
    assert "Net: gelu_softmax is fused: nothing was to be chosen" in said
    assert any("aten.sort" in text and "is not fused: " in text for text in said)


def test_a_warning_names_the_line_of_the_user(caplog: pytest.LogCaptureFixture) -> None:
    """As does one that comes from a module around the optimised one, which PyTorch calls."""
    caplog.set_level(logging.INFO, logger="fusepass")
    x = torch.rand(3, 5, requires_grad=True)
    for model in (optimised(), nn.Sequential(nn.Identity(), optimised())):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            line = sys._getframe().f_lineno + 1
            model(x)
        (warning,) = (each for each in caught if each.category is FusepassWarning)
        assert (warning.filename, warning.lineno) == (__file__, line)
        assert "Net runs as the original operators: needs gradients" in caplog.text


def test_a_warning_of_a_thread_without_a_line_of_the_users_is_shown_all_the_same() -> None:
    model = optimised()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=model, args=(torch.rand(3, 5, requires_grad=True),))
        thread.start()
        thread.join()
    assert [each.category for each in caught] == [FusepassWarning]


@pytest.mark.parametrize(("setting", "debug"), [("+fusepass", True), ("fusepass", False)])
def test_torch_logs(setting: str, debug: bool) -> None:
    """PyTorch takes the name of any package."""
    program = (
        "import torch, fusepass\n"
        "fusepass.optimize(torch.nn.Sequential(torch.nn.GELU(), torch.nn.Softmax(1)), torch.rand(3, 5), tune='off')"
    )
    environment = os.environ | {"TORCH_LOGS": setting}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "Sequential: 2 of 2 operators in 1 fused regions of 1" in done.stderr
    assert ("gelu_softmax is fused" in done.stderr) is debug
