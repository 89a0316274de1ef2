"""Which library serves which sizes of a region: what is built, what is shared, and when no more is built."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from fusepass import config
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms, TooManyBuilds
from fusepass.codegen.generate import Generated
from fusepass.codegen.ir.program import Program
from fusepass.errors import BuildError
from tests.support import kernels as k

H200 = DeviceFacts.h200()
CPU = DeviceFacts.cpu(cores=2)


def texts_of(make: Callable[[int], Program], sizes: range, facts: DeviceFacts) -> list[str]:
    """The sources that the sizes run, one after another."""
    forms, texts = Forms(), []
    for size in sizes:
        forms.next_round()
        texts.append(forms.shared(Generated(make(size), facts)).source.text)
    return texts


@pytest.mark.parametrize(
    ("make", "most"),
    [
        pytest.param(lambda n: k.affine(n * 64), 2, id="pointwise"),
        pytest.param(lambda n: k.layer_norm(2 * n, 64, with_gelu=True), 3, id="layer norm"),
        pytest.param(lambda n: k.channel_bias_gelu(2, n, 49), 4, id="bias"),
        pytest.param(lambda n: k.softmax_rows(8, n), 16, id="softmax"),
        pytest.param(lambda n: k.softmax_channels(2, 16, n), 8, id="outer softmax"),
    ],
)
def test_on_a_cpu_lengths_to_512_need_few_libraries(make: Callable[[int], Program], most: int) -> None:
    assert len(set(texts_of(make, range(1, 513, 3), CPU))) <= most


@pytest.mark.parametrize(
    ("make", "most"),
    [
        pytest.param(lambda n: k.affine(n * 64), 4, id="pointwise"),
        pytest.param(lambda n: k.layer_norm(2 * n, 64, with_gelu=True), 3, id="layer norm"),
        pytest.param(lambda n: k.channel_bias_gelu(2, n, 49), 10, id="bias"),
        pytest.param(lambda n: k.softmax_rows(8, n), 16, id="softmax"),
    ],
)
def test_on_a_gpu_lengths_to_512_need_few_libraries(make: Callable[[int], Program], most: int) -> None:
    assert len(set(texts_of(make, range(1, 513, 3), H200))) <= most


def test_the_first_size_has_a_library_of_its_own() -> None:
    forms, program = Forms(), k.layer_norm(40, 64)
    forms.next_round()
    first = forms.shared(Generated(program, H200))
    assert (first.source.numbers, first.sizes) == (None, "")
    forms.next_round()
    assert forms.shared(Generated(program, H200)).source == first.source  # the same again, by another signature
    other = forms.shared(Generated(k.layer_norm(48, 64), H200))
    assert other.source.numbers is not None
    assert other.sizes.startswith("for several sizes: size_0 = ")


def test_a_library_of_its_own_is_rendered_once() -> None:
    made = Generated(k.layer_norm(40, 64), H200)
    assert Forms().shared(made) is made  # which remembers its source


def test_alternatives_of_one_signature_are_not_other_sizes() -> None:
    forms = Forms()
    forms.next_round()
    made = [forms.shared(Generated(k.layer_norm(rows, 64), H200)) for rows in (40, 48)]
    assert [each.source.numbers for each in made] == [None, None]


def test_no_more_libraries_than_allowed() -> None:
    forms = Forms()
    with config.override(max_builds=2):
        for rows in (1024, 1000, 992):
            forms.next_round()
            forms.shared(Generated(k.softmax_rows(rows, 3000), H200))
        forms.next_round()
        with pytest.raises(TooManyBuilds, match=r"more than 2 libraries for its sizes \(option max_builds\)"):
            forms.shared(Generated(k.softmax_rows(1000, 7), H200))


def test_unaligned_inputs_share_libraries_too() -> None:
    forms, sources = Forms(), []
    for rows in (40, 48, 56, 64):
        forms.next_round()
        sources.append(forms.shared(Generated(k.layer_norm(rows, 64), H200)).unaligned())
    assert sources[0].numbers is None
    assert len({source.text for source in sources[1:]}) == 1
    assert len({source.numbers for source in sources[1:]}) == 3
    odd = forms.shared(Generated(k.layer_norm(72, 63), H200))
    with config.override(max_builds=1), pytest.raises(BuildError, match="max_builds"):
        odd.unaligned()


def test_saved_forms_serve_what_their_texts_can_become_and_build_nothing() -> None:
    """As an artifact keeps them: by JSON, and for sizes that come."""
    forms = Forms(several=True)
    for rows in (40, 41, 57):
        forms.next_round()
        forms.shared(Generated(k.layer_norm(rows, 64), H200))
    assert [source.numbers is None for source in forms.sources] == [True, True, False], (
        "for the first size, aligned or not"
    )
    saved = Forms.saved(json.loads(json.dumps(forms.data())))
    texts = {source.text for source in forms.sources}
    for rows in (40, 43, 57):
        saved.next_round()
        assert saved.shared(Generated(k.layer_norm(rows, 64), H200)).source.text in texts
    with pytest.raises(TooManyBuilds, match="no library for layer_norm at these sizes"):
        saved.shared(Generated(k.layer_norm(43, 80), H200))
    with pytest.raises(TooManyBuilds, match="a library for each size: blocks that share rows"):
        Forms(several=True).shared(Generated(k.in_teams(k.layer_norm(7, 20_000), 3, 3), H200))
