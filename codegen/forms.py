"""The libraries of one model's regions, and which of them serve sizes that come later.

The first sizes of a region get a library of their own, whose numbers the compiler knows. From the second sizes on the
general text is rendered, too (`fusepass.codegen.form`): a library that can become that text serves, else a more general
one is built. How many are built for a region is limited.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fusepass.codegen.form import Form
from fusepass.codegen.generate import Generated
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Program
from fusepass.codegen.render import render_general
from fusepass.codegen.render.numbers import Marked
from fusepass.codegen.schedule_general import Generality
from fusepass.codegen.source import Source, Target
from fusepass.config import current
from fusepass.errors import BuildError, not_saved

_COARSE_FROM = 6
"""Libraries of a region from which on further ones are laid out for more sizes than would be best for each of them."""


class TooManyBuilds(Exception):
    """A region would need more libraries for its sizes than are built; the text says so."""


@dataclass(frozen=True)
class _Special:
    """A program that has a library of its own; None of what was saved."""

    generated: Generated | None
    round: int
    shapes: tuple[tuple[int, ...], ...]


@dataclass
class _Family:
    """What was made for one region.

    Attributes:
        special: the programs that have a library of their own, by its text.
        forms: the libraries that serve several sizes, by what their texts share; the most general one of each.
        sources: of these, by the same, called with the sizes that were asked for last; only where `Forms.sources` may be asked for.
        same: numbers that every text so far has: model dimensions, most likely.
        built: libraries so far.
        sealed: whether there are no more than these.
    """

    special: dict[str, _Special] = field(default_factory=dict)
    forms: dict[tuple[str, ...], Form] = field(default_factory=dict)
    sources: dict[tuple[str, ...], Source] = field(default_factory=dict)
    same: frozenset[str] | None = None
    built: int = 0
    sealed: bool = False

    def count_build(self, name: str) -> None:
        """One library more, if another may be built."""
        if self.sealed:
            raise TooManyBuilds(not_saved(name))
        most = current().max_builds
        if self.built >= most:
            raise TooManyBuilds(f"{name} would need more than {most} libraries for its sizes (option max_builds)")
        self.built += 1


class OfOneSize(Exception):
    """A program that serves its own sizes alone, where the same without reductions over rows by what goes along them could serve others."""


class Forms:
    """Shares builds among the signatures of one model. Threads may use it.

    Args:
        several: whether none but libraries for several sizes are of use, as those that come are not known.

    Attributes:
        choices: what was measured for libraries that serve several sizes, kept for those who measure.
        candidates: names of what was chosen for regions at the sizes so far, kept for those who choose.
        layouts: by operators and bytes of whole graphs, the form in which they are compiled, with the seconds of each.
        left_out: by their regions and bytes, which regions of whole graphs run as their own operators, and why.
    """

    def __init__(self, *, several: bool = False) -> None:
        self._families: dict[str, _Family] = {}
        self._several = several
        self._sealed = False
        self._round = 0
        self.choices: dict[tuple[str, int], Any] = {}
        self.chosen: dict[tuple[object, ...], str] = {}
        self.layouts: dict[tuple[object, ...], tuple[str, Mapping[str, float]]] = {}
        self.left_out: dict[tuple[object, ...], tuple[frozenset[str], str]] = {}
        self._lock = threading.RLock()
        self._later: list[Callable[[], object]] = []

    @property
    def knows_sizes(self) -> bool:
        """Whether something was made of other sizes, or is to be."""
        return self._several or self._round > 0 or bool(self._later)

    def data(self) -> list[Any]:
        """What `saved` makes the same libraries of, as JSON holds it."""
        return [
            [
                key,
                [[text, each.shapes] for text, each in family.special.items()],
                [[form.pieces, form.literals, form.groups] for form in family.forms.values()],
            ]
            for key, family in self._families.items()
        ]

    @classmethod
    def saved(cls, data: Sequence[Any]) -> Forms:
        """The libraries of which `data` tells; no others are built."""
        made = cls(several=True)
        made._sealed = True
        for key, special, forms in data:
            family = made._families[key] = _Family(sealed=True, built=_COARSE_FROM)
            for text, shapes in special:
                family.special[text] = _Special(None, 0, tuple(map(tuple, shapes)))
            for pieces, literals, groups in forms:
                family.forms[tuple(pieces)] = Form(tuple(pieces), tuple(literals), tuple(groups))
        return made

    @property
    def sources(self) -> list[Source]:
        """Those of all libraries, where `several` are wanted: of a library for several sizes, called with some of them."""
        families = list(self._families.values())
        special = [each.generated for one in families for each in one.special.values() if each.generated]
        own = [source for each in special for source in (each.source, each.unaligned())]
        return own + [source for one in families for source in one.sources.values()]

    @property
    def several(self) -> bool:
        """Whether none but libraries for several sizes are of use."""
        return self._several

    @property
    def sealed(self) -> bool:
        """Whether no libraries are built."""
        return self._sealed

    def next_round(self) -> None:
        """Another signature comes; what is generated in between belongs together."""
        with self._lock:
            self._round += 1

    def tell_later(self, tell: Callable[[], object]) -> None:
        """Let `catch_up` call `tell`, which tells of the libraries for sizes that an earlier process has met."""
        self._later.append(tell)

    def catch_up(self) -> None:
        """Learn of all sizes that were met, as others come."""
        later, self._later = self._later, []
        for tell in later:
            tell()

    def shared(self, generated: Generated) -> Generated:
        """`generated`, or the same with a library for several sizes.

        Raises:
            TooManyBuilds: neither is there yet, and no more are built.
            OfOneSize: it had better be arranged otherwise, as there are other sizes.
        """
        name, shapes = generated.outline.name, _shapes(generated.outline)
        with self._lock:
            family = self._family(generated, aligned=True)
            earlier = [each for each in family.special.values() if each.round < self._round]
            varies = bool(family.forms) or any(each.shapes != shapes for each in earlier)
            reason = obstacle(generated.program) if varies or self._several else None
            alike = any(each.shapes == shapes for each in family.special.values())
            if alike and generated.source.text in family.special:
                return generated
            if varies and reason is None:
                return self._general(family, generated)
            if reason and any(kernel.reduces_over_rows for kernel in generated.program.kernels):
                raise OfOneSize(name)
            if reason and self._several:
                raise TooManyBuilds(f"{name} would need a library for each size: {reason}")
            family.count_build(name)
            family.special[generated.source.text] = _Special(generated, self._round, shapes)
            # Else as it is: it knows its source, which takes long to render.
            return replace(generated, sizes=f"for these sizes alone: {reason}") if reason else generated

    def unaligned(self, generated: Generated) -> Source:
        """The source of a `generated` that serves several sizes, for inputs that are aligned to nothing.

        Raises:
            BuildError: it would be one library too many.
        """
        if generated.facts.target is Target.CPU:
            return generated.source  # C++ assumes no alignment
        with self._lock:
            family = self._family(generated, aligned=False)
            try:
                return self._source(family, generated, aligned=False)[0]
            except TooManyBuilds as error:
                raise BuildError(str(error)) from error

    def _family(self, generated: Generated, *, aligned: bool) -> _Family:
        program, facts = generated.outline, generated.facts
        kinds = ((b.role, b.dtype, len(b.shape)) for b in program.arguments)
        calls = tuple(call.target for call in program.calls)
        key = repr((facts, program.name, program.inputs, *kinds, calls, aligned))
        return self._families.setdefault(key, _Family(sealed=self._sealed))

    def _general(self, family: _Family, generated: Generated) -> Generated:
        source, generality = self._source(family, generated, aligned=True)
        sizes = f"for several sizes: {_described(source)}"
        return replace(generated, general=source, generality=generality, general_unaligned=self.unaligned, sizes=sizes)

    def _source(self, family: _Family, generated: Generated, *, aligned: bool) -> tuple[Source, Generality]:
        """A library for several sizes, called with those of `generated`."""
        levels = (Generality.FINE, Generality.COARSE) if family.built >= _COARSE_FROM else (Generality.FINE,)
        for level in levels:
            rendered = render_general(generated.program, generated.facts, level, aligned=aligned)
            marked = Marked.of(rendered.text)
            form = family.forms.get(marked.pieces)
            values = None if form is None else form.values(marked)
            if form is not None and values is not None:
                break
        else:
            family.count_build(generated.program.name)
            form = form.widened(marked) if form else self._first(family, generated, marked, aligned=aligned)
            family.forms[marked.pieces] = form
            values = form.values(marked)
            assert values is not None  # it was made to become this text
        literals = frozenset(marked.literals)
        family.same = literals if family.same is None else family.same & literals
        source = form.source(rendered, values)
        if self._several:
            family.sources[marked.pieces] = source
        return source, level

    def _first(self, family: _Family, generated: Generated, marked: Marked, *, aligned: bool) -> Form:
        """The form of a text unlike those of other sizes: what they have in common is taken for fixed."""
        same = family.same
        for special in self._special_texts(family, generated, aligned=aligned):
            if special.pieces == marked.pieces:
                return Form.first(special, frozenset(special.literals)).widened(marked)
            same = frozenset(special.literals) & (same if same is not None else frozenset(special.literals))
        return Form.first(marked, same if same is not None else frozenset())

    def _special_texts(self, family: _Family, generated: Generated, *, aligned: bool) -> Iterator[Marked]:
        """The general texts of programs with libraries of their own and other shapes."""
        shapes = _shapes(generated.outline)
        for each in family.special.values():
            if each.generated and each.shapes != shapes and obstacle(each.generated.program) is None:
                yield Marked.of(render_general(each.generated.program, generated.facts, aligned=aligned).text)


def obstacle(program: Program) -> str | None:
    """Why a library of `program` serves its own sizes alone; None where it could serve others."""
    for kernel in program.kernels:
        if kernel.anchor is not None:
            what = "matrix product" if isinstance(kernel.anchor, Product) else "convolution"
            return f"a generated {what} is laid out for its sizes"
        if kernel.team is not None:
            return "blocks that share rows are laid out for their sizes"
        if kernel.reduces_over_rows:
            return "what blocks reduce over rows is laid out for their number"
    return None


def _shapes(program: Program) -> tuple[tuple[int, ...], ...]:
    return tuple(program.buffer(name).shape for name in (*program.inputs, *program.outputs))


def _described(source: Source) -> str:
    return ", ".join(f"size_{place} = {number:g}" for place, number in enumerate(source.numbers or ()))
