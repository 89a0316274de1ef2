"""Rendered CUDA kernels on a device, held against the reference interpreter, twice for the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fusepass.codegen.build import build_all, load
from fusepass.codegen.detect import device_facts
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.program import Buffer, Program, Role
from fusepass.codegen.render import render
from fusepass.codegen.schedule_convolution import pieces_on, serves
from fusepass.codegen.schedule_product import schedule_product
from fusepass.codegen.schedule_product.tiles import TILINGS, Tiling
from fusepass.codegen.source import Source
from fusepass.errors import BuildError
from tests.support import convolutions, kernels, products
from tests.support.interpret import STORAGE, interpret
from tests.support.numpy_ops import Array
from tests.unit.test_render_cuda import assert_close, inputs_of

SAMPLES = {**kernels.SAMPLES, **convolutions.SAMPLES, **products.SAMPLES}

pytestmark = pytest.mark.gpu

_MARGIN = 256  # bytes around every buffer that must stay as they are
_NOISE = 0x7F

Libraries = dict[tuple[str, bool], tuple[Source, Path | BuildError]]


class _DeviceBuffer:
    """A buffer's memory on the device, with margins, `shift` elements past a multiple of 16 bytes."""

    def __init__(self, buffer: Buffer, value: Array | None, shift: int) -> None:
        self.buffer = buffer
        nbytes = buffer.extent * buffer.dtype.nbytes
        self.raw = torch.full((2 * _MARGIN + nbytes + 16,), _NOISE, dtype=torch.uint8, device="cuda")
        self.start = _MARGIN + shift * buffer.dtype.nbytes
        self.stop = self.start + nbytes
        if value is not None:
            self.raw[self.start : self.stop] = torch.from_numpy(value.view(np.uint8)).cuda()
        self.before = self.raw.clone()

    @property
    def pointer(self) -> int:
        return self.raw.data_ptr() + self.start

    def untouched_around(self) -> bool:
        same = self.raw == self.before
        if self.buffer.role in (Role.OUTPUT, Role.TEMP):
            same[self.start : self.stop] = True
        return bool(same.all())

    def value(self) -> Array:
        return self.raw[self.start : self.stop].cpu().numpy().view(STORAGE[self.buffer.dtype])


def _opened(program: Program, source: Source, path: Path | BuildError, *, replayed: bool = False) -> Callable[..., int]:
    """The entry of a built library; `replayed`: the one that launches a graph from its third call on."""
    if isinstance(path, BuildError):
        raise path
    entry = source.replay if replayed else source.entry
    assert entry is not None
    return load(path, entry, len(program.arguments))


def _run(program: Program, run: Callable[..., int], inputs: dict[str, Array], shift: int) -> dict[str, Array]:
    memory = {
        b.name: _DeviceBuffer(b, inputs.get(b.name), shift if b.role is Role.INPUT else 0) for b in program.arguments
    }
    stream = torch.cuda.current_stream().cuda_stream
    assert run(*(memory[b.name].pointer for b in program.arguments), stream) == 0
    torch.cuda.synchronize()
    for name, each in memory.items():
        assert each.untouched_around(), f"wrote outside {name}"
    return {name: memory[name].value() for name in program.outputs if name in memory}


def _suits(program: Program, facts: DeviceFacts) -> bool:
    """Whether the device has the instructions, and takes the pieces, that a sample's convolutions were made for."""
    for kernel in program.kernels:
        if isinstance(kernel.anchor, Convolution):
            if not serves(program, kernel, facts):
                return False
            if kernel.partials is not None and pieces_on(program, kernel, facts) != kernel.partials.pieces.size:
                return False
    return True


