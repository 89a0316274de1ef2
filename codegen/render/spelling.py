"""How types, literals and operators of the kernel IR are spelled in C++ and CUDA."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Const, Op
from fusepass.codegen.render.numbers import free
from fusepass.errors import RenderError

C_TYPES = {
    DType.BOOL: "bool",
    DType.U8: "uint8_t",
    DType.I8: "int8_t",
    DType.I16: "int16_t",
    DType.I32: "int",
    DType.I64: "int64_t",
    DType.F16: "fp::half",
    DType.BF16: "fp::bfloat16",
    DType.F32: "float",
    DType.F64: "double",
}

INFIX = {
    Op.ADD: "+",
    Op.SUB: "-",
    Op.MUL: "*",
    Op.TERM: "*",
    Op.RESCALE: "*",
    Op.DIV: "/",
    Op.EQ: "==",
    Op.NE: "!=",
    Op.LT: "<",
    Op.LE: "<=",
    Op.GT: ">",
    Op.GE: ">=",
    Op.AND: "&&",
    Op.OR: "||",
    Op.BIT_AND: "&",
    Op.BIT_OR: "|",
    Op.BIT_XOR: "^",
}

_RESERVED_WORDS = """
    alignas alignof and asm auto bool break case catch char class const constexpr continue default delete do
    double else enum explicit export extern false float for friend fp goto half if inline int int8_t int16_t int32_t
    int64_t long main mutable namespace new not numbers operator or private protected public register return short
    signed sizeof static stream Stream struct switch template this threadIdx blockIdx blockDim gridDim throw true try typedef
    typeid typename uint8_t union unsigned using virtual void volatile while xor
    abs acos asin atan ceil cos cosh erf exp exp2 floor fma fmax fmin fmod log max min pow round sin sinh sqrt
    tan tanh trunc y0 y1 yn j0 j1 jn gamma signbit isnan isinf
"""
_RESERVED = frozenset(_RESERVED_WORDS.split())


class Identifiers:
    """Hands out C identifiers, each only once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._first: dict[str, int] = {}  # for each hint: all smaller numbers are taken

    def exact(self, name: str) -> str:
        """`name` made an identifier, changed only as far as needed to be legal and new."""
        wanted = re.sub(r"\W", "_", name, flags=re.ASCII) or "_"
        if wanted[0].isdigit():
            wanted = f"_{wanted}"
        return self._take(wanted) if self._free(wanted) else self.numbered(wanted)

    def numbered(self, hint: str) -> str:
        """`hint` with the first number that makes it new."""
        number = self._first.get(hint, 0)
        while not self._free(f"{hint}_{number}"):
            number += 1
        self._first[hint] = number + 1
        return self._take(f"{hint}_{number}")

    def copy(self) -> Identifiers:
        """A scope below this one: what it hands out stays free here."""
        other = Identifiers()
        other._taken, other._first = set(self._taken), dict(self._first)
        return other

    @cached_property
    def locals(self) -> Locals:
        """Of the kernel whose names these are."""
        return Locals(self)

    def _free(self, name: str) -> bool:
        return name not in self._taken and name not in _RESERVED

    def _take(self, name: str) -> str:
        self._taken.add(name)
        return name


class Locals:
    """The C names of a kernel's own variables: ``locals.sums`` is ``sums``, or ``sums_0`` where a buffer has that name."""

    def __init__(self, names: Identifiers) -> None:
        self._names = names
        self._given: dict[str, str] = {}

    def __getattr__(self, word: str) -> str:
        if word.startswith("_"):
            raise AttributeError(word)
        return self.named(word.rstrip("_"))  # ``from_`` is ``from``

    def named(self, word: str) -> str:
        """The name of the variable that the kernel's writer calls `word`."""
        if word not in self._given:
            self._given[word] = self._names.exact(word)
        return self._given[word]


def as_float(text: str, dtype: DType) -> str:
    """`text`, of that type, as a float32."""
    return text if dtype is DType.F32 else f"fp::cast<float>({text})"


def literal(const: Const) -> str:
    """`const` in C, marked; reading it back gives the same bits (a NaN's payload aside)."""
    value, dtype = const.value, const.dtype
    if dtype is DType.BOOL:
        return "true" if value else "false"
    if dtype.is_int:
        return _int_literal(int(value), dtype)
    if dtype.compute is not dtype:
        return f"fp::cast<{C_TYPES[dtype]}>({_float_literal(float(value), DType.F32)})"
    return _float_literal(float(value), dtype)


def _int_literal(value: int, dtype: DType) -> str:
    if dtype is DType.I64:
        number = free(f"{value}LL") if 0 < value < 2**31 else f"{value}LL"
        return "INT64_MIN" if value == -(2**63) else f"int64_t({number})"
    if dtype is DType.I32:
        return "INT32_MIN" if value == -(2**31) else f"({value})" if value < 0 else free(value)
    return f"{C_TYPES[dtype]}({value})"


