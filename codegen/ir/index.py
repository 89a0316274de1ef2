"""Integer index expressions over loop axes, kept in a normal form that cancels division and remainder by constants.

An `Index` is ``constant + sum(coefficient * atom)``; an atom is an `Axis`, a `FloorDiv` or a `Mod` of another `Index`
by a positive constant. Normalisation uses the axes' ranges, so a reshape of a reshape disappears when it can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import combinations, product
from math import prod

_MOST_POINTS = 4096  # that are gone through for bounds
_WIDE = 1 << 31
# Results of each operation that are remembered, 10 MB in all: kernels, schedules and candidates ask for the same ones over and over.
_KEPT = 1 << 13


@dataclass(frozen=True)
class Axis:
    """A loop axis: runs over ``0 .. size - 1``. The name is unique within a kernel."""

    name: str
    size: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class FloorDiv:
    """``floor(index / divisor)``."""

    index: Index
    divisor: int

    def __str__(self) -> str:
        return f"({self.index} // {self.divisor})"


@dataclass(frozen=True)
class Mod:
    """``index - divisor * floor(index / divisor)``."""

    index: Index
    divisor: int

    def __str__(self) -> str:
        return f"({self.index} % {self.divisor})"


Atom = Axis | FloorDiv | Mod


@dataclass(frozen=True)
class Index:
    """``constant + sum(coefficient * atom)`` in normal form; build it with the functions and operators below."""

    constant: int = 0
    terms: tuple[tuple[Atom, int], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.constant, self.terms))

    def __reduce__(self) -> tuple[object, ...]:
        return Index, (self.constant, self.terms)  # hashes of names differ between processes

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.constant + other, self.terms) if other else self
        return _sum(self, other)

    def __sub__(self, other: Index | int) -> Index:
        return self + (-other if isinstance(other, int) else other * -1)

    def __mul__(self, factor: int) -> Index:
        return self if factor == 1 else _times(self, factor)

    @lru_cache(maxsize=_KEPT)  # noqa: B019, bounded, and an index owns nothing
    def __floordiv__(self, divisor: int) -> Index:
        whole, rest = self._split(divisor)
        low, high = rest.bounds
        if low // divisor == high // divisor:
            return whole + low // divisor
        if rest.constant == 0 and len(rest.terms) == 1 and rest.terms[0][1] == 1:
            atom = rest.terms[0][0]
            if isinstance(atom, FloorDiv):
                return whole + atom.index // (atom.divisor * divisor)
        return whole + Index(0, ((FloorDiv(rest, divisor), 1),))

    @lru_cache(maxsize=_KEPT)  # noqa: B019
    def __mod__(self, divisor: int) -> Index:
        _, rest = self._split(divisor)
        low, high = rest.bounds
        if low // divisor == high // divisor:
            return rest - (low // divisor) * divisor
        for atom, c in rest.terms:
            if isinstance(atom, Mod) and atom.divisor % divisor == 0:
                whole = rest + (atom.index - Index(0, ((atom, 1),))) * c
                if whole.narrow or not atom.index.narrow:
                    return whole % divisor
        return Index(0, ((Mod(rest, divisor), 1),))

    def _split(self, divisor: int) -> tuple[Index, Index]:
        """(q, r) with self == divisor * q + r, where r lies in ``0 .. divisor - 1`` if that can be seen."""
        if divisor <= 0:
            raise ValueError(f"divisor must be positive, got {divisor}")
        whole = [(atom, c // divisor) for atom, c in self.terms if c % divisor == 0]
        kept = [(atom, c) for atom, c in self.terms if c % divisor]
        signed = _normal(self.constant // divisor, whole), _normal(self.constant % divisor, kept)
        low, high = signed[1].bounds
        if low // divisor == high // divisor:
            return signed  # such as 3 - i for i < 4
        whole = [(atom, c // divisor) for atom, c in self.terms if c // divisor]
        rest = [(atom, c % divisor) for atom, c in self.terms if c % divisor]
        r = _normal(self.constant % divisor, rest)
        # A gap such as 6 * i + j (j < 6) under division by 4 stays.
        return (_normal(self.constant // divisor, whole), r) if _spread(r) < divisor else signed

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest value over the axes' ranges (both inclusive, not always tight)."""
        low = high = self.constant
        for atom, c in self.terms:
            a, b = _atom_bounds(atom)
            low += min(a * c, b * c)
            high += max(a * c, b * c)
        return low, high

    @cached_property
    def tight_bounds(self) -> tuple[int, int]:
        """As `bounds`, which takes terms by themselves; axes of several terms, as in -3 * i + (i + 1) // 2, are gone through."""
        axes = [frozenset({atom}) if isinstance(atom, Axis) else atom.index.axes for atom, _ in self.terms]
        shared = list(dict.fromkeys(axis for a, b in combinations(axes, 2) for axis in a & b))
        if prod(axis.size for axis in shared) > _MOST_POINTS:
            return self.bounds
        points = product(*(range(axis.size) for axis in shared))
        found = [self.substitute(dict(zip(shared, map(Index, point), strict=True))).bounds for point in points]
        return min(low for low, _ in found), max(high for _, high in found)

    @cached_property
    def narrow(self) -> bool:
        """Whether 32 bits hold the value and all that it is computed from."""
        ends = [end - constant for end in self.bounds for constant in (0, self.constant)]
        return all(-_WIDE <= end < _WIDE for end in ends) and all(
            isinstance(atom, Axis) or atom.index.narrow for atom, _ in self.terms
        )

    @cached_property
    def axes(self) -> frozenset[Axis]:
        """Every axis that the value depends on."""
        found: set[Axis] = set()
        for atom, _ in self.terms:
            found |= {atom} if isinstance(atom, Axis) else atom.index.axes
        return frozenset(found)

    def stride(self, axis: Axis) -> int | None:
        """Change of the value per step of `axis`; None where that is not one constant."""
        total = 0
        for atom, c in self.terms:
            if atom == axis:
                total += c
            elif not isinstance(atom, Axis) and axis in atom.index.axes:
                return None
        return total

    def substitute(self, replace: Mapping[Axis, Index]) -> Index:
        """The value after replacing axes by indices, normalised again."""
        moved = tuple([(axis, replace[axis]) for axis in self.axes if axis in replace])
        return _substituted(self, moved) if moved else self

    def __str__(self) -> str:
        parts = [str(atom) if c == 1 else f"{c}*{atom}" for atom, c in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)


