"""``snapkv plan`` for every architecture, MLA, indexers and recurrent layers among them."""

from __future__ import annotations

from pathlib import Path

from allocated import allocated

from snapkv_gguf.plan import Engine, Planner

ENGINE = Engine(n_ubatch=128, swa_full=False)
TYPES = ("f16", "f16")


def test_every_architecture(arch_models: list[Path]) -> None:
    differ = {}
    for path in arch_models:
        with Planner(path, ENGINE) as planner:
            sizes = planner.sizes(1024, TYPES)
        real = allocated(path, 1024, ENGINE, TYPES)
        if [sizes.weights, sizes.kv, sizes.compute] != real:
            differ[path.stem] = (sizes, real)
    assert not differ
