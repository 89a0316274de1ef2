"""Artifacts for sizes that are not known yet: a model's operators with open sizes, and libraries that serve many of them.

`torch.export` gives the operators and the conditions under which they are right, and both become data (`fusepass.artifact.sizes`). That graph is
lowered at several sizes, the forms of the texts are kept (`fusepass.codegen.forms`), and each form is built once. A call of a new size
(`fusepass.artifact.dynamic`) checks the conditions, lowers the same graph in the same way (`fusepass.api.lowered`), and looks its texts up among
those forms. So nothing is concluded about a size that was not rendered: a library serves it only if it can become exactly the text of that size.
Where none can, the region's operators run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from fusepass import measure
from fusepass.api.lowered import compiled_for
from fusepass.api.module import OptimizedModule
from fusepass.artifact import machine
from fusepass.artifact.dynamic import Lowering, digest, facts_data
from fusepass.artifact.graph import Constants, graph_data
from fusepass.artifact.libraries import Libraries
from fusepass.artifact.sizes import OpenSizes, Term, names_in, term_of
from fusepass.codegen import build
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms
from fusepass.compile.chunks import CHUNKS
from fusepass.compile.pipeline import CompiledGraph
from fusepass.config import override
from fusepass.errors import ArtifactError, BuildError
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.structure import Template

_PROBES = 8
_CHECKS = (torch.ops.aten._assert_tensor_metadata.default,)


@dataclass
class _Group:
    """Examples that differ in sizes alone.

    Attributes:
        number: of the first one.
        signature: its signature, as the manifest has it.
        calls: the arguments of each.
    """

    number: int
    signature: Mapping[str, Any]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    @property
    def tensors(self) -> list[list[torch.Tensor]]:
        """Those of each call."""
        return [Template.of_call(*call)[0] for call in self.calls]

    @property
    def open(self) -> list[set[int]]:
        """The dimensions of each tensor in which the calls differ."""
        return [
            {dim for dim, sizes in enumerate(zip(*(each.shape for each in same), strict=True)) if len({*sizes}) > 1}
            for same in zip(*self.tensors, strict=True)
        ]


def _groups(
    signatures: Sequence[Mapping[str, Any]], calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> list[_Group]:
    """The `calls` with these `signatures` whose sizes are to be left open.

    Raises:
        ValueError: none differ in sizes alone.
        ArtifactError: what they write or return depends on sizes in a way that cannot be left open.
    """
    found: dict[str, _Group] = {}
    for number, (data, call) in enumerate(zip(signatures, calls, strict=True)):
        kinds = [[len(shape), dtype, device] for _, shape, _, dtype, device in data["tensors"]]
        key = json.dumps([data["inputs"], kinds, data["parameters"], data["autocast"]])
        group = found.setdefault(key, _Group(number, data))
        group.calls.append(call)
        if data["outputs"] != group.signature["outputs"]:
            raise _refusal("the model returns numbers that depend on them")
    wanted = [group for group in found.values() if any(group.open)]
    if not wanted:
        raise ValueError(
            "dynamic=True leaves sizes open in which examples differ: give two examples of different sizes"
        )
    for group in wanted:
        if group.signature["written"]:
            raise _refusal("the model writes to its inputs or statistics")
        if group.signature["autocast"]:
            raise _refusal("it is called under autocast")
    return wanted


class _Silent(FallbackCounter):
    """Counts, and warns of nothing: nothing runs yet."""

    def count(self, where: str, reason: str, **_: Any) -> None:
        pass


def _refusal(reason: str) -> ArtifactError:
    return ArtifactError(
        f"no sizes can be left open: {reason}; save it without dynamic=True, with an example of each size"
    )


def further_sizes(
    optimised: OptimizedModule,
    signatures: Sequence[Mapping[str, Any]],
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    names: Mapping[str, str],
    states: Mapping[str, torch.Tensor],
    facts: Sequence[DeviceFacts],
    libraries: Libraries,
    constants: Constants,
) -> list[dict[str, Any]]:
    """What the manifest has of calls in other sizes than those of `calls`, which have these `signatures`.

    Args:
        names: the manifest's name for each name of a tensor of the model.
        states: its tensors by the former.
        facts: of each device to build for.
        libraries, constants: receive what it needs.

    Raises:
        ValueError: no examples differ in sizes alone.
        ArtifactError: sizes cannot be left open.
    """
    model = optimised.original
    with override(**optimised._options) as config:
        options = {"algebra": config.algebra, "rounding": config.rounding, "disable": sorted(config.disable | {CHUNKS})}
    counter = _Silent()
    lowerings = [Lowering(type(model).__name__, each, options, counter) for each in facts]
    return [
        {"signature": group.number, **_data(model, group, names, states, lowerings, libraries, constants)}
        for group in _groups(signatures, calls)
    ]


def _data(
    model: nn.Module,
    group: _Group,
    names: Mapping[str, str],
    states: Mapping[str, torch.Tensor],
    lowerings: Sequence[Lowering],
    libraries: Libraries,
    constants: Constants,
) -> dict[str, Any]:
    """A `group` of calls of `model` with open sizes."""
    program = _exported(model, group)
    sizes = _sizes(program)
    graph, used, held = _graph(program, names)
    arguments = [*(states[name] for name in used), *held]
    calls = list(_probes(OpenSizes(**sizes), group))
    variants = []
    for lowering in lowerings:
        forms, wanted, requires = Forms(several=True), dict[str, int](), dict[str, Any]()
        with build.given(lambda source: BuildError("not yet")):
            for tensors in calls:
                compiled = compiled_for(lowering, graph, [*arguments, *tensors], forms)
                _ask_for_unaligned(compiled)
        sources = forms.sources
        for source, library in zip(sources, build.build_all(sources), strict=True):
            if isinstance(library, Path):
                wanted[digest(source)] = libraries.number(library, source)
                needed = machine.requirement(source)
                requires[str(needed)] = needed
        variants.append(
            {
                "requires": list(requires.values()),
                "facts": facts_data(lowering.facts),
                "forms": forms.data(),
                "libraries": wanted,
            }
        )
    return {
        "graph": graph_data(graph, {}, constants),
        "states": used,
        "constants": [constants.name(tensor) for tensor in held],
        "sizes": sizes,
        "options": dict(lowerings[0].options),
        "variants": variants,
    }


def _probes(sizes: OpenSizes, group: _Group) -> Iterator[list[torch.Tensor]]:
    """Tensors of calls in further sizes, of which the libraries are to be right: texts that differ in a number only now and then, as
    where work is divided, are to differ here. Then those of the group's own calls."""
    names = [""] * len(sizes.shapes)
    given = [[tuple(each.shape) for each in tensors] for tensors in group.tensors]
    largest: dict[str, int] = {}
    for shapes in given:
        for terms, shape in zip(sizes.shapes, shapes, strict=True):
            for term, size in zip(terms, shape, strict=True):
                if isinstance(term, str):
                    largest[term] = max(size, largest.get(term, 0))
    for turn in range(_PROBES):
        probe = {name: _probe(size, turn + 3 * place) for place, (name, size) in enumerate(largest.items())}
        shapes = sizes.shapes_at(probe)
        if sizes.problem(names, shapes) is None:
            yield [_made_up(like, shape) for like, shape in zip(group.tensors[0], shapes, strict=True)]
    for tensors, shapes in zip(group.tensors, given, strict=True):
        if sizes.problem(names, shapes) is None:
            yield tensors


