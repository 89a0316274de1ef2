"""A process that does one job after the other: they come on its standard input, one a line."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Ends with its input, and after an outcome that says `last`."""
    parser = argparse.ArgumentParser(prog="python -m tests.farm.worker", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="where <job>.json is left")
    directory = parser.parse_args().directory
    faulthandler.enable()  # a process that hangs is ended by SIGABRT
    for line in sys.stdin:
        job = json.loads(line)
        outcome, problem = _done(job, directory)
        path = directory / f"{job['name']}.json"
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps({"outcome": outcome, "problem": problem}))
        os.replace(aside, path)
        if outcome.get("last"):
            return


def _done(job: dict[str, Any], directory: Path) -> tuple[dict[str, Any], str]:
    module, _, function = job["call"].partition(":")
    try:
        call = getattr(importlib.import_module(module), function)
        return call(**job["arguments"], left=directory / f"{job['name']}.left"), ""
    except Exception:  # the jobs after it go on
        return {}, traceback.format_exc()


if __name__ == "__main__":
    main()