@pytest.fixture(scope="module")
def libraries(request: pytest.FixtureRequest) -> Libraries:
    """Every sample that a selected test wants, built for aligned and for unaligned inputs, in parallel."""
    facts = device_facts(torch.device("cuda"))
    items = (item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec"))
    wanted = {"team_softmax", *(item.callspec.params.get("name") for item in items)}
    programs = {name: make() for name, make in SAMPLES.items() if name in wanted}
    keys = [(name, aligned) for name in programs if _suits(programs[name], facts) for aligned in (True, False)]
    sources = [render(programs[name], facts, aligned=aligned) for name, aligned in keys]
    paths = build_all(sources)
    return {key: (source, path) for key, source, path in zip(keys, sources, paths, strict=True)}


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("name", SAMPLES)
def test_values(name: str, aligned: bool, libraries: Libraries) -> None:
    program = SAMPLES[name]()
    if (name, aligned) not in libraries:
        pytest.skip("made for another device")
    run = _opened(program, *libraries[name, aligned])
    inputs = inputs_of(program)
    first = _run(program, run, inputs, 0 if aligned else 1)
    again = _run(program, run, inputs, 0 if aligned else 1)
    assert_close(program, first, interpret(program, inputs))
    for output, value in first.items():
        np.testing.assert_array_equal(value.view(np.uint8), again[output].view(np.uint8))


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("tiling", [each for each in TILINGS if not each.runs], ids=products.tiling_id)
def test_values_of_each_tile_of_a_product(tiling: Tiling, aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusepass.codegen.schedule_product.TILINGS", (tiling,))
    facts = device_facts(torch.device("cuda"))
    made = [(case, products.generated(case)) for case in products.TILED.values()]
    served = [
        (case, program)
        for case, program in made
        if schedule_product(program.kernels[0], program, facts, aligned=aligned) is not None
    ]
    sources = [render(program, facts, aligned=aligned) for _, program in served]
    for (case, program), source, path in zip(served, sources, build_all(sources), strict=True):
        run = _opened(program, source, path)
        inputs = inputs_of(program)
        found = _run(program, run, inputs, 0 if aligned else 1)
        products.assert_close(case, program, found, interpret(program, inputs))


@pytest.mark.parametrize("name", ["layer_norm_shared", "team_layer_norm"])
@pytest.mark.invariant(24)
def test_capture_in_a_graph(name: str, libraries: Libraries) -> None:
    """A replayed graph reads the inputs anew."""
    program = SAMPLES[name]()
    run = _opened(program, *libraries[name, True])
    dtypes = {DType.F32: torch.float32, DType.I32: torch.int32}
    tensors = [torch.rand(b.extent, device="cuda").to(dtypes[b.dtype]) for b in program.arguments]
    pointers = [t.data_ptr() for t in tensors]
    run(*pointers, torch.cuda.current_stream().cuda_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert run(*pointers, torch.cuda.current_stream().cuda_stream) == 0
    tensors[0].normal_()
    graph.replay()
    torch.cuda.synchronize()
    x = tensors[0].view(program.buffer("x").shape).double()
    mean = tensors[[b.name for b in program.arguments].index("mean")].double()
    torch.testing.assert_close(mean, x.mean(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["chain", "chain_short"])
def test_replayed_kernels_see_what_the_one_before_wrote(name: str, libraries: Libraries) -> None:
    """Each reads all that the one before wrote, launched anew and from a graph, time after time over the same memory."""
    program = SAMPLES[name]()
    run = _opened(program, *libraries[name, True], replayed=True)
    memory = {b.name: torch.zeros(b.extent, device="cuda") for b in program.arguments}
    pointers = [memory[b.name].data_ptr() for b in program.arguments]
    steps = len(program.kernels)

    def expected() -> torch.Tensor:
        return (memory["x"].flip(0) if steps % 2 else memory["x"]) + steps

    def call() -> None:
        assert run(*pointers, torch.cuda.current_stream().cuda_stream) == 0

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for start in range(40):
        torch.arange(start, start + len(memory["x"]), out=memory["x"])
        (graph.replay if start % 2 else call)()
        torch.testing.assert_close(memory["y"], expected(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["chain_short", "team_softmax"])
def test_replayed_launches_of_several_threads_and_streams(name: str, libraries: Libraries) -> None:
    """Each with memory of its own, all at the same time, of which there are more than places for graphs."""
    program = SAMPLES[name]()
    run = _opened(program, *libraries[name, True], replayed=True)
    wrong: list[str] = []

    def calls(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            memory = {b.name: torch.zeros(b.nbytes // 4, device="cuda") for b in program.arguments}
            x, y = (memory[each].view(program.buffer(each).shape) for each in ("x", "y"))
            pointers = [memory[b.name].data_ptr() for b in program.arguments]
            for iteration in range(30):
                x.fill_(number).view(-1)[iteration] += 1 + iteration
                status = run(*pointers, stream.cuda_stream)
                right = x + len(program.kernels) if name == "chain_short" else x.softmax(1)
                if status != 0 or not torch.allclose(y, right, rtol=1e-5, atol=1e-9):
                    wrong.append(f"thread {number}, turn {iteration}, status {status}")

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_launches_on_two_streams_do_not_hold_each_other_up(libraries: Libraries) -> None:
    """Blocks that wait for each other are started all or none, whatever else runs."""
    program = SAMPLES["team_softmax"]()
    run = _opened(program, *libraries["team_softmax", True])
    streams = [torch.cuda.Stream() for _ in range(2)]
    memory = [{b.name: torch.rand(b.nbytes // 4, device="cuda") for b in program.arguments} for _ in streams]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, tensors in zip(streams, memory, strict=True):
            pointers = [tensors[b.name].data_ptr() for b in program.arguments]
            assert run(*pointers, stream.cuda_stream) == 0
    torch.cuda.synchronize()
    for tensors in memory:
        x, y = (tensors[name].view(program.buffer(name).shape) for name in ("x", "y"))
        torch.testing.assert_close(y, x.softmax(1), rtol=1e-5, atol=1e-9)
