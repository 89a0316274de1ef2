"""Options: defaults, environment, overrides, and what is said about values that are not allowed."""

from __future__ import annotations

import contextlib
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from fusepass.config import (
    ALL,
    EFFORTS,
    METHODS,
    TRAINING,
    Algebra,
    Config,
    Options,
    Rounding,
    cache_directory,
    current,
    override,
)


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FUSEPASS_"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_the_cache_lies_in_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert current().cache_dir == Path("/some/cache/fusepass")


@pytest.mark.parametrize("relative", ["cache", "./cache", "../cache", ".", "~/cache"])
def test_a_relative_directory_is_no_users_cache_directory(monkeypatch: pytest.MonkeyPatch, relative: str) -> None:
    """The specification says so: what is kept must not depend on the working directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", relative)
    assert current().cache_dir == Path.home() / ".cache" / "fusepass"


def test_the_cache_directory_alone_is_that_of_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_directory() == current().cache_dir == Path.home() / ".cache" / "fusepass"
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", "~/there")
    assert cache_directory() == current().cache_dir == Path.home() / "there"
    with override(cache_dir="relative"):
        assert cache_directory() == current().cache_dir == Path.cwd() / "relative"


def test_defaults() -> None:
    config = current()
    assert config == Config()
    assert (config.debug, config.dump, config.disable, config.progress) == (False, None, frozenset(), None)
    assert config.cache_dir == Path.home() / ".cache" / "fusepass"
    assert config.jobs == len(os.sched_getaffinity(0))
    assert (config.max_signatures, config.max_builds) == (512, 16)
    assert config.tune == "fast"


@pytest.mark.parametrize(
    ("variable", "text", "option", "value"),
    [
        ("FUSEPASS_DEBUG", "1", "debug", True),
        ("FUSEPASS_DEBUG", "Yes", "debug", True),
        ("FUSEPASS_DEBUG", "off", "debug", False),
        ("FUSEPASS_DEBUG", "", "debug", False),
        ("FUSEPASS_DUMP", "/some/where", "dump", Path("/some/where")),
        ("FUSEPASS_DISABLE", "1", "disable", {ALL}),
        ("FUSEPASS_DISABLE", "all", "disable", {ALL}),
        ("FUSEPASS_DISABLE", "0", "disable", set()),
        ("FUSEPASS_DISABLE", "norm, pool", "disable", {"norm", "pool"}),
        ("FUSEPASS_ALGEBRA", "off", "algebra", Algebra.OFF),
        ("FUSEPASS_ALGEBRA", "Finite", "algebra", Algebra.FINITE),
        ("FUSEPASS_ROUNDING", "Eager", "rounding", Rounding.EAGER),
        ("FUSEPASS_CACHE_DIR", "/some/cache", "cache_dir", Path("/some/cache")),
        ("FUSEPASS_CACHE_DIR", "~/cache", "cache_dir", Path.home() / "cache"),
        ("FUSEPASS_JOBS", "3", "jobs", 3),
        ("FUSEPASS_WORKERS", "0", "workers", 0),
        ("FUSEPASS_WORKERS", "3", "workers", 3),
        ("FUSEPASS_WORKERS", "Auto", "workers", None),
        ("FUSEPASS_TUNE", "Max", "tune", "max"),
        ("FUSEPASS_TUNE_BUDGET", "2.5", "tune_budget", 2.5),
        ("FUSEPASS_TUNE_BUDGET", "inf", "tune_budget", math.inf),
        ("FUSEPASS_CUDA_GRAPHS", "Auto", "cuda_graphs", "auto"),
        ("FUSEPASS_CUDA_GRAPHS", "off", "cuda_graphs", False),
        ("FUSEPASS_CUDA_COMPILER", "NVRTC", "cuda_compiler", "nvrtc"),
        ("FUSEPASS_TRAINING", "Eager", "training", "eager"),
        ("FUSEPASS_METHODS", "original", "methods", "original"),
        ("FUSEPASS_MEMORY_BUDGET", "0.5", "memory_budget", 0.5),
    ],
)
def test_the_environment_sets_options_when_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, option: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(current(), option) == value
    monkeypatch.delenv(variable)
    assert current() == Config()


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("FUSEPASS_DEBUG", "maybe", "1, true, yes, on, 0, false, no, off"),
        ("FUSEPASS_ALGEBRA", "fast", "off, safe, finite"),
        ("FUSEPASS_JOBS", "0", "a whole number from 1 on"),
        ("FUSEPASS_JOBS", "-2", "a whole number from 1 on"),
        ("FUSEPASS_JOBS", "many", "a whole number from 1 on"),
        ("FUSEPASS_WORKERS", "-1", "a whole number from 0 on, or auto"),
        ("FUSEPASS_WORKERS", "some", "a whole number from 0 on, or auto"),
        ("FUSEPASS_TUNE", "much", "one of off, fast, max"),
        ("FUSEPASS_TUNE_BUDGET", "nan", "a number of seconds from 0 on, or inf"),
        ("FUSEPASS_TUNE_BUDGET", "-1", "a number of seconds from 0 on, or inf"),
        ("FUSEPASS_CUDA_GRAPHS", "always", "auto, 1, true"),
        ("FUSEPASS_TRAINING", "slow", "one of fused, eager"),
        ("FUSEPASS_DISABLE", "norm,,pool", "names of rules and patterns separated by commas"),
    ],
)
def test_a_bad_variable_is_named_with_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, allowed: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable} is '{text}'; allowed is: .*{allowed}"):
        current()


def test_an_override_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPASS_JOBS", "3")
    with override(jobs=5) as config:
        assert config.jobs == current().jobs == 5
    assert current().jobs == 3


def test_an_overridden_variable_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPASS_JOBS", "many")
    with override(jobs=5):
        assert current().jobs == 5


def test_overrides_nest_and_end_after_an_exception() -> None:
    with override(debug=True):
        with contextlib.suppress(KeyError), override(debug=False, max_signatures=2):
            assert (current().debug, current().max_signatures) == (False, 2)
            raise KeyError
        assert (current().debug, current().max_signatures) == (True, 512)
    assert not current().debug


def test_an_override_is_not_seen_by_other_threads() -> None:
    with override(debug=True), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(current).result().debug


@pytest.mark.parametrize("options", [{"jobs": 0}, {"max_signatures": 0}, {"max_builds": 0}])
def test_an_override_out_of_range_is_refused_and_not_kept(options: dict[str, int]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} is 0"), override(**options):
        pytest.fail("the block must not run")
    assert current() == Config()


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("cuda_graphs", "yes", "True, False, auto"), ("debug", 1, "True, False"), ("progress", 0, "True, False, None"),
        ("jobs", 1.5, "a whole number from 1 on"), ("workers", -1, "a whole number from 0 on, or None"), ("algebra", "fast", "off, safe, finite"), ("rounding", "never", "fused, eager"),
        ("tune", "slow", "off, fast, max"), ("training", True, "fused, eager"), ("methods", "all", "original, fused"), ("cuda_compiler", "gcc", "auto, nvcc, nvrtc"),
        ("disable", 3, "names of rules and patterns"), ("cache_dir", None, "a path"),
        ("dump", 3, "a path, or None"), ("memory_budget", 1.5, "a number from 0 to 1"), ("memory_budget", True, "a number from 0 to 1"),
        ("tune_budget", -1, "a number of seconds"), ("tune_budget", math.nan, "a number of seconds"), ("tune_budget", "5", "a number of seconds"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused_with_what_is_allowed(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{option} is {value!r}; allowed is") + f".*{allowed}"):
        Config(**{option: value})


def test_an_unknown_option_is_refused() -> None:
    with (
        pytest.raises(TypeError, match="unknown option max_signature; the options are debug"),
        override(max_signature=3),
    ):
        pytest.fail("the block must not run")


def test_an_override_takes_what_the_environment_takes() -> None:
    with override(disable="norm,pool", cache_dir="relative", dump="~/dump"):
        config = current()
    assert config.disable == {"norm", "pool"}
    assert config.cache_dir == Path.cwd() / "relative"
    assert config.dump == Path.home() / "dump"


def test_what_is_disabled_is_not_allowed() -> None:
    config = Config(disable=frozenset({"norm"}))
    assert config.fuses
    assert not config.allows("norm")
    assert config.allows("pool")


def test_all_disables_everything() -> None:
    config = Config(disable=frozenset({ALL}))
    assert not config.fuses
    assert not config.allows("pool")


def test_a_level_of_algebra_takes_in_those_before_it() -> None:
    assert current().algebra is Algebra.SAFE
    with override(algebra="finite") as config:
        assert [config.algebra.takes_in(level) for level in (Algebra.SAFE, Algebra.FINITE)] == [True, True]
    assert [Algebra.SAFE.takes_in(level) for level in (Algebra.SAFE, Algebra.FINITE)] == [True, False]
    with pytest.raises(ValueError, match="off, safe, finite"), override(algebra="unsafe"):
        pytest.fail("the block must not run")
    assert current() == Config()


def test_type_checkers_know_every_option_and_its_values() -> None:
    hints = get_type_hints(Options)
    assert list(hints) == [option.name for option in fields(Config)]
    for name, allowed in (("tune", EFFORTS), ("training", TRAINING), ("methods", METHODS), ("algebra", tuple(Algebra))):
        assert get_args(hints[name]) == allowed
    assert {*get_args(hints["rounding"])} == {*Rounding}
