"""Systems that are refused, and versions that are warned of."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import fusepass
from fusepass import supported
from fusepass.errors import FusepassError, FusepassWarning


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    supported.check_versions.cache_clear()


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_named_at_import(system: str) -> None:
    program = f"import sys; sys.platform = {system!r}; import fusepass"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: fusepass runs on Linux, not on {system}: ")


def test_rocm_is_named_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    for _ in range(2):
        with pytest.raises(FusepassError, match="built for ROCm, which is not supported"):
            fusepass.optimize(nn.ReLU())
        with pytest.raises(FusepassError, match="built for ROCm"):
            fusepass.explain(nn.ReLU(), torch.rand(2))


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0a0+git123", "3.0.1+cu140"])
def test_a_newer_torch_is_warned_of_once(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(supported, "TESTED_PYTHON", sys.version_info[:2])
    named = "PyTorch up to 2.15, not with " + version[:3].rstrip(".")
    with pytest.warns(FusepassWarning, match=named) as told:
        fusepass.optimize(nn.ReLU())
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusepass.optimize(nn.ReLU())


def test_a_newer_python_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "TESTED_PYTHON", (3, 10))
    with pytest.warns(FusepassWarning, match=r"Python up to 3\.10, not with 3\.\d+"):
        torch.compile(nn.ReLU(), backend="fusepass")(torch.rand(2))


@pytest.mark.parametrize("version", ["2.15.1+cu132", "2.11.0"])
def test_what_was_tested_is_not_warned_of(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(supported, "TESTED_PYTHON", sys.version_info[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusepass.optimize(nn.ReLU())
