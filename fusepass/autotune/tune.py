"""Chooses between a region's candidates and its own operators by running all of them on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass import measure
from fusepass.autotune.trial import BUDGETS, OperatorsFail, checked, fastest
from fusepass.autotune.work import Work
from fusepass.codegen import choices, records
from fusepass.codegen.forms import Forms
from fusepass.codegen.key import source_key
from fusepass.codegen.schedule.overrides import NO_OVERRIDES
from fusepass.codegen.search.candidate import Candidate
from fusepass.config import current
from fusepass.errors import BuildError, warn
from fusepass.numerics.agreement import Verdict
from fusepass.patterns.aliasing import is_view
from fusepass.patterns.copies import moves
from fusepass.report.choice import EAGER, Choice
from fusepass.runtime.region import FusedRegion

_MEMORY_SHARE = 0.25  # of what is free may be taken for inputs and results
_RESULTS = 4  # that are held at once: the operators', a candidate's, their difference and its size

# Operators for which any whole number is an argument as good as another: indices are none, nor is what is divided by.
_SAFE_WITH_INTEGERS = frozenset({
    "_to_copy", "abs", "add", "amax", "amin", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "clamp",
    "clone", "eq", "ge", "gt", "le", "logical_and", "logical_not", "logical_or", "lt", "maximum", "minimum", "mul",
    "fusepass.kept", "ne", "neg", "relu", "sign", "sub", "sum", "where",
})  # fmt: skip
_DIVISIONS = frozenset({"div", "floor_divide", "fmod", "remainder"})  # as good where they are by a number
_LOOKUPS: Mapping[str, Callable[[Any], Sequence[tuple[object, int]]]] = {
    "embedding": lambda node: [(node.args[1], node.args[0].meta["val"].shape[0])],
    "gather": lambda node: [(node.args[2], node.args[0].meta["val"].shape[node.args[1]])],
    "index": lambda node: [*zip(node.args[1], node.args[0].meta["val"].shape, strict=False)],
    "index_select": lambda node: [(node.args[2], node.args[0].meta["val"].shape[node.args[1]])],
    "nll_loss_forward": lambda node: [(node.args[1], node.args[0].meta["val"].shape[-1])],
}
"""The operands of indices, and how many rows there are for each."""


def recall(work: Work) -> choices.Record | None:
    """What was found out before, on the same kind of device, about a region whose first candidate is generated.

    None where nothing was, where the record does not cover all that is offered, or where nothing is to be looked up.
    """
    effort = current().tune
    if effort == "off" or obstacle(work, effort) is not None:
        return None
    key = _key(work)
    record = None if key is None else choices.lookup(key)
    covers = record is not None and (effort != "max" or record.effort == "max") and {*work.offered} <= {*record.offered}
    return record if covers else None


def named(record: choices.Record) -> list[str]:
    """The candidates that the choice in `record` is about: what it chose, unless that is eager, and what it dropped."""
    names = [record.choice.get("chosen"), *(entry[0] for entry in record.choice.get("dropped", ()))]
    return [name for name in names if name != EAGER]


def adopt(work: Work, record: choices.Record) -> bool:
    """Let the choice in `record` be the one for `work`, if what it chose and what it dropped are the same as they were."""
    try:
        choice = replace(Choice.from_json(dict(record.choice)), recorded=True)
    except (KeyError, TypeError, ValueError):  # written by another version
        return False
    there = {each.name: each for each in work.candidates}
    for name in named(record):
        if name not in there or _source_key(there[name]) != record.sources.get(name):
            return False
    work.beyond_budget = tuple(name for name in work.beyond_budget if name not in record.offered)
    settle(work, choice)
    return True


def choose(work: Work, regions: Mapping[str, FusedRegion]) -> None:
    """Decide which of the loaded candidates, or the operators that they stand for, serve calls from now on.

    That is done as ``Config.tune`` says: candidates whose results differ from the operators' are dropped, the others are
    timed, what comes of it is kept on disk. The user's tensors are not touched.

    Args:
        work: the region; nothing happens where its choice is made already.
        regions: its candidates by name, the one to choose without a measurement first.
    """
    config = current()
    if config.tune == "off" or work.choice is not None:
        return
    chosen = next(iter(regions))
    reason = obstacle(work, config.tune)
    if reason is not None:
        work.choice = Choice(chosen, reason=reason)
        return
    try:
        choice = _remembered(work, regions, config.tune)
    except OperatorsFail as error:
        choices.momentary()
        choice = Choice(chosen, reason=f"trying it failed with {error}")
    except Exception as error:  # out of memory, say
        if config.debug:
            raise
        choices.momentary()
        what = next(iter(str(error).splitlines()), "")
        choice = Choice(chosen, reason=f"trying it failed with {type(error).__name__}: {what}")
        text = f'{work.region.name} runs as "{chosen}", which was compared with nothing: {choice.reason}'
        warn(text)
    settle(work, choice)


def reuse(work: Work, forms: Forms) -> None:
    """Let what was chosen for other sizes be in force, if the first candidate's library serves them, too."""
    work.choice = forms.choices.get(_kind_of_library(work))


