"""Prints expression DAGs as C statements, each value once, in the outermost scope where it can be computed.

A `Scope` is a block of code under construction. The renderer opens scopes as it opens loops and says which axes each
one defines; `Scope.value` then returns the text of an expression, after appending the statements that it needs to the
scope they belong to. So what depends only on a row's axes is printed before the loop over its columns. A value
that loads memory never leaves the condition it was met under, because its addresses may be out of range elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

from fusepass.codegen.ir.dataflow import Dataflow, Need, always_loaded
from fusepass.codegen.ir.digits import FewDigits
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import (
    Apply,
    Const,
    Expr,
    Gather,
    Load,
    Masked,
    Op,
    Place,
    Position,
    Prefix,
    ReductionResult,
    Window,
    children,
    may_divide_by_zero,
    walk,
    without_truths,
)
from fusepass.codegen.ir.index import Atom, Axis, Bound, FloorDiv, Index, by_structure
from fusepass.codegen.ir.program import Store
from fusepass.codegen.render.numbers import free, length
from fusepass.codegen.render.spelling import (
    C_TYPES,
    UNROLL,
    Constant,
    Identifiers,
    apply_text,
    bare,
    block,
    is_call,
    literal,
)
from fusepass.errors import RenderError

UNROLLED_WINDOW = 64  # windows of more points stay loops
_INLINE_LENGTH = 60
_WITH_FEW_DIGITS = (
    Op.EXP,
    Op.EXP2,
    Op.EXPM1,
    Op.LOG1P,
    Op.SIGMOID,
    Op.TANH,
)  # have a function that is good to few digits


def is_term(node: Expr) -> bool:
    """Whether `node` is a product that is rounded with the sum that it is a term of."""
    return isinstance(node, Apply) and node.op is Op.TERM


class Printer:
    """What the scopes of one kernel share: names, what each expression needs, and how often it is used."""

    def __init__(
        self,
        names: Identifiers,
        pointers: dict[str, str],
        index_type: str = "int",
        *,
        general: bool = False,
        branches: bool = True,
    ) -> None:
        """`pointers` names the buffers, `index_type` is ``int`` or ``int64_t``; `general`: no marked number decides on the text.

        `branches`: whether operators may become branches; see `fp::divide`.
        """
        self.general, self.branches = general, branches
        self.names = names
        self.pointers = pointers
        self.index_type = index_type
        self._uses: Counter[int] = Counter()
        self._expected: list[Expr] = []  # the counts are by identity
        self.dataflow = Dataflow()
        self.coordinates: dict[Atom, str] = {}  # names for quotients and remainders that are an axis' position
        # The C name of what receives the report of a place outside its buffer, or of a division by zero; none: the device traps, or divides.
        self.fault = ""
        self.unknown_zero = ""  # the C name of a zero for where a compiler's knowledge does harm (fp_index.h)
        self.window_vector: Callable[[Load, Axis], str | None] = lambda load, axis: None
        # The axis over the elements of a vector, where what they look up is one aligned access.
        self.lane_of: Callable[[Gather], Axis | None] = lambda node: None
        self.few = FewDigits()  # what functions good to few digits may compute
        self.along: frozenset[Axis] = (
            frozenset()
        )  # a row's elements; `fp::divide_by` divides many of them by one number

    def expect(self, roots: Iterable[Expr]) -> None:
        """Declare what is printed next, so that values used more than once get a name."""
        roots = list(roots)
        self._expected += roots
        self._uses = Counter(map(id, roots))
        for node in walk(*roots):
            self._uses.update(map(id, children(node)))

    def shared(self, node: Expr) -> bool:
        """Whether more than one of the expected expressions uses `node`."""
        return self._uses[id(node)] > 1


class Scope:
    """A block of C under construction; `lines` are its statements so far."""

    def __init__(
        self,
        printer: Printer,
        parent: Scope | None = None,
        *,
        at: Mapping[Axis, str | Constant] | None = None,
        conditional: bool = False,
    ) -> None:
        """A scope that knows the axes it is `at`, as `define_axis` would make it.

        A `conditional` scope runs only if something holds that the loads printed in it may rely on.
        """
        self.printer = printer
        self.parent = parent
        self.conditional = conditional
        self.lines: list[str] = []
        self._values: dict[int, str] = {}
        self._spare: dict[int, int] = {}
        self._bound: list[Expr] = []  # keeps alive what the table above knows by identity
        self._axes: dict[Axis, str | Constant] = dict(at or {})
        self._read: set[Axis] = set()
        self._atoms: dict[Atom, str] = {}
        self._places: dict[tuple[int, int], str] = {}
        self._vectors: dict[int, str] = {}

    def child(self, at: Mapping[Axis, str | Constant] | None = None, *, conditional: bool = False) -> Scope:
        """A block inside this one; its lines are added to this scope's by the caller when it is complete."""
        return Scope(self.printer, self, at=at, conditional=conditional)

    def define_axis(self, axis: Axis, text: str | Constant) -> None:
        """`axis` has the value `text` from here on; `text` must need no parentheses as an operand."""
        self._axes[axis] = text

    def constant(self, kind: str, name: str, value: Callable[[], str] | str) -> Constant:
        """A constant of this `kind`, which is defined here if anything reads it."""
        made = Constant(kind, name, value)
        self.lines.append(made.line)
        return made

    def reads(self, axis: Axis) -> bool:
        """Whether anything that was printed needs the value that `axis` has from here on."""
        return axis in self._read

    def bind(self, node: Expr, text: str, *, spare: int = 0) -> None:
        """`node` is available as `text` from here on; `spare` is by how many characters it may be longer in another kernel, for a line not
        to be broken there and whole here.
        """
        self._values[id(node)] = text
        self._spare[id(node)] = spare
        self._bound.append(node)

    def value(self, node: Expr) -> str:
        """The text of `node`, an operand; the statements it needs are appended."""
        known = self._find(node)
        if known is not None:
            return known
        if isinstance(node, Const):
            return literal(node)
        home = self._home(node)
        if home is self and self._inlines(node):
            text = self._expression(node)
            if length(text, general=self.printer.general) + self._may_grow(node) <= _INLINE_LENGTH:
                return text if isinstance(node, Apply) and is_call(node.op) else f"({text})"
            return self._name(node, text)
        return home._define(node)

    def converted(self, node: Expr, dtype: DType) -> str:
        """The text of `node` in this type, for places where it is not an operand."""
        text = bare(self.value(node))
        return text if node.dtype is dtype else f"fp::cast<{C_TYPES[dtype]}>({text})"

    def stored(self, store: Store, dtype: DType) -> str:
        """The statement that stores an element of a buffer of this type."""
        value = self.converted(store.value, dtype)
        return f"{self.printer.pointers[store.buffer]}[{self.index(store.index)}] = {value};"

    def index(self, index: Index) -> str:
        """The text of an index; divisions and remainders become named values."""
        parts = []
        terms = sorted(index.terms, key=by_structure) if self.printer.general else index.terms
        for atom, factor in terms:
            name = self._atom(atom)
            parts.append((factor < 0, name if abs(factor) == 1 else f"{free(abs(factor))} * {name}"))
        if index.constant or not parts:
            parts.append((index.constant < 0, free(abs(index.constant))))
        first = ("-" if parts[0][0] else "") + parts[0][1]
        return first + "".join(f" {'-' if negative else '+'} {text}" for negative, text in parts[1:])

    def operand(self, index: Index) -> str:
        """The text of an index, fit to be an operand."""
        text = self.index(index)
        return f"({text})" if " " in text or text.startswith("-") else text

    def condition(self, mask: Sequence[Bound], moved: str = "") -> str:
        """The text of the conjunction of `mask`, without the sides that always hold; `moved` is added to each limit."""
        return " && ".join(side + moved for bound in mask for side in self._sides(bound)) or "true"

    def _sides(self, bound: Bound) -> Iterator[str]:
        low, high = bound.index.bounds
        text = self.index(bound.index)
        if low < bound.low:
            yield f"{text} >= {free(bound.low)}"
        if high >= bound.high:
            yield f"{text} < {free(bound.high)}"

    def _find(self, node: Expr) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if id(node) in scope._values:
                return scope._values[id(node)]
            scope = scope.parent
        return None

    def _may_grow(self, node: Expr) -> int:
        """By how much the text of an expression may be longer in another kernel."""
        scope: Scope | None = self
        while scope is not None:
            if id(node) in scope._values:
                return scope._spare.get(id(node), 0)
            scope = scope.parent
        return sum(map(self._may_grow, children(node))) if isinstance(node, Apply) else 0

    def _provides(self, need: Need) -> bool:
        if isinstance(need, ReductionResult | Prefix):
            return self._find(need) is not None
        return need in self._axes or (self.parent is not None and self.parent._provides(need))

    def _home(self, node: Expr, *, checked: bool = False, but: Axis | None = None) -> Scope:
        """The outermost scope that can compute `node`, wherever it is along the axis `but`; where it is `checked`, under the conditions
        that it is printed in."""
        needs, safe = self.printer.dataflow.needs(node) - {but}, not checked and self.printer.dataflow.safe(node)
        scope = self
        while (
            scope.parent is not None
            and (safe or not scope.conditional)
            and all(scope.parent._provides(need) for need in needs)
        ):
            scope = scope.parent
        return scope

    def _atom(self, atom: Atom) -> str:
        scope: Scope | None = self
        while scope is not None:
            if isinstance(atom, Axis) and atom in scope._axes:
                scope._read.add(atom)
                return str(scope._axes[atom])
            if atom in scope._atoms:
                return scope._atoms[atom]
            scope = scope.parent
        if isinstance(atom, Axis):
            raise RenderError(f"axis {atom} is printed outside the loop over it")
        home = self
        while home.parent is not None and all(home.parent._provides(axis) for axis in atom.index.axes):
            home = home.parent
        divide = isinstance(atom, FloorDiv)
        known = self.printer.coordinates.get(atom)
        names = self.printer.names
        name = names.exact(known) if known else names.numbered("quotient" if divide else "remainder")
        inner = home.index(atom.index)
        if atom.index.bounds[0] >= 0:
            call = f"fp::{'div' if divide else 'mod'}({inner}, {free(atom.divisor)})"
        else:
            call = f"fp::{'floor_div' if divide else 'remainder'}({inner}, {self.printer.index_type}({free(atom.divisor)}))"
        home.lines.append(f"const {self.printer.index_type} {name} = {call};")
        home._atoms[atom] = name
        return name

    def _inlines(self, node: Expr) -> bool:
        if self.printer.shared(node):
            return False
        return isinstance(node, Apply) and (node.dtype in (DType.F32, DType.F64, DType.BOOL) or node.op is Op.CAST)

    def _define(self, node: Expr) -> str:
        match node:
            case Masked():
                return self._masked(node)
            case Window():
                return self._window(node)
            case Gather() if (lane := self.printer.lane_of(node)) and (home := self._home(node, but=lane)) is not self:
                return self._lane(node, lane, home)
            case ReductionResult(reduction, part, _):
                raise RenderError(f"{reduction}.{part} is printed before its reduction")
            case Prefix(reduction, part, index, _):
                raise RenderError(f"{reduction}.{part}[{index}] is printed before its reduction")
            case _:
                return self._name(node, self._expression(node))

    def _name(self, node: Expr, text: str) -> str:
        name = self.printer.names.numbered(self._hint(node))
        self.lines.append(f"const {C_TYPES[node.dtype]} {name} = {bare(text)};")
        self._values[id(node)] = name
        return name

    def _hint(self, node: Expr) -> str:
        match node:
            case Load(buffer=buffer) | Gather(buffer=buffer):
                return self.printer.pointers[buffer]
            case Apply(op, _, _):
                return op.value
            case _:
                return type(node).__name__.lower()

    def _expression(self, node: Expr) -> str:
        match node:
            case Load(buffer, index, _):
                return f"{self.printer.pointers[buffer]}[{self.index(index)}]"
            case Gather(buffer, index, places, _):
                return f"{self.printer.pointers[buffer]}[{self._gathered(index, places)}]"
            case Position(index, dtype):
                return f"{C_TYPES[dtype]}({self.index(index)}{self._moved})"
            case Apply(op, args, dtype):
                if op is Op.ADD and (term := next(filter(is_term, reversed(args)), None)) is not None:
                    (other,) = [arg for arg in args if arg is not term] or [term]
                    texts = [self.value(each) for each in (*children(term), other)]
                    return f"fp::fma({', '.join(map(bare, texts))})"
                texts = [self.value(arg) for arg in args]
                if op is Op.DIV and dtype is DType.F32 and (function := self._division(node)):
                    return f"{function}({', '.join(map(bare, texts))})"
                if op in _WITH_FEW_DIGITS and id(node) in self.printer.few.nodes:
                    return f"fp::{op.value}_few({bare(texts[0])})"
                if self.printer.fault and may_divide_by_zero(node):
                    texts[1] = f"fp::divisor({bare(texts[1])}, {self.printer.fault})"
                return apply_text(op, texts, dtype)
            case _:
                raise RenderError(f"{type(node).__name__} is not a plain expression")

    def _division(self, node: Apply) -> str:
        """The function that divides; none for the operator."""
        if isinstance(node.args[1], Const):
            return "" if self.printer.branches else "fp::divide_by"
        dividend, divisor = (self.printer.dataflow.needs(arg) & self.printer.along for arg in node.args)
        if dividend and not divisor:
            few = "_few" if id(node) in self.printer.few.nodes else ""
            return f"fp::divide_by{few}"  # all elements of a row by the same number, which is not known before
        return "" if self.printer.branches else "fp::divide"

    @property
    def _moved(self) -> str:
        return f" + {self.printer.unknown_zero}" if self.printer.unknown_zero else ""

    def _lane(self, node: Gather, lane: Axis, home: Scope) -> str:
        """An element of the vector of `node` along `lane`, which `home` loads."""
        vector = home._vectors.get(id(node))
        if vector is None:
            vector = home._vectors[id(node)] = self.printer.names.numbered(self._hint(node))
            first = home._gathered(node.index.substitute({lane: Index()}), node.places)
            kind = f"fp::Vec<{C_TYPES[node.dtype]}, {lane.size}>"
            load = f"fp::load_vector<{lane.size}>({self.printer.pointers[node.buffer]} + {first})"
            home.lines.append(f"const {kind} {vector} = {load};")
        self._values[id(node)] = f"{vector}[{self._atom(lane)}]"
        return self._values[id(node)]

    def _gathered(self, index: Index, places: Sequence[Place]) -> str:
        """The text of an index that is moved to computed places."""
        moved = "".join(f" + {self._place(place)}" for place in places)
        return self.index(index) + moved

    def _place(self, place: Place) -> str:
        """How many elements further along a gather reads. One that comes from data is checked once where it is known.

        Places that a condition keeps from being read may be anything.
        """
        text = self._checked(place) if place.checked else self.value(place.value)
        if not place.checked and place.value.dtype is not DType.I64 and self.printer.index_type != "int":
            text = f"{self.printer.index_type}({bare(text)})"
        return text if place.stride == 1 else f"{free(place.stride)} * {text}"

    def _checked(self, place: Place) -> str:
        key = (id(place.value), place.size)
        scope: Scope | None = self
        while scope is not None:
            if key in scope._places:
                return scope._places[key]
            scope = scope.parent
        home = self._home(place.value, checked=True)
        fault = f", {self.printer.fault}" if self.printer.fault else ""
        zero = self.printer.unknown_zero
        unknown = f" ^ {zero}" if zero and not without_truths(place.value) else ""
        name = self.printer.names.numbered("place")
        value, size = bare(home.value(place.value)), free(place.size)
        home.lines.append(f"const int64_t {name} = fp::place({value}, {size}{fault}){unknown};")
        home._places[key] = name
        return name

    def _masked(self, node: Masked) -> str:
        other = self.value(node.other)
        condition = self.condition(node.mask, "" if isinstance(node.other, Const) else self._moved)
        inner = self.child(conditional=True)
        value = inner.value(node.value)
        name = self.printer.names.numbered("masked")
        if inner.lines:
            self.lines.append(f"{C_TYPES[node.dtype]} {name} = {bare(other)};")
            self.lines += block(f"if ({condition})", [*inner.lines, f"{name} = {bare(value)};"])
        else:
            self.lines.append(f"const {C_TYPES[node.dtype]} {name} = {condition} ? {value} : {other};")
        self._values[id(node)] = name
        return name

    def pushed(self, value: Expr) -> str:
        """The call that gives a reduction's state `value`; a term of a sum in one rounding."""
        if is_term(value):
            return f"push_product({', '.join(bare(self.value(factor)) for factor in children(value))})"
        return f"push({bare(self.value(value))})"

    def pushing(self, value: Expr, state: str) -> list[str]:
        """The statements that do so, for what begins in this scope; a term that a condition keeps out of a sum is not there."""
        if not (isinstance(value, Masked) and is_term(value.value) and isinstance(value.other, Const)):
            return [f"{state}.{self.pushed(value)};"]
        condition, inner = self.condition(value.mask), self.child(conditional=True)
        call = inner.pushed(value.value)
        return block(f"if ({condition})", [*inner.lines, f"{state}.{call};"])

    def _window(self, node: Window) -> str:
        state = self.printer.names.numbered(node.op.value.lower())
        nest = Nest(self, node.axes)
        vectors = self._load_window_vectors(node, nest)
        nest.inner.lines += nest.inner.pushing(node.value, state)
        self.lines.append(f"fp::{node.op.value}<{C_TYPES[node.dtype]}> {state};")
        nest.close(unrolled=vectors)  # what is in registers has no address
        self._values[id(node)] = f"{state}.part<0>()"
        return self._values[id(node)]

    def _load_window_vectors(self, node: Window, nest: Nest) -> bool:
        """Load all points along the window's last axis at once, where the target can; whether it can."""
        axis, found, outside = node.axes[-1], False, nest.scopes[-2]
        for load in always_loaded(node.value):
            call = self.printer.window_vector(load, axis)
            if call is None:
                continue
            name = self.printer.names.numbered(f"{self.printer.pointers[load.buffer]}_in")
            start = outside.operand(load.index.substitute({axis: Index()}))
            outside.lines.append(f"const auto {name} = {call}({self.printer.pointers[load.buffer]} + {start});")
            nest.inner.bind(load, f"{name}[{nest.variables[-1]}]")
            found = True
        return found


class Nest:
    """Loops over `axes` in a scope, one in another; `inner` is the body of the innermost one."""

    def __init__(self, outer: Scope, axes: Sequence[Axis]) -> None:
        self.axes, self.variables = axes, [outer.printer.names.numbered(axis.name) for axis in axes]
        self.scopes = [outer]
        for axis, variable in zip(axes, self.variables, strict=True):
            self.scopes.append(self.scopes[-1].child({axis: variable}))
        self.inner = self.scopes[-1]

    def close(self, *, unrolled: bool = False) -> None:
        """Give each scope the loop around the next one's lines; loops over few points are written out, the innermost also if `unrolled`."""
        few, kind = prod(axis.size for axis in self.axes) <= UNROLLED_WINDOW, self.inner.printer.index_type
        for number, (axis, variable) in reversed([*enumerate(zip(self.axes, self.variables, strict=True))]):
            outer, scope = self.scopes[number : number + 2]
            head = f"for ({kind} {variable} = 0; {variable} < {axis.size}; ++{variable})"
            outer.lines += [UNROLL] if few or (unrolled and scope is self.inner) else []
            outer.lines += block(head, scope.lines)
