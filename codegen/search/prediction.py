"""How long a candidate takes by the cost models, found before any of it is rendered or built."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import Generated, anchor_traffic, traffic
from fusepass.codegen.ir.program import ANCHOR_TARGETS, CONVERSION_TARGET, Kernel, Program

_LAUNCH = 2.5e-6  # seconds


@dataclass(frozen=True)
class Prediction:
    """Seconds of one run on a GPU; `least` where a kernel has no estimate, so that it may well take several times as long."""

    seconds: float
    least: bool


def predicted(made: Generated, products: int) -> Prediction:
    """How long `made` takes: its kernels by their families' estimates, and the library's calls.

    What has no estimate, the library's calls among it, takes what tensor cores or memory need at the least.

    Args:
        products: floating-point operations of the region's convolution or matrix product, 0 where it has none.

    Raises `ScheduleError` where a kernel does not fit the device.
    """
    program, facts = made.program, made.facts
    estimates = [(kernel, _estimate(kernel, program, facts)) for kernel in program.kernels]
    seconds = sum(
        estimate if estimate < inf else _least_seconds(kernel, program, facts, products)
        for kernel, estimate in estimates
    )
    calls = [call for call in program.calls if call.target in (*ANCHOR_TARGETS, CONVERSION_TARGET)]
    if calls:
        anchors = [call for call in calls if call.target in ANCHOR_TARGETS]
        rates = [_rate(facts, halves=program.buffer(call.result).dtype.is_half, tf32=call.tf32) for call in anchors]
        multiplying = products / min(rates) if rates else 0.0
        seconds += len(calls) * _LAUNCH + max(multiplying, anchor_traffic(program) / facts.bandwidth)
    return Prediction(seconds, any(estimate == inf for _, estimate in estimates))


def _estimate(kernel: Kernel, program: Program, facts: DeviceFacts) -> float:
    from fusepass.codegen.render.cuda.families import taking  # with all writers, which nobody needs who generates C++

    return min(family.estimate(kernel, program, facts) for family in taking(kernel, program))


def _least_seconds(kernel: Kernel, program: Program, facts: DeviceFacts, products: int) -> float:
    halves = any(program.buffer(name).dtype.is_half for name in kernel.reads)
    multiplying = products / _rate(facts, halves=halves, tf32=True)
    return _LAUNCH + max(multiplying, sum(traffic(program, kernel)) / facts.bandwidth)


def _rate(facts: DeviceFacts, *, halves: bool, tf32: bool) -> float:
    """Floating-point operations of a convolution or product in a second, at the most."""
    rates = facts.machine.rates
    products = rates.group_products if facts.warp_groups else rates.warp_products
    return facts.multiprocessors * (products.halves if halves else products.tf32 if tf32 else rates.library_float32)
