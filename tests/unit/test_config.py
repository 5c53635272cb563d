from __future__ import annotations

import dataclasses
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapkv_gguf import SnapKV


@pytest.mark.parametrize(
    ("fields", "error", "told"),
    [
        ({"budget": 16}, ValueError, ("budget=16", "window=16", "raise the budget")),
        ({"budget": 0}, ValueError, ("budget=0",)),
        ({"budget": -1024}, ValueError, ("budget=-1024",)),
        ({"budget": 2**30 + 1}, ValueError, ("budget=1073741825", "1073741824")),
        ({"budget": 1024.0}, ValueError, ("budget=1024.0", "share of the prompt", "budget=1024")),
        ({"budget": 0.0}, ValueError, ("budget=0.0",)),
        ({"budget": 1.0}, ValueError, ("budget=1.0",)),
        ({"budget": -0.5}, ValueError, ("budget=-0.5",)),
        ({"budget": math.nan}, ValueError, ("budget=nan",)),
        ({"budget": math.inf}, ValueError, ("budget=inf",)),
        ({"budget": True}, TypeError, ("budget=True", "bool")),
        ({"budget": "1024"}, TypeError, ("budget='1024'", "str")),
        ({"budget": None}, TypeError, ("budget=None",)),
        ({"window": 0}, ValueError, ("window=0", "between 1 and 4096")),
        ({"window": -3}, ValueError, ("window=-3",)),
        ({"window": 10**9, "budget": 2**31 - 1}, ValueError, ("window=1000000000", "4096")),
        ({"window": 16.0}, TypeError, ("window=16.0", "float")),
        ({"window": True}, TypeError, ("window=True",)),
        ({"window": "16"}, TypeError, ("window='16'",)),
        ({"kernel": 4}, ValueError, ("kernel=4", "odd")),
        ({"kernel": 0}, ValueError, ("kernel=0",)),
        ({"kernel": -5}, ValueError, ("kernel=-5",)),
        ({"kernel": 2**30 + 1}, ValueError, ("kernel=1073741825", "1073741824")),
        ({"kernel": 5.0}, TypeError, ("kernel=5.0",)),
        ({"kernel": False}, TypeError, ("kernel=False",)),
        ({"pool": "mean"}, ValueError, ("pool='mean'", "'max' or 'avg'")),
        ({"pool": None}, TypeError, ("pool=None",)),
        ({"recent": 15}, ValueError, ("recent=15", "window=16")),
        ({"recent": 2**30, "budget": 0.5}, ValueError, ("recent=1073741824", "less than 1073741824")),
        ({"recent": -1}, ValueError, ("recent=-1",)),
        ({"recent": 1024}, ValueError, ("recent=1024", "budget=1024", "lower it")),
        ({"recent": 1.0}, ValueError, ("recent=1.0", "share of the budget")),
        ({"recent": -0.1}, ValueError, ("recent=-0.1",)),
        ({"recent": math.nan}, ValueError, ("recent=nan",)),
        ({"recent": "half"}, TypeError, ("recent='half'",)),
        ({"recent": True}, TypeError, ("recent=True",)),
    ],
)
def test_wrong_values_are_refused(fields: dict[str, Any], error: type[Exception], told: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        SnapKV(**fields)
    for text in told:
        assert text in str(caught.value)


@given(
    budget=st.one_of(st.integers(2, 5000), st.floats(0.001, 0.999)),
    window=st.integers(1, 64),
    kernel=st.integers(0, 20).map(lambda k: 2 * k + 1),
    recent=st.one_of(st.just(0), st.integers(1, 5000), st.floats(0, 0.999999)),
    n=st.integers(1, 10000),
)
def test_resolved_settings_are_valid(
    budget: int | float, window: int, kernel: int, recent: int | float, n: int
) -> None:
    try:
        config = SnapKV(budget=budget, window=window, kernel=kernel, recent=recent)
    except ValueError:
        return
    cells = config.resolve(n)
    assert 1 <= cells.window <= cells.recent < cells.budget
    if isinstance(budget, int):
        assert cells.budget == budget
    elif n > max(window, recent if isinstance(recent, int) else 0):
        assert cells.budget <= n
    if isinstance(recent, float):
        assert cells.recent <= max(window, recent * cells.budget)


def test_shares() -> None:
    half = SnapKV(budget=0.25, window=16, recent=0.5).resolve(4000)
    assert (half.budget, half.window, half.recent) == (1000, 16, 500)
    # 0.07 * 100 is 7.000000000000001
    assert SnapKV(budget=0.07, window=2, recent=0).resolve(100).budget == 7
    # never less than one cell to select
    assert SnapKV(budget=0.1, window=16, recent=0).resolve(20).budget == 17
    assert SnapKV(budget=0.1, window=16, recent=64).resolve(100).budget == 65
    # the window is part of the recent cells
    assert SnapKV(budget=100, window=16, recent=0.01).resolve(1000).recent == 16


def test_numpy_numbers_become_pythons() -> None:
    config = SnapKV(budget=np.int64(512), window=np.int32(8), kernel=np.uint8(5), recent=np.float32(0.5))  # type: ignore[arg-type]
    assert config == SnapKV(budget=512, window=8, kernel=5, recent=0.5)
    assert [type(value) for value in dataclasses.astuple(config)[:6]] == [int, int, int, str, float, str]
    assert type(SnapKV(chunk=np.int64(512), probe=np.int32(8)).chunk) is int  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(config)) == config


