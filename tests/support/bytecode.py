"""Keeps what Python compiles, in a folder of its own where the environment wants none beside sources: tests start it dozens of times,
and to compile what is imported of torch takes seconds each time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.dont_write_bytecode:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[2] / "build" / "test-bytecode")
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["PYTHONPYCACHEPREFIX"]
