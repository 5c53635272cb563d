"""tools/kvpress/compare.py without torch: what it computes and writes, not the run itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest

from snapkv_gguf import SnapKV, tiny

_SCRIPT = Path(__file__).parents[2] / "tools" / "kvpress" / "compare.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvpress_compare", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("kvpress") / "m.gguf", tiny.Shape(weights="q4_0"))


def test_float32_weights_are_the_dequantized_ones(script: ModuleType, quantized: Path, tmp_path: Path) -> None:
    target = script.write_float32(quantized, tmp_path / "new" / "m.gguf")
    source, written = gguf.GGUFReader(quantized), gguf.GGUFReader(target)
    assert {tensor.tensor_type.name for tensor in source.tensors} == {"Q4_0", "F32"}
    assert [tensor.name for tensor in written.tensors] == [tensor.name for tensor in source.tensors]
    for old, new in zip(source.tensors, written.tensors, strict=True):
        assert new.tensor_type is gguf.GGMLQuantizationType.F32
        assert new.shape.tolist() == old.shape.tolist()
        assert np.array_equal(new.data, gguf.quants.dequantize(old.data, old.tensor_type))
    assert list(target.parent.iterdir()) == [target]


def test_float32_metadata_is_the_same(script: ModuleType, quantized: Path, tmp_path: Path) -> None:
    fields = [
        gguf.GGUFReader(quantized).fields,
        gguf.GGUFReader(script.write_float32(quantized, tmp_path / "m")).fields,
    ]
    old, new = [
        {name: (field.types, field.contents()) for name, field in found.items() if not name.startswith("GGUF.")}
        for found in fields
    ]
    assert new == old
    assert len(new["tokenizer.ggml.tokens"][1]) == 320


def test_float32_weights_are_written_once(script: ModuleType, quantized: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    target.write_bytes(b"there")
    assert script.write_float32(quantized, target).read_bytes() == b"there"


@pytest.mark.parametrize("budget", [33, 256, 512, 1024])
def test_ratio_gives_the_budget_exactly(script: ModuleType, budget: int) -> None:
    for n in range(budget + 1, budget + 4000):
        assert int(n * (1 - script.compression_ratio(n, budget))) == budget


def test_settings_are_those_of_the_paper(script: ModuleType) -> None:
    assert script.Settings().snapkv(512) == SnapKV.paper(512)


def test_rope_angles_are_multiplied_up(script: ModuleType) -> None:
    # base 16, 4 dimensions: the factor is 16 ** (-1/2) = 1/4, exact in float32
    assert script.rope_angles([0, 8, 3], 16.0, 4).tolist() == [[0, 0], [8, 2], [3, 0.75]]
    angles = script.rope_angles([2000], 100000.0, 64)
    exact = 2000 * 100000.0 ** (-np.arange(0, 64, 2) / 64)
    assert angles.dtype == np.float32
    assert 1e-5 < np.abs(angles - exact).max() < 1e-3


def test_overlap_leaves_the_window_out(script: ModuleType) -> None:
    # window 8, 9; chosen 0, 1, 2, 5 and 0, 2, 3, 4
    assert script.head_overlap([0, 1, 2, 5, 8, 9], [0, 2, 3, 4, 8, 9], window=2) == 0.5
    assert script.head_overlap([0, 1, 8, 9], [0, 1, 8, 9], window=2) == 1
    assert script.head_overlap([2, 3, 8, 9], [0, 1, 8, 9], window=2) == 0


def test_swapped_cells_are_measured_by_the_border(script: ModuleType) -> None:
    scores = np.array([9.0, 4.0, 3.0, 1.0])  # 0 and 1 are kept: the border is 4
    other = np.array([9.0, 3.5, 3.75, 1.0])  # 0 and 2: |4 - 3.5| and |3 - 3.75|
    window = [4, 5]
    kept, other_kept = np.array([0, 1, *window]), np.array([0, 2, *window])
    assert script.swapped(scores, other, kept, other_kept) == (0.75 / 4, 1 / 4)
    assert script.swapped(scores, other, kept, kept) == (0, 0)


def _pass(script: ModuleType, scores: list[float], kept: list[int]) -> Any:
    """One layer, two KV heads; the second keeps the first two of four cells."""
    return script.Pass(np.array([[[*kept, 4, 5], [0, 1, 4, 5]]]), np.array([[scores, [2.0, 2.0, 1.0, 1.0]]]))


def test_comparison_of_one_prompt(script: ModuleType) -> None:
    theirs = _pass(script, [9.0, 4.0, 3.0, 1.0], [0, 1])
    ours = _pass(script, [9.0, 3.5, 3.75, 1.0], [0, 2])
    found = script.compare(7, ("snapkv", "kvpress"), ours, theirs, window=2)
    assert (found.seed, found.budget, found.engine, found.other) == (7, 4, "snapkv", "kvpress")
    assert found.overlap == [[0.5, 1.0]]
    assert (found.n_swapped, found.n_chosen) == (1, 4)
    assert (found.error_swapped, found.gap_swapped) == (0.1875, 0.25)
    # relative errors: 0, 1/8, 1/4 and five zeros
    assert found.error_median == 0
    assert found.error_99 == pytest.approx(1 / 8 + 0.93 / 8)
    assert found.n_wrong_rule == 0


def test_sets_that_the_scores_do_not_explain_are_counted(script: ModuleType) -> None:
    wrong = _pass(script, [9.0, 4.0, 3.0, 1.0], [0, 2])
    assert script.n_wrong_rule(wrong, window=2) == 1
    # the first head's cells 0 and 1, the second's by the lower cell of equals
    assert script.n_wrong_rule(_pass(script, [9.0, 4.0, 3.0, 1.0], [0, 1]), window=2) == 0


def test_page(script: ModuleType) -> None:
    theirs = _pass(script, [9.0, 4.0, 3.0, 1.0], [0, 1])
    ours = _pass(script, [9.0, 3.5, 3.75, 1.0], [0, 2])
    sets = [
        script.compare(seed, pair, ours, theirs, window=2)
        for seed in (1, 2)
        for pair in (("snapkv-float32", "kvpress"), ("snapkv", "kvpress"))
    ]
    texts = {"kvpress": "It is 123456.", "snapkv-float32": "It is 123456.", "snapkv": "a | `b`\n12"}
    answers = [
        script.Answer(seed, budget, engine, "123456", text, "123456" in text)
        for seed in (1, 2)
        for budget in (0, 4)
        for engine, text in texts.items()
    ]
    page = script.markdown(
        {
            "command": "python tools/kvpress/compare.py --seeds 2",
            "versions": {"kvpress": "0.5.5"},
            "system": {"machine": {"cpus": 2, "cpu": "a CPU"}},
            "model": "m.gguf",
            "prompt_tokens": [6, 6],
            "budgets": [4],
            "settings": {"window": 2, "kernel": 1},
            "tokenizer_agrees": True,
            "rule_difference": 4e-16,
            "logits": [{"seed": 1, "engine": name, "difference": 0.25} for name in ("snapkv-float32", "snapkv")],
            "sets": [vars(one) for one in sets],
            "answers": [vars(one) for one in answers],
            "minutes": 1.0,
        }
    )
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert "kvpress 0.5.5; 2 x a CPU, 1 minutes." in page
    assert (
        "| `snapkv-float32` / `kvpress` | 4 | 2 | 0.750000 | 0.5000 | 2 of 4 | 2 of 8 | 0.0e+00 | 2.4e-01 | 1.9e-01 "
        "| 2.5e-01 |"
    ) in rows
    assert "| 0 | 0.7500 (0.5000) | 0.7500 (0.5000) |" in rows
    # Wilson's interval of 2 of 2 begins at 2 / (2 + z^2), of 0 of 2 ends at z^2 / (2 + z^2), z = 1.96
    assert any(
        row.startswith("| full | 2/2 (0.34 to 1.00) | 2/2 (0.34 to 1.00) | 0/2 (0.00 to 0.66) | +0.00 (-0.66 to +0.66)")
        and row.endswith("| 2/2 | 0/2 |")
        for row in rows
    )
    assert "| 1 | 4 | 123456 | `It is 123456.` | = | `a \\| 'b' 12` |" in rows


def test_refused_arguments(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--budgets", "512,many"])
    assert "'512,many': must be numbers of cells, such as 512,256" in capsys.readouterr().err
