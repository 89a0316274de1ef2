"""Where the package's modules lie: folders beside each other, which links in fusepass/ join to one package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"fusepass": ROOT / "fusepass"} | {
    f"fusepass.{name}": ROOT / name for name in ("patterns", "codegen", "templates")
}
"""The source folder of each package; `rglob` of one does not follow links into another."""


def package_sources() -> dict[str, str]:
    """Text of every module of the package by its dotted name."""
    sources = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            inner = parts[:-1] if parts[-1] == "__init__" else parts
            sources[".".join((package, *inner))] = path.read_text()
    return sources
