"""What generated texts call by names of their own is no buffer's name, whatever a model calls its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Program
from fusepass.codegen.render import render, render_general
from fusepass.codegen.render.spelling import _RESERVED, Identifiers
from fusepass.codegen.source import Source
from tests.support import convolutions, kernels, products
from tests.support.emulate import emulate
from tests.support.thinned import thinned

H200 = DeviceFacts.h200()
SAMPLES = {**kernels.SAMPLES, **convolutions.SAMPLES, **products.SAMPLES}
WAYS: dict[str, Callable[[Program], Source]] = {
    "exact": lambda program: render(program, H200),
    "general": lambda program: render_general(program, H200),
}
_TYPES = r"(?:\b(?:int|float|bool|auto|unsigned|char|double|void|u?int\d+_t)|\bfp::\w+(?:<[^;{}=]*>)?)"
_DECLARED = re.compile(
    rf"{_TYPES}\s*(?:const\s*)?(?:\*\s*const|\*|&&|&|\s)\s*(?:__restrict__\s*)?\(?&?\*?([A-Za-z_]\w*)\)?\s*(?:[=;{{,:)]|\[)"
)


@pytest.mark.parametrize("name", thinned(SAMPLES, 8))
def test_texts_declare_nothing_but_what_was_handed_out(name: str) -> None:
    """A lambda's parameter hid a buffer called `where` once, and its pointer was the stream's."""
    program = SAMPLES[name]()
    alone = any(kernel.team or kernel.anchor or kernel.partials for kernel in program.kernels)
    for way in ("exact",) if alone else WAYS:
        taken: set[str] = set()
        take = Identifiers._take

        def noted(self: Identifiers, given: str, taken: set[str] = taken, take: Callable[..., str] = take) -> str:
            taken.add(given)
            return take(self, given)

        with mock.patch.object(Identifiers, "_take", noted):
            text = re.sub(r"//.*", "", WAYS[way](program).text)
        declared = set(_DECLARED.findall(text))
        assert len(declared) > 1
        assert declared <= taken | _RESERVED, declared - taken - _RESERVED


@pytest.mark.parametrize("name", ["x", "where", "replayed", "stream", "numbers", "chain_0", "float"])
def test_a_replayed_call_reads_a_buffer_of_any_name(name: str) -> None:
    program = kernels.chain(1_001, 2, name)
    source = render(program, H200)
    assert source.replay is not None
    x = np.linspace(-1, 1, 1_001, dtype=np.float32)
    results = emulate(program, replace(source, entry=source.replay), {name: x})
    np.testing.assert_array_equal(results["y"], x + 1 + 1)


def test_a_name_is_not_looked_for_among_all_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    free = Identifiers._free
    monkeypatch.setattr(Identifiers, "_free", lambda self, name: looks.append(name) or free(self, name))
    names = Identifiers()
    names.exact("v_3")
    found = [names.numbered("v") for _ in range(200)]
    assert found == [f"v_{number}" for number in range(201) if number != 3]
    below = names.copy()
    assert (below.numbered("v"), names.numbered("v")) == ("v_201", "v_201")
    assert len(looks) <= 210
