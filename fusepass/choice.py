"""What runs a region, generated code or its own operators, and how that was decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EAGER = "eager"
"""The candidate that is the region's own operators."""

GENERATED = "generated"
"""The candidate that is the generated program."""

LEAST_SPEEDUP = 0.98
"""Generated code whose speed, as a multiple of eager's, is not above this one gives way to the operators."""


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen for a region.

    Attributes:
        chosen: its name, `EAGER`, `GENERATED` or that of another variant.
        seconds: typical seconds of one run of each candidate, by name; empty where nothing was measured.
        speedup: speed of the best generated candidate as a multiple of eager's; 0 where nothing was measured.
        recorded: whether it was measured earlier and read from the disk.
        reason: why nothing was measured; None where it was.
    """

    chosen: str = GENERATED
    seconds: tuple[tuple[str, float], ...] = ()
    speedup: float = 0.0
    recorded: bool = False
    reason: str | None = None

    @property
    def leaves_eager(self) -> bool:
        """Whether the region runs as its own operators."""
        return self.chosen == EAGER

    def __str__(self) -> str:
        if self.reason is not None:
            return f'chosen "{self.chosen}": not measured, {self.reason}'
        how = "measured earlier" if self.recorded else "measured"
        times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in self.seconds)
        left = "left to eager: " if self.leaves_eager else ""
        return f'{left}chosen "{self.chosen}": generated code runs at {self.speedup:.2f}x eager, {how} ({times})'

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Choice:
        """The choice that `dataclasses.asdict` and JSON made `data` of.

        Raises:
            TypeError, ValueError: `data` is no choice.
        """
        seconds = tuple((str(name), float(value)) for name, value in data["seconds"])
        return cls(**data | {"seconds": seconds})
