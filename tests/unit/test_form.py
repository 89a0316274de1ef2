"""One source for several sizes: what may differ between texts, and that the source is right with all numbers at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.form import Form
from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.ir.program import Program
from fusepass.codegen.render import render, render_general
from fusepass.codegen.render.numbers import Marked, free, plain, slot
from fusepass.codegen.schedule_general import Generality
from fusepass.codegen.source import Source
from tests import compile_cuda
from tests.support import kernels as k
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.native import run_native_source
from tests.unit.test_render_cuda import PROGRAMS, SMALL, assert_close, inputs_of

CPU = DeviceFacts.cpu(cores=2)


def marked(program: Program, facts: DeviceFacts = SMALL) -> Marked:
    return Marked.of(render_general(program, facts).text)


def form_of(*programs: Program, facts: DeviceFacts = SMALL) -> Form:
    """The least general form of several programs."""
    first, *others = (marked(program, facts) for program in programs)
    form = Form.first(first, frozenset(first.literals))
    for other in others:
        assert other.pieces == form.pieces
        form = form.widened(other)
    return form


def source_for(form: Form, program: Program, facts: DeviceFacts = SMALL) -> Source:
    values = form.values(marked(program, facts))
    assert values is not None
    return form.source(render_general(program, facts), values)


# ---- texts


def test_a_text_without_marks_is_the_source_for_one_size() -> None:
    program = k.layer_norm(40, 64)
    assert "⟦" not in render(program, SMALL).text
    assert "«" not in render(program, SMALL).text
    assert plain(f"for (i < {free(5)}){slot('unpack')}") == "for (i < 5)"


def test_zero_is_no_size() -> None:
    assert free(0) == free("0") == "0"


def test_numbers_that_agree_stay_literals() -> None:
    form = form_of(k.layer_norm(40, 64), k.layer_norm(72, 64))
    text = source_for(form, k.layer_norm(72, 64)).text
    assert "64" in text
    assert form.values(marked(k.layer_norm(72, 64))) != form.values(marked(k.layer_norm(40, 64)))


def test_numbers_that_always_agree_share_a_parameter() -> None:
    first, second = Marked(("a", "b", "c", "d"), ("3", "3", "7")), Marked(("a", "b", "c", "d"), ("5", "5", "9"))
    form = Form.first(first, frozenset(first.literals)).widened(second)
    assert form.groups == (0, 0, 1)
    assert form.values(Marked(first.pieces, ("8", "8", "8"))) == (8, 8)
    apart = Marked(first.pieces, ("8", "2", "8"))
    assert form.values(apart) is None
    assert form.widened(apart).groups == (0, 1, 2)


def test_a_wider_form_serves_all_that_the_narrow_one_served() -> None:
    texts = [Marked(("", "", ""), (str(a), str(b))) for a, b in ((2, 4), (3, 4), (3, 3), (1, 4))]
    form = Form.first(texts[0], frozenset(texts[0].literals))
    for text in texts:
        form = form.widened(text) if form.values(text) is None else form
    assert [form.values(text) for text in texts] == [(2, 4), (3, 4), (3, 3), (1, 4)]


def test_integers_and_floats_have_parameters_of_their_own() -> None:
    first, second = Marked(("", "", "", ""), ("3", "3.0f", "3.0")), Marked(("", "", "", ""), ("5", "5.0f", "5.0"))
    form = Form.first(first, frozenset(first.literals)).widened(second)
    assert form.groups == (0, 1, 2)
    values = form.values(second)
    assert values == (5, 5.0, 5.0)
    assert [type(value) for value in values or ()] == [int, float, float]


def test_other_pieces_are_another_form() -> None:
    assert form_of(k.affine(4 * 100)).values(marked(k.affine(4 * 100 + 1))) is None  # the last vector is shorter


def test_a_name_of_the_text_is_not_taken() -> None:
    first, second = Marked(("float size_0 = ", ";"), ("1",)), Marked(("float size_0 = ", ";"), ("2",))
    assert Form.first(first, frozenset("1")).widened(second).names == ("size__0",)


# ---- every number that may come at run time does

# The rest is run with `-m slow`; each takes a compiler's second or two.
SAMPLE = (
    "vectors with a tail", "half", "one bias per channel, odd", "mixed layouts, odd", "concatenation, odd",
    "pooling of windows that overlap", "pooling with padding", "rows of 63", "rows of 4096", "odd rows in shared memory", "rows read again",
    "softmax of 10", "softmax of 100 channels", "softmax of channels last, odd", "statistics over the batch",
    "argmin of columns", "merged moments, many",
)  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in PROGRAMS]
)
@pytest.mark.thinned(5)
def test_cuda_with_all_numbers_at_run_time(name: str) -> None:
    program = PROGRAMS[name]()
    text = marked(program)
    source = source_for(Form.first(text, frozenset()), program)
    compile_cuda.keep(source)
    inputs = inputs_of(program)
    assert_close(program, emulate(program, source, inputs), interpret(program, inputs))


@needs_compiler
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in PROGRAMS]
)
@pytest.mark.thinned(5)
def test_cpp_with_all_numbers_at_run_time(name: str) -> None:
    program = PROGRAMS[name]()
    source = source_for(Form.first(marked(program, CPU), frozenset()), program, CPU)
    assert_close(
        program, run_native_source(program, source, inputs_of(program)), interpret(program, inputs_of(program))
    )


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        "rows of 62",
        "rows of 64",
        "rows of 63",
        "rows of 1000",
        "rows of halves",
        "softmax of 10",
        "softmax of 2",
        "argmax",
        "double",
    ],
)
@pytest.mark.thinned(5)
def test_coarse_cuda_with_all_numbers_at_run_time(name: str) -> None:
    program = PROGRAMS[name]()
    rendered = render_general(program, SMALL, Generality.COARSE)
    text = Marked.of(rendered.text)
    form = Form.first(text, frozenset())
    source = form.source(rendered, form.values(text) or ())
    compile_cuda.keep(source)
    inputs = inputs_of(program)
    assert_close(program, emulate(program, source, inputs), interpret(program, inputs))


def test_coarse_rows_of_many_lengths_are_one_text() -> None:
    texts = {
        level: {Marked.of(render_general(k.softmax_rows(64, n), SMALL, level).text).pieces for n in range(132, 512, 4)}
        for level in (Generality.FINE, Generality.COARSE)
    }
    assert len(texts[Generality.COARSE]) == 1
    assert len(texts[Generality.FINE]) > 1


# ---- one library, several sizes

FAMILIES: dict[str, Sequence[Callable[[], Program]]] = {
    "pointwise": [lambda n=n: k.affine(n) for n in (8 * 1001, 8 * 1200, 8 * 1500)],  # type: ignore[misc]
    "bias per channel": [lambda n=n: k.channel_bias_gelu(4, n, 92) for n in (6, 9, 13)],  # type: ignore[misc]
    "batch and length": [lambda n=n: k.layer_norm(*n) for n in ((130, 60), (120, 52), (140, 56))],  # type: ignore[misc]
    "rows": [lambda n=n: k.layer_norm(n, 768) for n in (30, 33, 47)],  # type: ignore[misc]
    "rows that begin anywhere": [
        lambda n=n: k.layer_norm(*n)  # type: ignore[misc]
        for n in ((90, 1001), (80, 1003), (70, 997))
    ],
    "long rows": [lambda n=n: k.softmax_rows(3, n) for n in (4100, 4504, 5000)],  # type: ignore[misc]
    "channels": [lambda n=n: k.softmax_channels(3, n, 36 * 36) for n in (5, 7, 8)],  # type: ignore[misc]
    "images": [lambda n=n: k.softmax_channels(2, 16, n * n) for n in (23, 25, 27)],  # type: ignore[misc]
    "concatenation": [lambda n=n: k.concatenate(3, n, 2, 7) for n in (3, 5, 7)],  # type: ignore[misc]
    "sums of columns": [
        lambda n=n: k.row_reduction(103, n, ReduceOp.SUM, outer=True)  # type: ignore[misc]
        for n in (3000, 2001, 2500)
    ],
    "scans": [lambda n=n: k.scan(103, n) for n in (3000, 1204, 2500)],  # type: ignore[misc]
    "scans backwards": [lambda n=n: k.scan(103, n, backward=True) for n in (300, 200, 260)],  # type: ignore[misc]
    "scans behind sweeps": [lambda n=n: k.scan(103, n, behind=True) for n in (3000, 1204, 2500)],  # type: ignore[misc]
    "scans of columns": [lambda n=n: k.scan(103, n, outer=True) for n in (3000, 2001, 2500)],  # type: ignore[misc]
}

# Rows that are read across and written along, in tiles of a block.
EXCHANGED: dict[str, Sequence[Callable[[], Program]]] = {
    "stores exchanged": [
        lambda n=n: k.width_norm_channels_last(*n)  # type: ignore[misc]
        for n in ((3, 64, 64), (4, 67, 52), (3, 69, 60))
    ],
    "odd stores exchanged": [
        lambda n=n: k.width_norm_channels_last(*n)  # type: ignore[misc]
        for n in ((3, 64, 33), (3, 69, 37), (4, 67, 35))
    ],
    "long stores exchanged": [
        lambda n=n: k.width_norm_channels_last(*n)  # type: ignore[misc]
        for n in ((3, 40, 200), (2, 67, 216), (3, 41, 208))
    ],
}


@needs_compiler
@pytest.mark.parametrize("name", {**FAMILIES, **EXCHANGED})
@pytest.mark.thinned(5)
def test_one_cuda_source_serves_several_sizes(name: str) -> None:
    programs = [make() for make in {**FAMILIES, **EXCHANGED}[name]]
    form = form_of(*programs)
    texts = set()
    for program in programs:
        source = source_for(form, program)
        texts.add(source.text)
        inputs = inputs_of(program)
        assert_close(program, emulate(program, source, inputs), interpret(program, inputs))
    assert len(texts) == 1
    compile_cuda.keep(source)


@needs_compiler
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.thinned(5)
def test_one_cpp_source_serves_several_sizes(name: str) -> None:
    programs = [make() for make in FAMILIES[name]]
    form = form_of(*programs, facts=CPU)
    texts = set()
    for program in programs:
        source = source_for(form, program, CPU)
        texts.add(source.text)
        inputs = inputs_of(program)
        assert_close(program, run_native_source(program, source, inputs), interpret(program, inputs))
    assert len(texts) == 1
