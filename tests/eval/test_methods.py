from __future__ import annotations

from dataclasses import replace

import pytest

from snapkv_gguf import SnapKV
from snapkv_gguf.eval import methods
from snapkv_gguf.eval.methods import expand, parse


def test_named_methods() -> None:
    assert parse("full", 512) is None
    assert parse("snapkv", 512) == SnapKV(512)
    assert parse("paper", 0.25) == SnapKV.paper(0.25)
    assert parse("no-pooling", 512) == SnapKV(512, kernel=1)
    assert parse("first-recent", 512) == SnapKV(512, recent=0, rule="first-recent")
    for rule in ("shared", "random", "h2o"):
        assert parse(rule, 512) == SnapKV(512, rule=rule)  # type: ignore[arg-type]
    assert set(methods.DESCRIPTIONS) == set(methods.NAMES)


def test_settings_by_name() -> None:
    assert parse("w16-max21-r0.5", 512) == SnapKV(512, 16, 21, "max", 0.5)
    assert parse("w32-avg5-r0", 1024) == SnapKV.paper()
    assert parse("w8-max1-r64", 128) == SnapKV(128, 8, 1, "max", 64)
    assert parse("w16-max21-r0.5-shared", 512) == SnapKV(512, rule="shared")


@pytest.mark.parametrize("name", ["w16", "w16-max21", "w16-min3-r0", "max21-r0", "w16-max21-r", "w16-max21-r0.5.5", ""])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match=f"method '{name}': must be one of full, snapkv"):
        parse(name, 512)


def test_budgets_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="budget=8: must be more than window=16"):
        expand(["full", "snapkv"], [8])


def test_every_method_with_every_budget() -> None:
    found = expand(["snapkv", "full", "random"], [256, 0.5])
    assert list(found) == [("full", 0), ("snapkv", 256), ("snapkv", 0.5), ("random", 256), ("random", 0.5)]


def test_in_chunks() -> None:
    assert parse("snapkv+512", 1024) == SnapKV(1024, chunk=512)
    assert parse("snapkv+budget", 1024) == SnapKV(1024, chunk=1024)
    assert parse("paper+256:probe0", 128) == replace(SnapKV.paper(128), chunk=256, probe=0)
    assert parse("random+256:probe64:packed", 128) == SnapKV(
        128, rule="random", chunk=256, probe=64, positions="packed"
    )
    assert parse("w32-avg5-r0+256:question", 128) == replace(SnapKV.paper(128), chunk=256, probe=methods.QUESTION)
    assert methods.cells(SnapKV(1024, chunk=512)) == 1536
    assert methods.cells(SnapKV(1024)) == 0


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("full+512", "of another method than 'full'"),
        ("snapkv+512+512", "of another method than 'snapkv\\+512'"),
        ("snapkv+", "must be one of"),
        ("snapkv+512:prob3", "must be one of"),
        ("snapkv+32", "the chunk must be more than the probe of 32 tokens"),
    ],
)
def test_chunks_that_are_none(name: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse(name, 512)


def test_chunks_need_a_budget_in_cells() -> None:
    with pytest.raises(ValueError, match=r"needs a budget in cells, not 0\.5"):
        parse("snapkv+512", 0.5)
