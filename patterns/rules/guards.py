"""What rules of several kinds ask of the types in a match."""

from __future__ import annotations

from fusepass.patterns.matcher import Match


def floats(found: Match) -> str | None:
    """Integers become floats on the way, or wrap; a sum may be asked for in another type, as may what is made of x first."""
    dtype = found.x.meta["val"].dtype
    if not dtype.is_floating_point or dtype is not found.root.meta["val"].dtype:
        return f"x is {dtype}"
    inner = found.captures.get("inner")
    made = None if inner is None else inner.meta["val"]
    made = made[0] if isinstance(made, tuple) else made
    return None if made is None or made.dtype is dtype else f"{found.inner.name} is {made.dtype}"
