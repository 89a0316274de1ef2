"""One source for several sizes: what may differ between texts, and that the source is right with all numbers at run time."""

from __future__ import annotations

import shutil

import pytest

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.form import Form
from fusepass.codegen.ir.program import Program
from fusepass.codegen.render import render, render_general
from fusepass.codegen.render.numbers import Marked, free, plain, slot
from fusepass.codegen.source import Source
from tests import compile_cuda
from tests.support import kernels as k
from tests.support.emulate import emulate
from tests.support.interpret import interpret
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
    assert form_of(k.affine(4 * 100)).values(marked(k.affine(4 * 100 + 1))) is None  # no vectors


def test_a_name_of_the_text_is_not_taken() -> None:
    first, second = Marked(("float size_0 = ", ";"), ("1",)), Marked(("float size_0 = ", ";"), ("2",))
    assert Form.first(first, frozenset("1")).widened(second).names == ("size__0",)


# ---- every number that may come at run time does


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", PROGRAMS)
def test_cuda_with_all_numbers_at_run_time(name: str) -> None:
    program = PROGRAMS[name]()
    text = marked(program)
    source = source_for(Form.first(text, frozenset()), program)
    compile_cuda.keep(source.text, source.entry)
    inputs = inputs_of(program)
    assert_close(program, emulate(program, source, inputs), interpret(program, inputs))
