"""Chooses for a region between generated code and its own operators by running both on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

import torch
from torch import fx

from fusepass import measure
from fusepass.choice import EAGER, GENERATED, LEAST_SPEEDUP, Choice
from fusepass.codegen import choices
from fusepass.codegen.generate import anchor_traffic, traffic
from fusepass.config import current
from fusepass.patterns.aliasing import is_view
from fusepass.runtime import FusedRegion
from fusepass.work import Work

_ROUNDS = 100
_LEAST_ROUNDS = 3
_CLEAR_OPERATORS = 4
_CLEAR_TRAFFIC = 4.0
_MEMORY_SHARE = 0.25  # of what is free may be taken for inputs and results

# Operators for which any whole number is an argument as good as another: indices and divisors are none.
_SAFE_WITH_INTEGERS = frozenset({
    "_to_copy", "abs", "add", "amax", "amin", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "clamp",
    "clone", "eq", "ge", "gt", "le", "logical_and", "logical_not", "logical_or", "lt", "maximum", "minimum", "mul",
    "ne", "neg", "relu", "sign", "sub", "sum", "where",
})  # fmt: skip


@dataclass(frozen=True)
class _Budget:
    """Seconds for the rounds of one region; `most` for the fewest rounds where these take longer."""

    seconds: float
    most: float


_BUDGETS = {"fast": _Budget(0.03, 0.3), "max": _Budget(1.0, 10.0)}


def choose(work: Work, region: FusedRegion) -> None:
    """Decide whether `region` or the operators it stands for serve calls from now on, as ``Config.tune`` says.

    What was measured before on the same kind of device comes from the disk. The user's tensors are not touched. Generated
    code that fails gives ``work.reason``.
    """
    config = current()
    if config.tune == "off":
        return
    reason = _obstacle(work, config.tune)
    if reason is not None:
        work.choice = Choice(reason=reason)
        return
    try:
        work.choice = _recorded_or_measured(work, region, config.tune)
    except _GeneratedCodeFails as error:
        if config.debug:
            raise
        work.reason = str(error)
    except Exception as error:  # out of memory, or an operator that fails for numbers such as these
        if config.debug:
            raise
        what = next(iter(str(error).splitlines()), "")
        work.choice = Choice(reason=f"trying it failed with {type(error).__name__}: {what}")


class _GeneratedCodeFails(Exception):
    """Generated code raised where the region's own operators did not."""


def _obstacle(work: Work, effort: str) -> str | None:
    """Why nothing is measured for this region; None where it is."""
    inputs = [node.meta["val"] for node in work.arguments]
    results = [node.meta["val"] for node in work.region.outputs]
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and times differ from run to run"
    if work.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    if not all(value.numel() for value in (*inputs, *results)):
        return "a tensor has no elements"
    unsafe = _unsafe_with_integers(work.graph.graph)
    if unsafe is not None:
        return f"{unsafe} needs particular whole numbers"
    if effort == "fast" and _is_clear(work):
        return "the cost model leaves no doubt"
    needed = sum(map(measure.nbytes, inputs)) + 2 * sum(map(measure.nbytes, results))
    if needed > _MEMORY_SHARE * measure.free_bytes(work.device):
        return "its tensors would take too much of the memory"
    budget, traffic = _BUDGETS[effort], work.region.bytes_before + work.region.bytes_after
    if work.generated is not None and traffic / work.generated.facts.bandwidth > budget.most:
        return f"one run takes more than {budget.most:g} s"
    return None


def _unsafe_with_integers(graph: fx.Graph) -> str | None:
    """An operator that takes whole numbers as more than numbers; None where there is none."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype.is_floating_point or value.dtype is torch.bool:
            continue
        for user in node.users:
            packet = str(getattr(user.target, "overloadpacket", user.target)).removeprefix("aten.")
            if user.op == "call_function" and packet not in _SAFE_WITH_INTEGERS and not is_view(user.target):
                return packet
    return None


def _is_clear(work: Work) -> bool:
    """Whether generated code replaces several operators and moves so much less that measuring would be a waste."""
    assert work.generated is not None
    program = work.generated.program
    moved = anchor_traffic(program) + sum(sum(traffic(program, kernel)) for kernel in program.kernels)
    operators = sum(isinstance(node.target, torch._ops.OpOverload) for node in work.region.nodes)
    return operators >= _CLEAR_OPERATORS and work.region.bytes_before >= _CLEAR_TRAFFIC * moved


def _recorded_or_measured(work: Work, region: FusedRegion, effort: str) -> Choice:
    key = choices.key_of(_depends_on(work))
    found = _recorded(key, effort)
    if found is not None:
        return found
    with choices.locked(key):
        found = _recorded(key, effort)  # by another process, meanwhile
        if found is not None:
            return found
        inputs = [node.meta["val"] for node in work.arguments]
        choice = _measured(work.original(), {GENERATED: region.run}, inputs, work.device, _BUDGETS[effort])
        if choice.reason is None:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            record = choices.Record(work.region.name, _device(work), effort, now, asdict(choice))
            choices.store(key, record)
        return choice


def _recorded(key: str, effort: str) -> Choice | None:
    record = choices.lookup(key)
    if record is None or (effort == "max" and record.effort != "max"):
        return None
    return replace(Choice.from_json(dict(record.choice)), recorded=True)


def _depends_on(work: Work) -> dict[str, Any]:
    """All that the times depend on, as plain values; the library's key covers program, compiler, CPU and torch."""
    assert work.library is not None
    values = [node.meta["val"] for node in work.arguments]
    return {
        "library": work.library.parent.name,
        "operators": work.graph.code,
        "arguments": [f"{value.dtype}{list(value.shape)}{list(value.stride())}" for value in values],
        "device": _device(work),
        "threads": torch.get_num_threads(),
        "precision": [torch._C._get_fp32_precision_getter("cuda", kind) for kind in ("conv", "matmul")],
        "torch": torch.__version__,
    }


def _device(work: Work) -> str:
    """The device in words; which CPU it is, is in the library's key."""
    assert work.generated is not None
    facts = work.generated.facts
    return f"{facts.name}, {facts.cores} cores" if facts.cores else f"{facts.name}, {facts.arch}"


def _measured(
    eager: Callable[..., Any],
    generated: Mapping[str, Callable[..., Any]],
    like: Sequence[torch.Tensor],
    device: torch.device,
    budget: _Budget,
) -> Choice:
    """Run the candidates in turn on made-up inputs; `generated` holds one or more ways to compute what `eager` does."""
    with measure.as_compiled_code_runs(device):
        inputs = measure.made_up(like, device)
        clock = measure.clock(device)
        calls = {name: _bound(call, inputs) for name, call in {EAGER: eager, **generated}.items()}
        clock(calls[EAGER])  # warms up
        first = clock(calls[EAGER])
        if _LEAST_ROUNDS * (1 + len(generated)) * first > budget.most:
            return Choice(reason=f"one run takes {first:.2g} s")
        for name in generated:
            try:
                clock(calls[name])
            except Exception as error:
                raise _GeneratedCodeFails(f"its first run failed: {error}") from error
        samples = measure.in_turn(calls, clock, budget.seconds, least=_LEAST_ROUNDS, most=_ROUNDS)
    times = {name: measure.typical(values) for name, values in samples.items()}
    best = min(generated, key=times.__getitem__)
    speedup = times[EAGER] / max(times[best], 1e-9)
    return Choice(best if speedup > LEAST_SPEEDUP else EAGER, tuple(times.items()), speedup)


def _bound(call: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Callable[[], object]:
    return lambda: call(*inputs)
