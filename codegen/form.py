"""One source for many sizes: texts that differ in nothing but numbers, the numbers as arguments of the entry.

Each signature's program is rendered for its own sizes, with marks (`fusepass.codegen.render.numbers`) around the numbers
that C++ could as well take from a variable. Where two such texts are equal but for marked numbers, one library serves
both: numbers that differ become parameters, and those that differ alike share one. That is the anti-unification of
Plotkin and Reynolds (Machine Intelligence 5, 1970) on texts. It is right for every size, because each call passes the
numbers that its own exact text has; nothing is concluded about sizes that were not rendered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.render.numbers import Marked, Slot
from fusepass.codegen.source import Source, Target

_LITERAL = -1
_NAME = "size"
Value = int | float


@dataclass(frozen=True)
class Form:
    """Marked texts with the same pieces, and which of their numbers are parameters.

    Attributes:
        pieces: what all of them share.
        literals: the numbers of one of them.
        groups: for each number the parameter that it is; `_LITERAL` where it is the same in all of them.
    """

    pieces: tuple[str, ...]
    literals: tuple[str | None, ...]
    groups: tuple[int, ...]

    @classmethod
    def first(cls, marked: Marked, same: frozenset[str]) -> Form:
        """The form of one text; numbers that are not the `same` for the sizes seen so far are parameters."""
        keys = [None if text is None or text in same else text for text in marked.numbers]
        return cls(marked.pieces, marked.numbers, _grouped(keys))

    def values(self, marked: Marked) -> tuple[Value, ...] | None:
        """The arguments with which this form is the text `marked`; None where it cannot become that."""
        if marked.pieces != self.pieces:
            return None
        found: dict[int, str] = {}
        for group, literal, number in zip(self.groups, self.literals, marked.numbers, strict=True):
            if group == _LITERAL:
                if literal != number:
                    return None
            elif number is None or found.setdefault(group, number) != number:
                return None
        return tuple(_value(found[group]) for group in sorted(found))

    def widened(self, marked: Marked) -> Form:
        """The least general form that is more general than this one and can become `marked`, which has its pieces."""
        keys: list[object] = []
        for group, literal, number in zip(self.groups, self.literals, marked.numbers, strict=True):
            differs = group != _LITERAL or literal != number
            keys.append((group, literal if group == _LITERAL else "", number) if differs else None)
        return Form(self.pieces, marked.numbers, _grouped(keys))

    @property
    def names(self) -> tuple[str, ...]:
        """What the parameters are called."""
        text = "".join(self.pieces)
        prefix = _NAME
        while re.search(rf"\b{prefix}_\d", text):
            prefix += "_"
        return tuple(f"{prefix}_{number}" for number in range(max(self.groups, default=_LITERAL) + 1))

    def source(self, like: Source, values: Sequence[Value]) -> Source:
        """The library of this form, to be called with `values`; `like` says the rest."""
        return replace(like, text=_Writer(self, like.target).text(), numbers=tuple(values))


def _grouped(keys: Sequence[object]) -> tuple[int, ...]:
    """Equal keys get equal numbers, in the order in which they come; None is no parameter."""
    numbers: dict[object, int] = {}
    return tuple(_LITERAL if key is None else numbers.setdefault(key, len(numbers)) for key in keys)


def _is_real(literal: str) -> bool:
    return not literal.lstrip("-").rstrip("L").isdigit()


def _value(literal: str) -> Value:
    return float(literal.rstrip("f")) if _is_real(literal) else int(literal.rstrip("L"))


class _Writer:
    """Writes a form as source: parameters declared, passed on and unpacked where the slots are."""

    def __init__(self, form: Form, target: Target) -> None:
        self.form, self.target = form, target
        self.names = form.names
        self.literals = dict(zip(form.groups, form.literals, strict=True))
        self.used = self._used()

    def text(self) -> str:
        written = []
        for piece, literal, group in zip(
            self.form.pieces, (*self.form.literals, None), (*self.form.groups, _LITERAL), strict=True
        ):
            head, mark, kind = piece.partition("«")
            written += [head, self._slot(*kind.rstrip("»").split(" "))] if mark else [piece]
            written.append((literal or "") if group == _LITERAL else self.names[group])
        return "".join(written)

    def _used(self) -> dict[str, list[int]]:
        """By kernel the parameters that its text has, in order."""
        used: dict[str, list[int]] = {}
        current: list[int] = []
        for piece, group in zip(self.form.pieces, (*self.form.groups, _LITERAL), strict=True):
            kind, *what = piece.partition("«")[2].rstrip("»").split(" ")
            if kind == Slot.PARAMETERS:
                current = used.setdefault(what[0], [])
            elif kind == Slot.ENTRY:
                current = []
            if group != _LITERAL and group not in current:
                current.append(group)
        return used

    def _slot(self, kind: str, *what: str) -> str:
        if kind == Slot.PARAMETERS:
            kernel, index_type = what
            return "".join(f",\n    const {self._type(n, index_type)} {self.names[n]}" for n in self.used[kernel])
        if kind == Slot.ARGUMENTS:
            return "".join(f", {self.names[number]}" for number in self.used[what[0]])
        if kind == Slot.ENTRY:
            return ",\n    const void* numbers"
        return "".join(f"{line}\n    " for line in self._unpacked())

    def _unpacked(self) -> Iterator[str]:
        for number, name in enumerate(self.names):
            kind = "double" if self._type(number, "") in ("float", "double") else "int64_t"
            yield f"const {kind} {name} = static_cast<const {kind}*>(numbers)[{number}];"

    def _type(self, group: int, index_type: str) -> str:
        literal = self.literals[group] or ""
        if not _is_real(literal):
            return index_type
        return "float" if literal.endswith("f") else "double"