def chosen_earlier(work: Work, forms: Forms) -> str | None:
    """The name of the candidate that was chosen for the same region at other sizes."""
    return forms.chosen.get(kind_of_region(work))


def remember(work: Work, forms: Forms) -> None:
    """Keep what was chosen for sizes that come later.

    What was measured for a library that serves several sizes is kept for those whose operators move about as many bytes.
    """
    if work.candidate is None or work.reason is not None:
        return
    forms.chosen[kind_of_region(work)] = work.candidate.name
    decided = work.choice is not None and work.choice.reason in (None, _untimed())
    if decided and work.candidate.generated.general is not None:
        forms.choices[_kind_of_library(work)] = work.choice


def _kind_of_library(work: Work) -> tuple[str, int]:
    return work.candidates[0].generated.source.text, work.region.bytes_before.bit_length()


def kind_of_region(work: Work) -> tuple[object, ...]:
    """What sizes do not change about a region."""
    values = [node.meta["val"] for node in work.region.inputs]
    kinds = [(value.dtype, value.dim()) for value in values]
    return (work.region.name, work.device, *kinds, *(str(node.target) for node in work.region.nodes))


def settle(work: Work, choice: Choice) -> None:
    """Let `choice`, made for `work` or for a region that it is like, be in force."""
    work.choice = choice
    work.candidate = next((each for each in work.candidates if each.name == choice.chosen), work.candidate)
    if choice.nothing_is_right:
        work.reason = f"generated code is not used: {choice.dropped[0][1]}"


def obstacle(work: Work, effort: str) -> str | None:
    """Why nothing can be run for this region but by the user; None where it can."""
    inputs = [node.meta["val"] for node in work.arguments]
    results = [node.meta["val"] for node in work.region.outputs]
    if work.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        choices.momentary()
        return "a CUDA graph is being captured"
    if not all(value.numel() for value in (*inputs, *results)):
        return "a tensor has no elements"
    unsafe = _unsafe_with_integers(work.graph.graph)
    if unsafe is not None:
        return f"{unsafe} needs particular whole numbers"
    if work.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.binary_cross_entropy.default):
        # It asserts that; a GPU on which an assertion fails is lost to the process.
        return "binary_cross_entropy needs numbers between 0 and 1"
    needed = sum(map(measure.nbytes, inputs)) + _RESULTS * sum(map(measure.nbytes, results))
    if needed > _MEMORY_SHARE * measure.free_bytes(work.device):
        choices.momentary()
        return "its tensors would take too much of the memory"
    budget, moved = BUDGETS[effort], work.region.bytes_before + work.region.bytes_after
    if work.generated is not None and moved / work.generated.facts.bandwidth > budget.most:
        return f"one run takes more than {budget.most:g} s"
    return None


def _unsafe_with_integers(graph: fx.Graph) -> str | None:
    """An operator that takes whole numbers as more than numbers, those made up (`measure.made_up`) not among them; None where there is none."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype.is_floating_point or value.dtype is torch.bool:
            continue
        for user in node.users:
            if user.op == "call_function" and not _takes_any(user, node):
                return _packet(user)
    return None


def _packet(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")


def _takes_any(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` may be run with whatever whole numbers are made up for `node`, or what other operators make of them."""
    packet = _packet(user)
    if packet in _SAFE_WITH_INTEGERS or is_view(user.target):
        return True
    if packet in _DIVISIONS:
        return isinstance(user.args[1], int | float) and user.args[1] != 0
    if packet in _LOOKUPS:
        looked_up = [rows for indices, rows in _LOOKUPS[packet](user) if indices is node]
        return not looked_up or (_is_made_up(node) and min(looked_up) > measure.MOST_WHOLE)
    return isinstance(user.target, OpOverload) and moves(user)


