"""What a fusion pattern is, and the registry of those in force.

A pattern speaks of op classes, never of one combination of operators::

    register(
        Pattern(
            name="softmax-tail",
            seed=frozenset({OpClass.NORMALISATION}),
            upstream=frozenset(),
            downstream=frozenset({OpClass.POINTWISE, OpClass.VIEW}),
            min_ops=2,
            why="the normalised tensor is written once, after the operators behind it",
        )
    )
"""

from __future__ import annotations

from dataclasses import dataclass

from fusepass.config import current
from fusepass.patterns.opclass import OpClass


@dataclass(frozen=True)
class Pattern:
    """How regions of one kind grow.

    Attributes:
        name: unique; ``FUSEPASS_DISABLE=name`` switches the pattern off.
        seed: the classes of the operator that a region starts from.
        upstream: the classes it may absorb among the operators that it reads from.
        downstream: the classes it may absorb among the operators that read from it. With VIEW among the classes of a
            direction, operators behind views are reached too.
        min_ops: fewest operators of a region, views not counted.
        why: what fusing these gains, in words.
    """

    name: str
    seed: frozenset[OpClass]
    upstream: frozenset[OpClass]
    downstream: frozenset[OpClass]
    min_ops: int
    why: str

    def __post_init__(self) -> None:
        if not self.name or not self.seed or self.min_ops < 1:
            raise ValueError(f"pattern {self.name!r} needs a name, a seed and min_ops of at least 1")


def register(pattern: Pattern) -> None:
    """Add `pattern` to those that `fusepass.patterns.partition.partition` uses.

    Raises:
        ValueError: there is another pattern of that name.
    """
    if _patterns.setdefault(pattern.name, pattern) != pattern:
        raise ValueError(f"there is a pattern called {pattern.name!r} already")


def unregister(name: str) -> None:
    """Remove the pattern called `name`.

    Raises:
        KeyError: there is none.
    """
    del _patterns[name]


def patterns() -> tuple[Pattern, ...]:
    """The registered patterns that the options in force do not disable, oldest first."""
    config = current()
    return tuple(pattern for pattern in _patterns.values() if config.allows(pattern.name))


def names() -> tuple[str, ...]:
    """The names of all registered patterns, disabled or not."""
    return tuple(_patterns)


_patterns: dict[str, Pattern] = {}