def _probe(largest: int, turn: int) -> int:
    """One of several sizes up to the `largest`, even ones and odd ones."""
    return max(
        2, (largest, largest // 2 + 1, largest // 3, 3, largest - 1, 2, largest // 2, largest // 5)[turn % _PROBES]
    )


def _made_up(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Some tensor of this `shape` whose dimensions lie in the same order; whole numbers are zeros, which are valid indices."""
    order = sorted(range(like.dim()), key=lambda dim: -like.stride()[dim])
    made = torch.empty_permuted(shape, order, dtype=like.dtype, device="meta")
    (tensor,) = measure.made_up([made], like.device)
    return tensor if like.dtype.is_floating_point else tensor.zero_()


def _ask_for_unaligned(compiled: CompiledGraph) -> None:
    """Have forms know what serves inputs that are not aligned."""
    for work in compiled.works:
        for part in work.candidate.parts if work.candidate is not None else ():
            with contextlib.suppress(BuildError):  # these run the operators
                part.unaligned()


class _Flat(nn.Module):
    """A model as a function of the tensors of a call alone, to those of the result."""

    def __init__(self, model: nn.Module, call: Template) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._call.fill(tensors)
        return tuple(Template.of(self.model(*args, **kwargs))[0])


def _exported(model: nn.Module, group: _Group) -> ExportedProgram:
    """`model` as an exported program of the tensors of a call."""
    tensors, call = Template.of_call(*group.calls[-1])
    shapes = tuple(dict.fromkeys(dims, Dim.DYNAMIC) for dims in group.open)
    try:
        with torch.no_grad():
            return torch.export.export(_Flat(model, call), tuple(tensors), dynamic_shapes=(shapes,), strict=False)
    except Exception as error:  # of many kinds: SymPy's, too
        said = next((line for line in str(error).splitlines() if line.strip()), "")
        raise _refusal(f"torch.export says {type(error).__name__}: {said.strip()}") from error


def _graph(program: ExportedProgram, names: Mapping[str, str]) -> tuple[fx.GraphModule, list[str], list[torch.Tensor]]:
    """The graph of `program` as a function of tensors of the model, other constants and the call's tensors; the names of the
    first, and the second."""
    if any(each.kind is not OutputKind.USER_OUTPUT for each in program.graph_signature.output_specs):
        raise _refusal("the model writes to its tensors")
    own, constants, given = dict[fx.Node, str](), dict[fx.Node, torch.Tensor](), list[fx.Node]()
    placeholders = program.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        name = (spec.target or "").removeprefix("model.")
        if spec.kind is InputKind.USER_INPUT:
            given.append(node)
        elif not node.users:
            continue
        elif name in names:
            own[node] = names[name]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[node] = program.constants[str(spec.target)]
        else:
            raise _refusal(f"{spec.target} is no tensor")
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*own, *constants, *given):
        copies[node] = graph.placeholder(node.name)
    for node in program.graph.nodes:
        if node.op != "placeholder" and node.target not in _CHECKS:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(nn.Module(), graph), list(own.values()), list(constants.values())


def _sizes(program: ExportedProgram) -> dict[str, Any]:
    """What `fusepass.artifact.sizes.OpenSizes` takes."""
    specs = zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)
    values = [node.meta["val"] for node, spec in specs if spec.kind is InputKind.USER_INPUT]
    shapes = [[_term(size) for size in value.shape] for value in values]
    known = values[0].fake_mode.shape_env
    conditions = [term_of(known.replace(guard.expr)) for guard in known.guards]
    terms = [*(term for shape in shapes for term in shape), *conditions]
    unknown = set().union(*map(names_in, terms)) - {term for term in terms if isinstance(term, str)}
    if unknown:
        raise _refusal(f"they follow from {', '.join(sorted(unknown))}, which is the size of no tensor")
    ends = {str(name): (each.lower, each.upper) for name, each in program.range_constraints.items()}
    return {
        "shapes": shapes,
        "ranges": {name: [int(end) if end.is_Integer else None for end in pair] for name, pair in ends.items()},
        "conditions": conditions,
    }


def _term(size: int | torch.SymInt) -> Term:
    return term_of(size.node.expr) if isinstance(size, torch.SymInt) else size
