"""The scalar operations and the reductions that kernels are made of, by name."""

from __future__ import annotations

import enum


class Op(enum.Enum):
    """Scalar operations. The value is the spelling in the text form and the name in the device header."""

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    FLOOR_DIV = "floor_div"
    REMAINDER = "remainder"
    FMOD = "fmod"
    POW = "pow"
    ATAN2 = "atan2"
    HYPOT = "hypot"
    COPYSIGN = "copysign"
    NEXTAFTER = "nextafter"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"
    FMAX = "fmax"
    FMIN = "fmin"
    EQ = "eq"
    NE = "ne"
    LT = "lt"
    LE = "le"
    GT = "gt"
    GE = "ge"
    AND = "logical_and"
    OR = "logical_or"
    XOR = "logical_xor"
    NOT = "logical_not"
    BIT_AND = "bitwise_and"
    BIT_OR = "bitwise_or"
    BIT_XOR = "bitwise_xor"
    BIT_NOT = "bitwise_not"
    SHIFT_LEFT = "shift_left"
    SHIFT_RIGHT = "shift_right"
    WHERE = "where"
    CAST = "cast"
    NEG = "neg"
    ABS = "abs"
    SIGN = "sign"
    SIGNBIT = "signbit"
    RECIPROCAL = "reciprocal"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    EXP = "exp"
    EXP2 = "exp2"
    EXPM1 = "expm1"
    LOG = "log"
    LOG2 = "log2"
    LOG10 = "log10"
    LOG1P = "log1p"
    SIN = "sin"
    COS = "cos"
    TAN = "tan"
    ASIN = "asin"
    ACOS = "acos"
    ATAN = "atan"
    SINH = "sinh"
    COSH = "cosh"
    TANH = "tanh"
    ASINH = "asinh"
    ACOSH = "acosh"
    ATANH = "atanh"
    ERF = "erf"
    ERFC = "erfc"
    NORMAL_CDF = "normal_cdf"
    LGAMMA = "lgamma"
    FLOOR = "floor"
    CEIL = "ceil"
    ROUND = "round"
    TRUNC = "trunc"
    TF32 = "tf32"
    ISNAN = "isnan"
    ISINF = "isinf"
    SIGMOID = "sigmoid"
    RANDOM = "random"  # number in (0, 1], of a seed, an offset, the number of an element, threads and width; see `fusepass.codegen.ir.random`
    UNIFORM = "uniform"  # the same of a seed, an offset, a sequence, a call in it and which of the numbers of that
    TERM = "term"  # a * b, of one operator with the sum that it is a term of: both round once
    RESCALE = (
        "rescale"  # a * b, where b is a power of two, and 1 but where a * b is near an end of the range of numbers
    )


CHEAP = frozenset(
    {
        Op.ADD,
        Op.SUB,
        Op.MUL,
        Op.NEG,
        Op.ABS,
        Op.MAXIMUM,
        Op.MINIMUM,
        Op.FMAX,
        Op.FMIN,
        Op.WHERE,
        Op.CAST,
        Op.RESCALE,
        Op.TERM,
    }
    | {Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE, Op.AND, Op.OR, Op.NOT}
)
"""Operations of an instruction or two."""

LONG = frozenset({Op.SIN, Op.COS, Op.TAN, Op.LGAMMA, Op.POW, Op.ATAN2, Op.FMOD, Op.REMAINDER, Op.ERFC})
"""Operations of so many instructions that a loop with several of them leaves the instruction cache."""


STEPS = frozenset(
    {Op.FLOOR, Op.CEIL, Op.ROUND, Op.TRUNC, Op.SIGN, Op.COPYSIGN, Op.ATAN2, Op.NEXTAFTER}
    | {Op.FLOOR_DIV, Op.REMAINDER, Op.FMOD}
)
"""Operations that give floating-point numbers and jump: the last bit of an operand may change the result by much."""


DIVISIONS = frozenset({Op.FLOOR_DIV, Op.REMAINDER, Op.FMOD})
"""Operations that of integers are an error where the divisor is zero."""


class ReduceOp(enum.Enum):
    """How the values of a row (or window) become one. The value is the state's name in the device header.

    `MOMENTS` gives (mean, sum of squared differences from the mean); `MERGE_MOMENTS` the same from partial
    (count, mean, m2) triples; `SOFTMAX` gives (maximum, sum of exp(x - maximum)), `MERGE_SOFTMAX` the same from partial
    pairs; `ARGMAX`/`ARGMIN` give (value, position of its first occurrence) from (value, position) pairs, NaN counting as extreme,
    `LAST_ARGMAX`/`LAST_ARGMIN` that of its last one.
    """

    SUM = "Sum"
    PROD = "Prod"
    MAX = "Max"
    MIN = "Min"
    MOMENTS = "Moments"
    MERGE_MOMENTS = "MergeMoments"
    SOFTMAX = "Softmax"
    MERGE_SOFTMAX = "MergeSoftmax"
    ARGMAX = "ArgMax"
    ARGMIN = "ArgMin"
    LAST_ARGMAX = "LastArgMax"
    LAST_ARGMIN = "LastArgMin"

    @property
    def parts(self) -> int:
        """How many numbers the result has."""
        return 1 if self in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MAX, ReduceOp.MIN) else 2

    @property
    def kept(self) -> int:
        """How many numbers a partial result has: those of the result, and of moments a third, how many values there were."""
        return 3 if self in (ReduceOp.MOMENTS, ReduceOp.MERGE_MOMENTS) else self.parts

    @property
    def finds_place(self) -> bool:
        """Whether the second number of a value, and of the result, is a position, an int64 whatever the type of the first."""
        return self in (ReduceOp.ARGMAX, ReduceOp.ARGMIN, ReduceOp.LAST_ARGMAX, ReduceOp.LAST_ARGMIN)

    def gives_position(self, part: int) -> bool:
        """Whether number `part` of the result is a position."""
        return part == 1 and self.finds_place

    @property
    def arity(self) -> int:
        """How many values go in per element."""
        if self is ReduceOp.MERGE_MOMENTS:
            return 3
        return 2 if self is ReduceOp.MERGE_SOFTMAX or self.finds_place else 1
