"""Numbers of a rendered text that may come at run time, and the places where a general text declares and passes them.

A writer marks each number that stands where C++ takes a variable as well: extents of loops, factors and constants in
indices, bounds of masks, literals of values, blocks of a launch. Not marked, hence the same for every size, is what the
compiler must know: lengths of arrays, template arguments, unrolled loops, threads of a block. Without its marks the text
is the source for one set of sizes; `fusepass.codegen.form` makes one for many of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_MARK = re.compile("⟦([^⟧]*)⟧|«([^»]*)»")
_ASSUMED_LENGTH = 4  # digits; where a number's length decides on a line break, all numbers are to decide alike


class Slot:
    """Places in a marked text where the general one has what comes with its numbers."""

    PARAMETERS = "parameters"  # the end of a kernel's parameter list; opens what belongs to the kernel
    ARGUMENTS = "arguments"  # the end of the arguments of a kernel's call
    ENTRY = "entry"  # the end of the entry's parameter list but for the stream; closes the last kernel
    UNPACK = "unpack"  # the first statement of the entry's body


@dataclass(frozen=True)
class Marked:
    """A marked text, taken apart.

    Attributes:
        pieces: the texts between the marks: one more than there are marks.
        numbers: for each mark the literal it marks; None for a slot.
    """

    pieces: tuple[str, ...]
    numbers: tuple[str | None, ...]

    @property
    def literals(self) -> tuple[str, ...]:
        """The numbers alone."""
        return tuple(number for number in self.numbers if number is not None)

    @classmethod
    def of(cls, text: str) -> Marked:
        """Slots stay in the pieces' order as pieces of their own, so that texts with other slots differ."""
        pieces, numbers, start = [], [], 0
        for found in _MARK.finditer(text):
            pieces.append(text[start : found.start()] + (f"«{found[2]}»" if found[2] is not None else ""))
            numbers.append(found[1])
            start = found.end()
        return cls((*pieces, text[start:]), tuple(numbers))


def free(number: int | str) -> str:
    """`number`, marked as one that may come at run time. Zero is no size and stays."""
    return f"⟦{number}⟧" if number not in (0, "0") else "0"


def slot(kind: str, *what: str) -> str:
    """The mark of a place."""
    return f"«{' '.join((kind, *what))}»"


def with_slot(texts: Sequence[str], kind: str) -> tuple[str, ...]:
    """`texts` with a place at the end of the last one, if there is any."""
    return (*texts[:-1], texts[-1] + slot(kind)) if texts else ()


def unpacked(statements: Sequence[str]) -> tuple[str, ...]:
    """The statements of an entry, its numbers unpacked before the first."""
    return (slot(Slot.UNPACK) + statements[0], *statements[1:]) if statements else ()


def plain(text: str) -> str:
    """`text` with its numbers as literals."""
    return _MARK.sub(lambda found: found[1] or "", text)


def length(text: str, *, general: bool) -> int:
    """The length of `text` without marks; the same for all numbers where `general`."""
    return len(_MARK.sub(lambda found: "0" * _ASSUMED_LENGTH if general else found[1] or "", text))
