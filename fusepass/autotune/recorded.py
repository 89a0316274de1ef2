"""What was generated of a region, kept on disk: a later process has its candidates without lowering, passes, search and rendering.

A record is found by all that decides what is generated: the region's graph, the device, the options, PyTorch, and this package's own
files. It holds the candidate to choose unmeasured, the one that was chosen and those that were dropped, each with its text, the outline of
its program and what reports say of its kernels. Which of them runs is not in it: that is asked of `fusepass.codegen.choices`, as ever. What
else may be asked of a program, such as kernels for unaligned inputs, is generated then.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any

import torch
from torch._ops import OpOverload

from fusepass.autotune.tune import adopt, named, obstacle, precision, recall
from fusepass.autotune.work import Work
from fusepass.codegen import cache_folders as folders
from fusepass.codegen import records
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms, OfOneSize, TooManyBuilds
from fusepass.codegen.generate import Generated, KernelSummary, Recalled
from fusepass.codegen.ir.anchor_format import AnchorFormat
from fusepass.codegen.key import package_key
from fusepass.codegen.lowering.lower import is_as_shipped
from fusepass.codegen.outlines import outline_data, outline_of, source_data, source_of
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render.cuda.family import registered
from fusepass.codegen.schedule.overrides import NO_OVERRIDES, ScheduleOverrides
from fusepass.codegen.search.apart import Code, Coded
from fusepass.codegen.search.candidate import Candidate, CandidateSpec
from fusepass.codegen.search.space import library_rounds
from fusepass.config import current
from fusepass.errors import ArtifactError
from fusepass.report.choice import EAGER, Choice

Make = Callable[[Work, CandidateSpec, DeviceFacts], Candidate]


def restore(work: Work, facts: DeviceFacts, forms: Forms, make: Make) -> bool:
    """Give `work` the candidates that an earlier process generated, if these are all that it takes; whether it has them.

    Args:
        work: has no candidates yet. Where nothing is found, it gets the key under which `keep` is to keep what is generated.
        facts: of its device.
        forms: is told of the libraries.
        make: generates a candidate, for what is not in the record.
    """
    key = _key(work, facts)
    record = None if key is None else records.lookup(folders.REGIONS, key)
    work.record_key = key
    if record is None or not {*record["beyond_budget"]} <= {*work.beyond_budget}:
        return False
    if not take(work, [_coded(each) for each in record["candidates"]], facts, forms, make):
        return False
    work.offered = tuple(record["offered"])
    if _settled(work, record["settled"]):
        work.record_key = None
        work.beyond_budget = tuple(name for name in work.beyond_budget if name in record["beyond_budget"])
        work.ruled_out = record["ruled_out"]
        return True
    work.candidates, work.candidate, work.offered = [], None, ()
    return False


def take(work: Work, coded: Sequence[Coded], facts: DeviceFacts, forms: Forms, make: Make) -> bool:
    """Give `work` candidates that another process generated, the first one first; not if its first one needs a library for several sizes. Whether it has them.

    Args:
        forms: is told of the libraries.
        make: generates a candidate, for what is not in `coded`.
    """
    first, *others = [coded_candidate(work, each, facts, make) for each in coded]
    try:
        conversions = {name: forms.shared(each) for name, each in first.conversions.items()}
        first = replace(first, generated=forms.shared(first.generated), conversions=conversions)
    except (OfOneSize, TooManyBuilds):
        return False
    if first.generated.general is not None:
        return False
    work.candidates, work.candidate = [first, *others], first
    return True


def keep(work: Work) -> None:
    """Keep what was generated of `work`, whose choice is made, where `restore` did not find it; nothing happens where the disk cannot be written."""
    if work.record_key is None or work.reason is not None or not work.candidates:
        return
    choice = work.choice or Choice(work.candidates[0].name)
    wanted = {work.candidates[0].name, choice.chosen, *(name for name, _ in choice.dropped)} - {EAGER}
    kept = [each for each in work.candidates if each.name in wanted]
    several = any(each.general is not None for made in kept for each in made.parts)
    if several or wanted & work.lost.keys():
        return
    unmeasured = choice.leaves_eager and choice.check is None and not choice.dropped
    with contextlib.suppress(OSError, ArtifactError):  # the latter for arguments of library calls that are not plain
        candidates = [_data(candidate) for candidate in kept]
        record = {
            "candidates": candidates,
            "offered": work.offered,
            "beyond_budget": work.beyond_budget,
            "ruled_out": work.ruled_out,
            "settled": choice.reason if unmeasured else None,
        }
        records.write(folders.REGIONS, work.record_key, record)


def _settled(work: Work, reason: str | None) -> bool:
    """Whether the candidates that `work` has are all that is wanted of it; `reason` says why its operators run, where that takes no measurement."""
    if reason is not None:
        work.choice = Choice(EAGER, reason=reason)
        return True
    effort = current().tune
    if effort == "off" or obstacle(work, effort) is not None:
        return True
    record = recall(work)
    return record is not None and {*named(record)} <= {each.name for each in work.candidates} and adopt(work, record)


def _key(work: Work, facts: DeviceFacts) -> str | None:
    """The key of all that decides what is generated of `work`; None where that cannot be told, or is to be seen at work."""
    config, graph = current(), work.graph.graph
    targets = {node.target for node in graph.nodes if node.op == "call_function"} - {operator.getitem}
    known = work.anew is not None and all(isinstance(target, OpOverload) for target in targets)
    if config.debug or config.dump is not None or not known or not is_as_shipped(targets) or registered():
        return None
    return records.key_of(
        {
            "package": package_key(),
            "torch": [torch.__version__, str(torch.get_default_dtype())],
            "region": [work.region.name, *(node.name for node in graph.nodes)],
            "operators": repr(work.kind),
            "updates": [[number, write.all_input_nodes[0].name] for number, write in sorted(work.updates.items())],
            "device": repr(facts),
            "options": [config.tune, config.max_builds, sorted(config.disable)],
            "precision": [library_rounds(work.graph, facts), *precision()],
        }
    )


def _data(candidate: Candidate) -> dict[str, Any]:
    spec = candidate.spec
    return {
        "spec": [spec.anchor_format.value, spec.anchor.value, asdict(spec.overrides)],
        "code": _code(candidate.generated),
        "conversions": {name: _code(each) for name, each in candidate.conversions.items()},
    }


def _code(generated: Generated) -> dict[str, Any]:
    source = generated.source
    return {
        "outline": outline_data(generated.outline),
        "source": source_data(source),
        "text": source.text,
        "headers": source.headers,
        "kernels": [astuple(kernel) for kernel in generated.kernels],
    }


def _coded(data: Mapping[str, Any]) -> Coded:
    """That of which `_data` made `data`."""
    anchor_format, anchor, overrides = data["spec"]
    spec = CandidateSpec(AnchorFormat(anchor_format), AnchorSource(anchor), ScheduleOverrides(**overrides))
    return spec, _code_of(data["code"]), {name: _code_of(code) for name, code in data["conversions"].items()}


def _code_of(data: Mapping[str, Any]) -> Code:
    source = source_of(data["source"], data["text"], data["headers"])
    return Code(outline_of(data["outline"]), source, tuple(KernelSummary(*each) for each in data["kernels"]))


def coded_candidate(work: Work, coded: Coded, facts: DeviceFacts, make: Make) -> Candidate:
    spec, code, conversions = coded
    surroundings = contextvars.copy_context()

    @functools.cache
    def made() -> Candidate:
        """The same, generated once more under the options of now."""
        assert work.anew is not None
        return surroundings.copy().run(make, replace(work, graph=work.anew()), spec, facts)

    def recalled(code: Code, overrides: ScheduleOverrides, again: Callable[[], Generated]) -> Generated:
        return Generated(
            code.outline, facts, overrides, recalled=Recalled(code.source, code.kernels, lambda: again().program)
        )

    def conversion(name: str) -> Generated:
        return made().conversions[name]

    converted = {
        name: recalled(each, NO_OVERRIDES, functools.partial(conversion, name)) for name, each in conversions.items()
    }
    return Candidate(spec, recalled(code, spec.overrides, lambda: made().generated), converted)
