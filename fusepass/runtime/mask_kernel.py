"""Generates the kernel of a dropout mask by the lowering that regions use, with one library for masks of many sizes."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.form import Form
from fusepass.codegen.generate import Generated, generate
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.lowering.modes import without_modes
from fusepass.codegen.lowering.tracer import Spec
from fusepass.codegen.render import render_general
from fusepass.codegen.render.numbers import Marked
from fusepass.codegen.source import Source

NAME = "dropout_mask"

_WIDTHS = frozenset({"1", "2", "4", "8", "16"})
"""Numbers that stay in the text: elements of a vector, and elements that share a call of the generator. The compiler must know them to share it."""

_MOST_LANES = 16  # of a vector
_EXAMPLES = tuple(itertools.product(((1 << 20) + 7, (1 << 12) + 1, (1 << 31) + 11), (True, False)))
"""Numbers of vectors, one for each schedule of a mask, and whether a thread of PyTorch's kernel takes more than one."""

_FEW_THREADS = 3 << 10


def generated(facts: DeviceFacts, count: int, p: float, dtype: torch.dtype, threads: int, width: int) -> Generated:
    """The kernel for a mask of `count` elements. Sizes and probability are arguments of its source, so masks of one kind share a library.

    Args:
        facts: the device.
        count: elements, at least one.
        p, dtype, threads, width: as ``fusepass::kept`` takes them.

    Raises:
        FusepassError: a bug of the generator.
    """
    made = _generated(facts, count, p, dtype, threads, width)
    like = _rendered(made)
    marked, lanes = Marked.of(like.text), min(count & -count, _MOST_LANES)
    forms = (_form(facts, vectors * lanes, dtype, several, width) for vectors, several in _EXAMPLES)
    for form in itertools.chain(forms, [Form.first(marked, _WIDTHS)]):
        values = form.values(marked)
        if values is not None:
            break
    assert values is not None  # the last one was made of this text
    source = form.source(like, values)
    return replace(made, general=source, general_unaligned=lambda _: source)


@functools.cache
def _form(facts: DeviceFacts, count: int, dtype: torch.dtype, several: bool, width: int) -> Form:
    """The general text of a kind, from an example whose sizes differ from each other and from `_WIDTHS`.

    Real masks would give texts that depend on which comes first; this one is the same in every process, which finds its library in the cache.
    """
    threads = _FEW_THREADS if several else count
    return Form.first(Marked.of(_rendered(_generated(facts, count, 0.3, dtype, threads, width)).text), _WIDTHS)


def _generated(facts: DeviceFacts, count: int, *rule: Any) -> Generated:
    """The program of one mask, as of a region with no other operator."""
    device, graph = torch.device(facts.target.value), fx.Graph()
    with without_modes(), torch.no_grad():
        state = graph.placeholder("state")
        state.meta["val"] = Spec.described((2,), (1,), torch.int64, device)
        mask = graph.call_function(torch.ops.fusepass.kept.default, (state, [count], [1], *rule))
        mask.meta["val"] = Spec.described((count,), (1,), torch.bool, device)
        graph.output((mask,))
        return generate(*lower(fx.GraphModule({}, graph), NAME, [state.name]), facts)


def _rendered(made: Generated) -> Source:
    """The text with its numbers marked. The state is read word by word, so it need not be aligned."""
    return render_general(made.program, made.facts, aligned=False)
