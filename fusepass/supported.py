"""What fusepass runs on: refuses systems that it cannot serve, and warns of newer versions than it was tested with."""

from __future__ import annotations

import functools
import sys
import warnings

from fusepass.errors import FusepassError, FusepassWarning

TESTED_TORCH = (2, 15)
"""The newest PyTorch that the tests have run on."""

TESTED_PYTHON = (3, 14)
"""The newest Python that the tests have run on."""


def require_linux() -> None:
    """Called as fusepass is imported.

    Raises:
        ImportError: this is another system.
    """
    if sys.platform != "linux":
        raise ImportError(
            f"fusepass runs on Linux, not on {sys.platform}: on Windows use WSL 2, on macOS a Linux container; "
            "where it cannot be imported, leave the model as it is"
        )


@functools.cache
def check_versions() -> None:
    """Called as a model is optimised. Warns once, where PyTorch or Python is newer than what was tested.

    Raises:
        FusepassError: this PyTorch is built for AMD's GPUs.
    """
    import torch  # not before it is needed: what imports fusepass alone does not pay for it

    if torch.version.hip is not None:
        raise FusepassError(
            f"fusepass generates CUDA and C++, and PyTorch {torch.__version__} is built for ROCm, which is not supported: "
            "leave the model as it is, or install a PyTorch for CUDA or CPUs"
        )
    major, minor, *_ = torch.__version__.split(".")
    for name, version, tested in (
        ("PyTorch", (int(major), int(minor)), TESTED_TORCH),
        ("Python", sys.version_info[:2], TESTED_PYTHON),
    ):
        if version > tested:
            text = f"fusepass was tested with {name} up to {tested[0]}.{tested[1]}, not with {version[0]}.{version[1]}"
            warnings.warn(f"{text}; what it cannot capture there runs as it is", FusepassWarning, stacklevel=4)