@dataclass(frozen=True)
class Bound:
    """The condition ``low <= index < high``."""

    index: Index
    low: int
    high: int

    @property
    def always(self) -> bool:
        low, high = self.index.bounds
        return self.low <= low and high < self.high

    def __str__(self) -> str:
        return f"{self.low} <= {self.index} < {self.high}"


def axis_index(axis: Axis) -> Index:
    """The index that is the axis itself; the constant 0 for an axis of size 1."""
    return Index(0, ((axis, 1),)) if axis.size > 1 else Index()


def from_the_end(axis: Axis) -> Index:
    """The index that counts the points of `axis` from the last one on."""
    return axis_index(axis) * -1 + (axis.size - 1)


def linear(indices: Sequence[Index], strides: Sequence[int], offset: int = 0) -> Index:
    """``offset + sum(index * stride)``."""
    return reduce(lambda total, pair: total + pair[0] * pair[1], zip(indices, strides, strict=True), Index(offset))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def delinearize(flat: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """Row-major coordinates in `shape` of the flat position `flat`."""
    result, remaining = [], flat
    for size in reversed(shape[1:]):
        step = max(size, 1)  # an empty shape has no positions, but still an expression for them
        result.append(remaining % step)
        remaining = remaining // step
    if shape:
        result.append(remaining)
    return tuple(reversed(result))


def _atom_bounds(atom: Atom) -> tuple[int, int]:
    if isinstance(atom, Axis):
        return 0, max(atom.size - 1, 0)
    low, high = atom.index.bounds
    if isinstance(atom, FloorDiv):
        return low // atom.divisor, high // atom.divisor
    if low // atom.divisor == high // atom.divisor:
        return low % atom.divisor, high % atom.divisor
    return 0, atom.divisor - 1


def _spread(index: Index) -> int:
    low, high = index.bounds
    return high - low


def _substitute_atom(atom: Atom, replace: Mapping[Axis, Index]) -> Index:
    if isinstance(atom, Axis):
        return replace[atom] if atom in replace else axis_index(atom)
    inner = atom.index.substitute(replace)
    return inner // atom.divisor if isinstance(atom, FloorDiv) else inner % atom.divisor


@lru_cache(maxsize=_KEPT)
def _sum(a: Index, b: Index) -> Index:
    return _normal(a.constant + b.constant, (*a.terms, *b.terms))


@lru_cache(maxsize=_KEPT)
def _times(index: Index, factor: int) -> Index:
    if factor == 0:
        return Index()
    return Index(index.constant * factor, tuple((atom, c * factor) for atom, c in index.terms))


@lru_cache(maxsize=_KEPT)
def _substituted(index: Index, moved: tuple[tuple[Axis, Index], ...]) -> Index:
    replace, result = dict(moved), Index(index.constant)
    for atom, c in index.terms:
        result = result + _substitute_atom(atom, replace) * c
    return result


def _order(item: tuple[Atom, int]) -> tuple[int, str]:
    return (-abs(item[1]), str(item[0]))


def _normal(constant: int, terms: Iterable[tuple[Atom, int]]) -> Index:
    """Collect equal atoms and put ``n * (e // n) + e % n`` back together as ``e``."""
    total: dict[Atom, int] = {}
    for atom, c in terms:
        total[atom] = total.get(atom, 0) + c
    for atom in [a for a in total if isinstance(a, Mod)]:
        assert isinstance(atom, Mod)
        c = total.get(atom, 0)
        quotient = (atom.index // atom.divisor).terms
        if c and len(quotient) == 1 and total.get(quotient[0][0]) == c * atom.divisor * quotient[0][1]:
            del total[atom], total[quotient[0][0]]
            lost = (atom.index // atom.divisor).constant * c * atom.divisor
            return _normal(constant - lost, total.items()) + atom.index * c
    kept = [(atom, c) for atom, c in total.items() if c]
    return Index(constant, tuple(sorted(kept, key=_order)))


def by_structure(term: tuple[Atom, int]) -> str:
    """A key that orders the terms of an index alike whatever the numbers in it."""
    atom, _ = term
    if isinstance(atom, Axis):
        return atom.name
    return f"{type(atom).__name__}({', '.join(sorted(map(by_structure, atom.index.terms)))})"


def flat_index(axes: Sequence[Axis]) -> Index:
    """The number of a point of `axes`, of which the last one counts fastest."""
    return linear([axis_index(axis) for axis in axes], contiguous_strides([axis.size for axis in axes]))
