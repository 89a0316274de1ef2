"""What is generated for every architecture of `ARCHITECTURES`: it takes what such a device has, and `tests.compile_cuda` compiles it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from benchmarks.layers import Workload
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.machine import ARCHITECTURES
from fusepass.codegen.render.cuda.families import HEADERS
from fusepass.codegen.source import Source
from tests import compile_cuda
from tests.golden_sources.digests import GROUPS, sources

_EVERY = 150  # a usual run looks at one of so many workloads for each architecture, at another one for each
_OTHERS = [arch for arch in ARCHITECTURES if arch != "sm_90"]  # for which all other tests generate
_WORKLOADS = [
    (group, workload) for group in GROUPS if group not in ("cpu", "sizes", "training") for workload in GROUPS[group][0]
]

_WGMMA = {
    "fp_wgmma.cuh", "fp_wgmma_places.cuh", "fp_wgmma_rows.cuh", "fp_wgmma_sparse.cuh", "fp_matmul_turns.cuh", "fp_barriers.cuh"
}  # fmt: skip


def _cases() -> Iterator[ParameterSet]:
    for number, (group, workload) in enumerate(_WORKLOADS):
        for place, arch in enumerate(_OTHERS):
            usual = number % _EVERY == place * _EVERY // len(_OTHERS)
            marks = [] if usual else [pytest.mark.slow]
            yield pytest.param(arch, group, workload, id=f"{arch}-{group}-{workload.name}", marks=marks)


@pytest.mark.parametrize(("arch", "group", "workload"), list(_cases()))
def test_sources_take_what_the_device_has(arch: str, group: str, workload: Workload) -> None:
    facts = DeviceFacts.described(arch)
    for _, made in sources(group, workload, facts):
        for source in made if isinstance(made, list) else ():
            _fits(source, facts)
            compile_cuda.keep(source)


def _fits(source: Source, facts: DeviceFacts) -> None:
    assert source.arch == facts.arch
    included = set(re.findall(r'#include "(.*)"', source.text))
    assert facts.warp_groups or not included & _WGMMA
    for bounds in re.findall(r"__launch_bounds__\((\d+)(?:, (\d+))?\)", source.text):
        assert int(bounds[0]) * int(bounds[1] or 1) <= facts.max_threads
    for name, nbytes in compile_cuda.dynamic_shared(source.text):
        assert nbytes <= facts.shared_bytes_per_block, name


def test_what_is_looked_for_is_a_header() -> None:
    assert {*HEADERS} >= _WGMMA


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_h200_is_one_of_the_described(arch: str) -> None:
    facts = DeviceFacts.described(arch)
    assert facts.warp_groups == (arch == "sm_90")
    assert facts.copies
    assert facts.tensor_cores
    assert (facts == DeviceFacts.h200()) == (arch == "sm_90")