def _float_literal(value: float, dtype: DType) -> str:
    single = dtype is DType.F32
    if math.isnan(value):
        return f"fp::cast<{C_TYPES[dtype]}>(NAN)"
    if single:
        value = to_float32(value)
    if math.isinf(value):
        text = f"fp::cast<{C_TYPES[dtype]}>(INFINITY)"
        return text if value > 0 else f"(-{text})"
    text = _shortest_float32(value) if single else repr(value)
    if "." not in text and "e" not in text:
        text += ".0"
    text += "f" if single else ""
    return f"(-{free(text[1:])})" if text.startswith("-") else free(text)


def to_float32(value: float) -> float:
    """`value` rounded to float32 (to infinity beyond its range)."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _shortest_float32(value: float) -> str:
    return next(text for digits in range(1, 10) if to_float32(float(text := f"{value:.{digits}g}")) == value)


def bare(text: str) -> str:
    """`text` without parentheses around the whole, for places where it is not an operand."""
    if not text.startswith("("):
        return text
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return bare(text[1:-1]) if position == len(text) - 1 else text
    return text


def apply_text(op: Op, args: Sequence[str], dtype: DType) -> str:
    """The expression for `op` on printed `args`; the caller puts it in parentheses where it is an operand."""
    if op is Op.CAST:
        return f"fp::cast<{C_TYPES[dtype]}>({args[0]})"
    if op is Op.NOT or (op is Op.BIT_NOT and dtype is DType.BOOL):
        return f"!{args[0]}"
    if op is Op.XOR:
        return f"bool({args[0]}) != bool({args[1]})"
    if op in (Op.NEG, Op.BIT_NOT):
        return f"{'-' if op is Op.NEG else '~'}{args[0]}"
    if op in INFIX:
        return f"{args[0]} {INFIX[op]} {args[1]}"
    return f"fp::{op.value}({', '.join(map(bare, args))})"


def is_call(op: Op) -> bool:
    """Whether `apply_text` gives a call, which needs no parentheses as an operand."""
    return op not in INFIX and op not in (Op.NOT, Op.XOR, Op.NEG, Op.BIT_NOT)


class Definition(str):
    """The line of a `Constant`: none until something reads it."""

    text, is_written = "", False


class Constant:
    """A constant that is defined where its line stands, if anything reads it: its text is its name, and to print that is to read it."""

    def __init__(self, kind: str, name: str, value: Callable[[], str] | str) -> None:
        """`value` may itself read constants, which are not read where this one is not."""
        self.line = Definition()
        self._kind, self._name, self._value = kind, name, value

    def __str__(self) -> str:
        if not self.line.text:
            if self.line.is_written:
                raise RenderError(f"{self._name} is read outside the block that defines it")
            value = self._value if isinstance(self._value, str) else self._value()
            self.line.text = f"const {self._kind} {self._name} = {value};"
        return self._name


def written(lines: Iterable[str]) -> list[str]:
    """`lines` when all that reads their constants has been printed: definitions of those that nothing reads are left out."""
    texts = list[str]()
    for line in lines:
        if isinstance(line, Definition):
            line.is_written = True
            texts += [line.text] if line.text else []
        else:
            texts.append(line)
    return texts


def indented(lines: Iterable[str]) -> list[str]:
    """`lines` of a block that is complete, four blanks further right; preprocessor lines and empty lines too, which C permits."""
    return ["    " + line if line else line for line in written(lines)]


UNROLL, ROLLED = "#pragma unroll", "#pragma unroll 1"
"""Before a loop that a compiler writes out, and one that it leaves."""


def block(head: str, lines: Iterable[str], end: str = "}") -> list[str]:
    """`head { lines }`; `end` is the line that closes it."""
    return [f"{head} {{", *indented(lines), end]


def braces(lines: Iterable[str]) -> list[str]:
    """`lines` with names of their own."""
    return ["{", *indented(lines), "}"]


def loop(variable: str, count: int | str, lines: Iterable[str], pragma: str = UNROLL) -> list[str]:
    """`lines` for each value of `variable` below `count`, also where there is one alone."""
    return [pragma, *block(f"for (int {variable} = 0; {variable} < {count}; ++{variable})", lines)]


def where(lines: Iterable[str], *conditions: str) -> list[str]:
    """`lines` where all `conditions` hold: as they are, where none is in question."""
    asked = [each for each in conditions if each not in ("", "true")]
    return block(f"if ({' && '.join(asked)})", lines) if asked else list(lines)


def either(condition: str, lines: Iterable[str], others: Iterable[str]) -> list[str]:
    """`lines` where the condition holds, else `others`."""
    return [*block(f"if ({condition})", lines, "} else {"), *indented(others), "}"]
