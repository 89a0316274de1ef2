"""Makes a failing model smaller while it still fails in the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from fusepass.config import Algebra
from tests.fuzz.chunk import Example, Failure, run
from tests.property.script import Model

Trying = Callable[[list[Example], str], list[Failure]]


def smallest(failure: Failure, device: str, seconds: float = 60.0, trying: Trying | None = None) -> Failure:
    """The smallest failure of the same kind that was found in the time given; `trying` tells what is wrong with examples, as `run` does."""
    end = time.monotonic() + seconds
    best, improved = failure, True
    while improved:
        improved = False
        for model, level in _smaller(best.example):
            if time.monotonic() > end:
                return best
            found = _fails(Example(model, level), device, trying or run)
            if found is not None and found.kind == best.kind and not found.noise:
                best, improved = found, True
                break
    return best


def _fails(example: Example, device: str, trying: Trying) -> Failure | None:
    """What is wrong with `example`; what PyTorch itself does not run is not wrong."""
    if not example.fair:
        return None
    try:
        module, inputs = example.model.make(device)
        module(*inputs)
    except Exception:  # a line that is left out may be one that another needs
        return None
    return next(iter(trying([example], device)), None)


def _smaller(example: Example) -> Iterator[tuple[Model, Algebra]]:
    """Models with less in them, the boldest cuts first."""
    model = example.model
    if len(model.results) > 1:
        for result in model.results:
            yield replace(model, results=[result]), example.level
    for number, line in enumerate(model.lines[:-1]):
        name = re.match(r"(v\d+) = ", line)
        if name is not None:
            yield _without_dead(replace(model, lines=model.lines[: number + 1], results=[name[1]])), example.level
    for number in reversed(range(len(model.lines))):
        yield _without_dead(replace(model, lines=model.lines[:number] + model.lines[number + 1 :])), example.level
    for number, line in enumerate(model.lines):
        name, _, expression = line.partition(" = ")
        for part in dict.fromkeys(re.findall(r"\b[vx]\d+\b", expression)):
            if re.fullmatch(r"v\d+", name) and expression != part:
                rest = [re.sub(rf"\b{name}\b", part, later) for later in model.lines[number + 1 :]]
                results = [part if result == name else result for result in model.results]
                lines = [*model.lines[:number], *rest]
                yield _without_dead(replace(model, lines=lines, results=results)), example.level
    for mark in model.marks:
        yield replace(model, marks=[other for other in model.marks if other != mark]), example.level
    for number, made in enumerate(model.inputs):
        for plain in _plainer(made):
            yield replace(model, inputs=[*model.inputs[:number], plain, *model.inputs[number + 1 :]]), example.level
    if example.level is not Algebra.OFF:
        yield model, Algebra.OFF


def _plainer(made: str) -> Iterator[str]:
    """The input without its strides, and with one dimension halved."""
    plain = re.match(r"torch\.randn\(\(([\d, ]*)\)\)\.to\((\S+?)\)", made)
    if plain is None:
        return
    if plain[0] != made:
        yield plain[0]
    sizes = [int(size) for size in re.findall(r"\d+", plain[1])]
    for axis, size in enumerate(sizes):
        if size > 1:
            smaller = (*sizes[:axis], size // 2, *sizes[axis + 1 :])
            yield made.replace(plain[0], f"torch.randn({smaller}).to({plain[2]})")


def _without_dead(model: Model) -> Model:
    """Lines, layers and inputs whose values nobody reads are left out; statements and inputs' places stay."""
    needed, kept = set(model.results), []
    for line in reversed(model.lines):
        name, _, _ = line.partition(" = ")
        if re.fullmatch(r"v\d*", name) and name not in needed:
            continue
        kept.append(line)
        needed.update(re.findall(r"\b(?:[vx]\d*|l\d+)\b", line))
    layers = {name: made for name, made in model.layers.items() if name in needed}
    return replace(model, lines=kept[::-1], layers=layers)