def test_chunks() -> None:
    config = SnapKV(chunk=512, probe="Who?", positions="packed")
    assert config.resolve(4000).positions == "packed"
    assert SnapKV(budget=0.001, window=16, recent=0, positions="packed").resolve(100).budget == 18
    for settings, match in (
        ({"chunk": 0}, "chunk=0: must be between 1"),
        ({"chunk": 1.5}, "must be a number of tokens"),
        ({"chunk": True}, "must be a number of tokens"),
        ({"probe": -1}, r"probe=-1: must be between 0 \(none\) and 4096"),
        ({"probe": 4097}, "try 32"),
        ({"probe": "\ud800"}, "is no text that can be encoded"),
        ({"probe": ""}, "must be a text, or a number of tokens, 0 for none"),
        ({"probe": 0.5}, "a number of tokens .int. or a text"),
        ({"positions": "paked"}, "positions='paked': must be 'true' or 'packed'"),
        ({"budget": 17, "recent": 0, "positions": "packed"}, "budget=17: must be at least window=16 and 2 more"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            SnapKV(**settings)  # type: ignore[arg-type]


def test_paper() -> None:
    config = SnapKV.paper(512)
    assert (config.budget, config.window, config.kernel, config.pool, config.recent) == (512, 32, 5, "avg", 0)


def test_coerce() -> None:
    assert SnapKV.coerce(None) is None
    assert SnapKV.coerce(False) is None
    assert SnapKV.coerce(True) == SnapKV()
    assert SnapKV.coerce(config := SnapKV(budget=99)) is config
    assert SnapKV.coerce({"budget": 99}) == config
    with pytest.raises(TypeError, match="unknown field bugdet; the fields are budget, window"):
        SnapKV.coerce({"bugdet": 99})
    with pytest.raises(TypeError, match="snapkv=1024: must be True, False"):
        SnapKV.coerce(1024)  # type: ignore[arg-type]


@pytest.mark.usefixtures("library")
def test_presets_are_the_librarys() -> None:
    from snapkv_gguf import _capi

    for config, params in ((SnapKV(), _capi.default_params()), (SnapKV.paper(), _capi.paper_params())):
        ours, theirs = (
            {name: getattr(p, name) for name, *_ in _capi.Params._fields_}
            for p in (_capi.Params.of(config.resolve(4096)), params)
        )
        theirs["n_recent"] = theirs["n_recent"] or theirs["n_window"]  # 0 stands for the window
        assert ours == theirs
        assert _capi.params_check(params) == ""


@pytest.mark.usefixtures("library")
def test_the_largest_values_are_the_librarys() -> None:
    from snapkv_gguf import _capi

    for config in (
        SnapKV(budget=2**30),
        SnapKV(kernel=2**30 - 1),
        SnapKV(budget=2**30, recent=2**30 - 1),
        SnapKV(budget=0.5, recent=2**30 - 1),
        SnapKV(budget=4097, window=4096),
    ):
        assert _capi.params_check(_capi.Params.of(config.resolve(1000))) == ""
    for changed in ({"n_budget": 2**30 + 1}, {"n_kernel": 2**30 + 1}, {"n_window": 4097}):
        params = _capi.default_params()
        for name, value in changed.items():
            setattr(params, name, value)
        assert _capi.params_check(params) != ""


def test_the_makefile_sets_what_the_documentation_says() -> None:
    root = Path(__file__).parents[2]
    told = re.findall(
        r"^\| `(\w+)` .* set by the Makefile ", (root / "docs" / "environment.md").read_text(), re.MULTILINE
    )
    assert "SNAPKV_REQUIRE_LIB" in told
    for name in told:
        assert f"\nexport {name} := " in (root / "Makefile").read_text()