def _is_made_up(node: fx.Node) -> bool:
    """Whether `node` has the numbers of an input."""
    while node.op == "call_function" and is_view(node.target):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def times_are_taken(work: Work) -> bool:
    """Whether a trial of the candidates of `work` tells which of several is the fastest."""
    return obstacle(work, current().tune) is None and _untimed() is None


def _untimed() -> str | None:
    """Why results are compared but no times taken; None where times are taken."""
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and times differ from run to run"
    return None


def _remembered(work: Work, regions: Mapping[str, FusedRegion], effort: str) -> Choice:
    """What a trial says; kept on disk unless it is undecided or was disturbed."""
    calls: dict[str, Callable[..., Any]] = {name: region.run for name, region in regions.items()}
    key = _key(work)
    if key is None:
        choices.momentary()
        return _measured(work, calls, effort)
    with choices.locked(key):
        record = recall(work)  # of another process, meanwhile
        if record is not None and adopt(work, record):
            assert work.choice is not None
            return work.choice
        choice = _measured(work, calls, effort)
        if not choice.disturbed and (choice.reason == _untimed() or choice.leaves_eager):
            choices.store(key, _record(work, choice, effort))
        else:
            choices.momentary()
    return choice


def _measured(work: Work, calls: Mapping[str, Callable[..., Any]], effort: str) -> Choice:
    """The choice by results and times; `calls` are the candidates, the one to choose unmeasured first."""
    with measure.as_compiled_code_runs(work.device):
        found = checked(work, calls, _MEMORY_SHARE)
        dropped = tuple((name, each.detail) for name, each in found.items() if each.verdict is Verdict.DIFFERENT)
        kept = {name: call for name, call in calls.items() if found[name].verdict is not Verdict.DIFFERENT}
        if not kept:
            return Choice(EAGER, reason="no candidate gives the operators' results", dropped=dropped)
        check = _of_all({name: str(found[name]) for name in kept})
        untimed = _untimed()
        if untimed is not None:
            choice = Choice(next(iter(kept)), reason=untimed)
        else:
            like = [node.meta["val"] for node in work.arguments]
            alternatives = [each.name for each in work.candidates if each.spec.overrides != NO_OVERRIDES]
            choice = fastest(work.original(), kept, like, work.device, BUDGETS[effort], alternatives)
    return replace(choice, check=check, dropped=dropped)


def _of_all(said: Mapping[str, str]) -> str:
    """What is said of each candidate, by its name unless the same is said of all."""
    alike = {*said.values()}
    return alike.pop() if len(alike) == 1 else "; ".join(f'"{name}": {words}' for name, words in said.items())


def _record(work: Work, choice: Choice, effort: str) -> choices.Record:
    keys = {each.name: _source_key(each) for each in work.candidates}
    return choices.Record(
        region=work.region.name,
        device=_device(work),
        effort=effort,
        created=records.now(),
        choice=asdict(choice),
        offered=work.offered,
        sources={name: key for name, key in keys.items() if key is not None},
    )


def _key(work: Work) -> str | None:
    """The key of a region's choice; None where its sources are incomplete, hence nothing to choose from."""
    source = _source_key(work.candidates[0])
    return None if source is None else choices.key_of({"source": source, **_depends_on(work)})


def _source_key(candidate: Candidate) -> str | None:
    """A hash of all that a candidate is built from but the compilers: programs and schedules as text, CPU, and torch's version."""
    try:
        return choices.key_of({"sources": [source_key(source) for source in candidate.sources]})
    except BuildError:
        return None


def _depends_on(work: Work) -> dict[str, Any]:
    """What else the times depend on, as plain values."""
    values = [node.meta["val"] for node in work.arguments]
    return {
        "operators": repr(work.kind),
        "arguments": [f"{value.dtype}{list(value.shape)}{list(value.stride())}" for value in values],
        "device": _device(work),
        "threads": torch.get_num_threads(),
        "precision": precision(),
        "versions": [torch.__version__, torch.version.cuda],
        "untimed": _untimed(),
    }


def precision() -> list[str]:
    """How exact float32 convolutions and products are asked to be on CUDA."""
    return [str(torch._C._get_fp32_precision_getter("cuda", kind)) for kind in ("conv", "matmul")]


def _device(work: Work) -> str:
    """The device in words; which CPU it is, is in the key of the source."""
    assert work.generated is not None
    facts = work.generated.facts
    return f"{facts.name}, {facts.cores} cores" if facts.cores else f"{facts.name}, {facts.arch}"
