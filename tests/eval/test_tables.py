from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path

import made_up_run
import pytest
from made_up_run import record
from markdown_it import MarkdownIt

from snapkv_gguf.eval import ablations, advice, groups, intervals, report, tables
from snapkv_gguf.eval.intervals import Interval
from snapkv_gguf.eval.schema import Record
from snapkv_gguf.eval.tables import Table

_counter = itertools.count()


@pytest.fixture
def run(tmp_path: Path):
    def make(records: Iterable[Record], **others) -> report.Run:
        return report.load(made_up_run.write(tmp_path / str(next(_counter)), records, **others))

    return make


def rows(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def scored(method: str, values: Iterable[float], task: str = "needle", **others) -> list[Record]:
    return [record(f"{task}-{i}", method, value, task=task, **others) for i, value in enumerate(values)]


def parse(markdown: str) -> list[list[str]]:
    """Rows of the table, as a Markdown parser reads them."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)
    found: list[list[str]] = []
    for token in tokens:
        if token.type == "tr_open":
            found.append([])
        elif token.type == "inline":
            assert token.children is not None
            assert {child.type for child in token.children} <= {"text", "text_special"}, token.content
            found[-1].append("".join(child.content for child in token.children))
    return found


def test_scores_by_length_and_axis(run) -> None:
    fields = [{"length": 1000, "depth": 1.0}, {"length": 1000, "depth": 0.25}, {"length": 3000, "depth": 0.25}]
    records = [
        record(f"s{i}", method, float(i == 0 or method == "full"), fields=field, prompt_tokens=field["length"] - 10)
        for i, field in enumerate(fields)
        for method in ("snapkv", "full")
    ]
    table = tables.scores([run(records)], "needle")
    assert table.title == "Score: needle"
    assert table.header == (
        "length", "depth", "method", "budget", "score", "difference", "n", "prompt tokens", "cells", "compression",
    )  # fmt: skip
    assert [row[:4] for row in table.rows] == [
        ("1000", "0.25", "full", "all"),
        ("1000", "0.25", "snapkv", "500"),
        ("1000", "1", "full", "all"),
        ("1000", "1", "snapkv", "500"),
        ("3000", "0.25", "full", "all"),
        ("3000", "0.25", "snapkv", "500"),
    ]
    assert rows(table)[5]["compression"] == "5.98"  # 2990 / 500


def test_tasks_by_method(run) -> None:
    records = [
        *scored("full", [1, 1, 0, 1]),
        *scored("snapkv", [1, 0, 0, 1], cells=250, budget=250),
        *scored("snapkv", [1, 1, 0, 1], cells=500, budget=500),
        *scored("full", [0.5, 0.5], task="qa"),
        *scored("snapkv", [0.25, 0.5], task="qa", cells=250, budget=250),
    ]
    table = tables.by_method(run(records))
    assert table.header == ("task", "n", "full", "snapkv, 250", "snapkv, 500")
    assert [row[:5] for row in table.rows] == [
        ("needle", "4", "0.75", "0.50", "0.75"),
        ("qa", "2", "0.50", "0.38", ""),
        # each task counts the same; not where one is missing
        ("mean of tasks", "", "0.62", "0.44", ""),
        ("prompt tokens", "", "2000", "2000", "2000"),
        ("cells", "", "2000", "250", "500"),
        ("compression", "", "1.00", "8.00", "4.00"),
    ]
    # with one budget it need not be said in each column
    assert tables.by_method(run(records[:8])).header == ("task", "n", "full", "snapkv")


def test_methods_by_budget(run) -> None:
    records = [
        *scored("full", [1, 1, 0, 1]),
        *scored("snapkv", [1, 0, 0, 1], cells=250, budget=250),
        *scored("snapkv", [1, 1, 0, 1], cells=500, budget=500),
        *scored("random", [0, 0, 0, 1], cells=250, budget=250),
        *scored("full", [0.5, 0.5], task="qa"),
        *scored("snapkv", [0.25, 0.5], task="qa", cells=250, budget=250),
        *scored("random", [0, 0], task="qa", cells=250, budget=250),
        *(
            record("text-0", method, task="text", scores={"kl": kl}, cells=250, budget=0 if method == "full" else 250)
            for method, kl in (("full", 0.0), ("snapkv", 0.125))
        ),
    ]
    table = tables.by_budget(run(records))
    assert table.title == "Mean score of 2 tasks, KL of running text"
    assert table.header == ("method", "score, 250", "score, 500", "KL, 250", "KL, 500")
    assert table.rows == (
        ("full", "0.62", "0.62", "0.000", "0.000"),
        ("snapkv", "0.44", "", "0.125", ""),
        ("random", "0.12", "", "", ""),
        ("prompt tokens", "2000", "2000", "2000", "2000"),
        ("cells", "250", "500", "250", "500"),
        ("compression", "8.00", "4.00", "8.00", "4.00"),
    )


def test_means_are_those_of_the_samples(run) -> None:
    sizes = [(1000, 400), (3000, 600), (3000, 600), (1000, 400)]
    records = scored("full", [1, 1, 1, 0])
    for i, (score, (n, cells)) in enumerate(zip([1, 0, 1, 0], sizes, strict=True)):
        records.append(record(f"needle-{i}", "snapkv", float(score), prompt_tokens=n, cells=cells))
    full, compacted = rows(tables.overview([run(records)]))
    # Wilson, 2 of 4: (0.5 + z^2/8) / (1 + z^2/4) -/+ z / (1 + z^2/4) * sqrt(0.25/4 + z^2/64)
    assert compacted["score"] == "0.500 (0.150 to 0.850)"
    assert compacted["difference"] == intervals.interval_text(
        intervals.paired_difference([1, 0, 1, 0], [1, 1, 1, 0]), "+"
    )
    assert compacted["difference"].startswith("-0.250 (")
    assert (compacted["n"], compacted["prompt tokens"], compacted["cells"]) == ("4", "2000", "500")
    assert compacted["compression"] == "4.00"
    assert full["difference"] == ""
    assert full["compression"] == "1.00"


def test_difference_is_of_the_same_samples_only(run) -> None:
    records = [*scored("full", [1, 0]), *scored("snapkv", [0.5, 0.25, 1])]
    row = rows(tables.overview([run(records)]))[1]
    expected = intervals.interval_text(intervals.paired_difference([0.5, 0.25], [1, 0]), "+")
    assert row["difference"] == f"{expected}, 2 pairs"
    assert row["difference"].startswith("-0.125")
    assert row["score"].startswith("0.583")
    assert row["n"] == "3"


def test_samples_of_another_task_are_no_pair(run) -> None:
    records = [record("same", "full", 1.0, task="qa"), record("same", "snapkv", 0.0)]
    assert "difference" not in tables.overview([run(records)]).header


def test_order_of_budgets_and_methods(run) -> None:
    records = [*scored("zebra", [1]), *scored("full", [1])]
    for budget in (0.5, 1024, 0.125, 64):
        records += scored("snapkv", [1], budget=budget)
    table = tables.overview([run(records, config={"methods": ["snapkv", "full", "zebra"]})])
    assert [(row["method"], row["budget"]) for row in rows(table)] == [
        ("full", "all"),
        ("snapkv", "64"),
        ("snapkv", "1024"),
        ("snapkv", "12.5 %"),
        ("snapkv", "50 %"),
        ("zebra", "500"),
    ]


def test_running_text(run) -> None:
    def text(sample: str, method: str, kl: float, top: float, perplexity: float) -> Record:
        return record(sample, method, task="text", scores={"kl": kl, "same_top": top, "perplexity": perplexity})

    records = [
        text("a", "full", 0, 1, 10), text("b", "full", 0, 1, 20),
        text("a", "snapkv", 0.02, 0.8, 12), text("b", "snapkv", 0.04, 0.9, 6),
    ]  # fmt: skip
    table = tables.running_text([run(records)])
    assert table is not None
    (row,) = rows(table)
    assert row["KL, nats per token"].split()[0] == "0.0300"
    assert row["same top token"].split()[0] == "0.850"
    # sqrt(12/10 * 6/20)
    assert row["perplexity by full cache's"].split()[0] == "0.600"
    assert row["compression"] == "4.00"


def test_one_divergence_has_no_interval(run) -> None:
    """It is no score, so nothing is known of how large another one could be."""
    table = tables.running_text([run([record("a", "snapkv", task="text", scores={"kl": 0.02})])])
    assert table is not None
    assert rows(table)[0]["KL, nats per token"] == "0.0200"


def test_questions(run) -> None:
    records = [
        record(
            f"q{i}",
            "snapkv",
            task="questions",
            scores={"score": 1, "score_2": i % 2, "reread_2": 1, "score_3": 0, "reread_3": 0.5},
        )
        for i in range(4)
    ]
    table = tables.questions([run(records)])
    assert table is not None
    (row,) = rows(table)
    assert row["question 1"].startswith("1.000 (0.510")
    assert row["question 2"] == "0.500 (0.150 to 0.850)"
    assert row["question 2, read again"].startswith("1.000")
    assert row["question 3"].startswith("0.000")
    assert row["question 3, read again"].startswith("0.500")


def test_speed_is_relative_on_the_same_sample(run) -> None:
    times = {"decode_tokens": 10, "prefill_seconds": 2.0}
    records = [
        record("a", "full", 1, decode_seconds=4, **times),
        record("b", "full", 1, decode_seconds=8, **times),
        record("a", "snapkv", 1, decode_seconds=2, pass_ms=10, parts_ms={"score_ms": 6, "move_ms": 4}, **times),
        record("b", "snapkv", 1, decode_seconds=1, pass_ms=30, parts_ms={"score_ms": 20, "move_ms": 10}, **times),
    ]
    (row,) = rows(tables.speed([run(records)]))
    assert row["decode speed by full cache's"].split()[0] == "4.00"  # sqrt(2 * 8)
    assert row["pass, % of prefill"].split()[0] == "1.00"  # of 0.5 and 1.5
    assert (row["pass, ms"], row["score, ms"], row["move, ms"]) == ("20.0", "13.0", "7.0")
    assert "select, ms" not in row


def test_cost(run) -> None:
    table = tables.cost([run([], cost=made_up_run.cost(budgets=(500,), depths=(2000,)))])
    assert table is not None
    (row,) = rows(table)
    assert row["decode speed by full cache's"] == "1.75"
    assert row["capture, % of prefill"] == "0.20"
    assert row["pass, % of prefill"] == "1.05"
    assert row["K and V before, MiB"] == "43.9"
    assert (row["prompt tokens"], row["cells"], row["compression"]) == ("2000", "500", "4.00")
    assert tables.cost([run([])]) is None


def test_heat_map(run) -> None:
    records = []
    for method in ("full", "snapkv"):
        for length, depth, values in (
            (1000, 0.5, (1, 0)),
            (1000, 0.0, (1, 1)),
            (1000, 1.0, (0, 0)),
            (900, 0.0, (1, 0)),
        ):
            records += [
                record(
                    f"{length}-{depth}-{i}",
                    method,
                    value,
                    fields={"length": length, "depth": depth},
                    prompt_tokens=length,
                )
                for i, value in enumerate(values)
            ]
    (heat,) = tables.heat_maps([run(records)], "needle", ["snapkv"])
    assert heat.title == "needle, snapkv, 500"
    assert heat.header == ("depth", "900", "1000")
    assert heat.rows == (
        ("0 %", "0.50", "1.00"),
        ("50 %", "", "0.50"),
        ("100 %", "", "0.00"),
        ("n", "2", "6"),
        ("prompt tokens", "900", "1000"),
        ("cells", "500", "500"),
        ("compression", "1.80", "2.00"),
    )
    assert heat.shades == ((None, 0.5, 1.0), (None, None, 0.5), (None, None, 0.0), *[(None, None, None)] * 4)
    assert len(tables.heat_maps([run(records)], "needle")) == 2

    table = tables.by_depth(run(records))
    assert table.header == ("length", "depth", "n", "full", "snapkv, 500")
    assert table.rows == (
        ("900", "0 %", "2", "0.50", "0.50"),
        ("1000", "0 %", "2", "1.00", "1.00"),
        ("1000", "50 %", "2", "0.50", "0.50"),
        ("1000", "100 %", "2", "0.00", "0.00"),
        ("prompt tokens", "", "", "975", "975"),
        ("cells", "", "", "2000", "500"),
        ("compression", "", "", "0.49", "1.95"),
    )


# --- budgets


def graded(lost: dict[int, int], n: int = 100, task: str = "needle") -> list[Record]:
    """Of n samples that the full cache gets right, so many lost by budget."""
    records = scored("full", [1] * n, task=task)
    for budget, k in lost.items():
        records += scored("snapkv", [0] * k + [1] * (n - k), task=task, budget=budget, cells=budget)
    return records


def test_budgets_that_are_shown_and_likely(run) -> None:
    (choice,) = advice.choose(run(graded({512: 0, 256: 3, 128: 20})), "snapkv")
    assert choice.shown is not None
    assert choice.likely is not None
    # Tango's interval of no difference in 100 is +-0.037, of 3 in 100 it reaches below -0.05
    assert (choice.shown.budget, choice.likely.budget) == (512, 256)
    (row,) = rows(tables.choices([run(graded({512: 0, 256: 3, 128: 20}))], lambda run: ["snapkv"]))
    assert (row["shown from"], row["by estimate from"], row["at budget"]) == ("512", "256", "512")
    assert (row["difference"], row["compression"]) == ("+0.000 (-0.037 to +0.037)", "3.91")


def test_a_small_budget_counts_only_if_the_larger_ones_do_too(run) -> None:
    (choice,) = advice.choose(run(graded({512: 0, 256: 20, 128: 0})), "snapkv")
    assert choice.shown is not None
    assert choice.shown.budget == 512
    (choice,) = advice.choose(run(graded({512: 20, 256: 0})), "snapkv")
    assert (choice.shown, choice.likely) == (None, None)


def test_few_samples_show_nothing(run) -> None:
    (choice,) = advice.choose(run(graded({512: 0}, n=10)), "snapkv")
    assert choice.shown is None
    assert choice.likely is not None


def test_the_margin_itself_is_within_it(run) -> None:
    (choice,) = advice.choose(run(graded({512: 5}, n=100)), "snapkv")
    assert choice.likely is not None


def test_headlines(run) -> None:
    assert advice.headline(run(graded({512: 0, 128: 0}))) == [
        "snapkv with a budget of 128 cells (compression 15.6) loses no more than 0.05 of the score on the only task.",
        "The 95 % intervals of the difference from the full cache stay above that, here and at all larger budgets.",
    ]
    both = [*graded({512: 0, 128: 0}), *graded({512: 0, 128: 0}, n=10, task="qa")]
    assert advice.headline(run(both)) == [
        "By estimate, snapkv with a budget of 128 cells (compression 15.6) loses no more than 0.05 of the score "
        "on each of the 2 tasks.",
        "This is not shown: for qa the 95 % interval reaches further down. More samples would tell.",
    ]
    lost = [*graded({512: 0, 128: 0}), *graded({512: 9, 128: 9}, n=10, task="qa")]
    assert advice.headline(run(lost)) == [
        "No measured budget of snapkv does for all 2 tasks: at 512 cells (compression 3.9), the largest, "
        "it loses more than 0.05 of the score on qa.",
        "On needle, 128 cells (compression 15.6) does by estimate; the intervals show it for 1 of 1.",
    ]
    # what the full cache fails recommends nothing
    failed = [*scored("full", [0] * 100, task="qa"), *scored("snapkv", [0] * 100, task="qa")]
    assert advice.headline(run(failed)) == [
        "The full cache itself scores below 0.5 on qa, so there is no budget to recommend."
    ]
    assert advice.headline(run([*graded({512: 0, 128: 0}), *failed]))[-1] == (
        "Left out: qa, where the full cache itself scores below 0.5."
    )
    assert "With fewer than 10 samples of needle, this is a first look." in advice.headline(
        run([*scored("full", [1] * 9), *scored("snapkv", [1] * 9)])
    )
    for records in ([], scored("full", [1]), scored("snapkv", [1])):
        assert advice.headline(run(records))[0].startswith("No task was answered with both")


def test_the_headline_tells_of_later_questions_and_of_text(run) -> None:
    scores = {"score": 1, "score_2": 0, "score_3": 0.5, "reread_2": 1, "reread_3": 0.5}
    records = [record("q", method, task="questions", scores=scores) for method in ("full", "snapkv")]
    records += [
        record("t", m, task="text", scores={"kl": 0.125, "same_top": 0.75}) for m in ("full", "snapkv", "random")
    ]
    assert advice.headline(run(records))[-2:] == [
        "Later questions about the same document, at 500: mean score 0.25, and 0.75 with the document read again.",
        "Running text, at 500: 0.125 nats per token from the full cache, "
        "the same most likely token in 75 % of the cases.",
    ]


def test_no_baseline_is_recommended(run) -> None:
    def recommended(*names: str) -> str | None:
        return groups.recommended(run([record("a", name, 1) for name in names]))

    assert recommended("full", "random", "w8-max5-r0.5", "snapkv") == "snapkv"
    assert recommended("full", "random", "w8-max5-r0.5") == "w8-max5-r0.5"
    assert recommended("full", "random") == "random"
    assert recommended("full") is None


# --- ablations


def test_settings() -> None:
    assert ablations.parse_setting("w8-avg5-r0.25") == (8, 5, "avg", 0.25)
    assert ablations.parse_setting("snapkv") == (16, 21, "max", 0.5)
    assert ablations.parse_setting("no-pooling") == (16, 1, "max", 0.5)
    assert [ablations.parse_setting(name) for name in ("full", "random", "w8-max5-r0.5-shared", "unheard-of")] == [
        None
    ] * 4


def test_one_setting_is_varied_at_a_time(run) -> None:
    names = ["full", "random", "w64-max21-r0.5", "snapkv", "w8-max21-r0.5", "w16-max21-r0", "w16-max21-r0.25"]
    names += ["w16-max5-r0.5", "w16-avg5-r0.5", "w16-avg21-r0.5", "w64-max5-r0"]
    found = {each.dimension: each.settings for each in ablations.ablations(run(record("a", n, 1) for n in names))}
    assert found == {
        "window": ((8, "w8-max21-r0.5"), (16, "snapkv"), (64, "w64-max21-r0.5")),
        "kernel": ((5, "w16-max5-r0.5"), (21, "snapkv")),
        "kernel, avg": ((5, "w16-avg5-r0.5"), (21, "w16-avg21-r0.5")),
        "pool": (("avg", "w16-avg21-r0.5"), ("max", "snapkv")),
        "recent": ((0, "w16-max21-r0"), (0.25, "w16-max21-r0.25"), (0.5, "snapkv")),
    }


def test_without_the_default_preset_the_base_has_the_most_neighbours(run) -> None:
    names = ["w8-max5-r0.0", "w32-max5-r0.0", "w32-max7-r0.0", "w32-avg5-r0.0"]
    assert {each.base for each in ablations.ablations(run(record("a", n, 1) for n in names))} == {"w32-max5-r0.0"}
    assert ablations.ablations(run(record("a", n, 1) for n in ("full", "snapkv", "random"))) == []


def test_ablations_apart_by_kind_of_task(run) -> None:
    records = []
    for method, right in (("full", 1.0), ("snapkv", 0.75), ("w8-max21-r0.5", 0.25)):
        records += scored(method, [right, right], task="needle") + scored(method, [right], task="passkey")
        records += scored(method, [1 - right], task="list-functions")
        records += [record("t", method, task="text", scores={"kl": 1 - right})]
    table = tables.ablation([run(records)])
    assert table is not None
    assert [(row["tasks"], row["method"], row["score, or KL"].split()[0], row["n"]) for row in rows(table)] == [
        ("retrieval tasks", "snapkv", "0.750", "3"),
        ("retrieval tasks", "w8-max21-r0.5", "0.250", "3"),
        ("other tasks", "snapkv", "0.250", "1"),
        ("other tasks", "w8-max21-r0.5", "0.750", "1"),
        ("running text, KL", "snapkv", "0.250", "1"),
        ("running text, KL", "w8-max21-r0.5", "0.750", "1"),
    ]


# --- of tables as such


def test_every_table_states_prompt_tokens_and_compression(run) -> None:
    every = run(made_up_run.everything(n_samples=2), cost=made_up_run.cost())
    found = tables.all_tables([every, every])
    assert len(found) >= 9
    for table in found:
        assert {"prompt tokens", "compression", "run"} <= {*table.header}, table.title
    for heat in tables.heat_maps([every], "needle"):
        assert {"prompt tokens", "compression"} <= {row[0] for row in heat.rows}


def test_markdown_says_what_the_table_says(run) -> None:
    nasty = ("a|b", "*x* _y_ **z**", "`code`", "<b>", "[l](u)", "a\\", "&lt;", "~~s~~", "snake_case_name", "!", "# 1")
    table = Table("t", nasty, (nasty, tuple(reversed(nasty))))
    assert parse(table.markdown()) == [list(nasty), list(nasty), list(reversed(nasty))]
    for each in tables.all_tables([run(made_up_run.everything(n_samples=1))]):
        assert parse(each.markdown()) == [list(each.header), *map(list, each.rows)]


def test_markdown_to_the_letter() -> None:
    table = Table("t", ("task", "score"), (("needle", "0.5"), ("a\nb", "")))
    assert table.markdown() == "| task | score |\n| --- | ---: |\n| needle | 0.5 |\n| a b |  |\n"
    with pytest.raises(ValueError, match="1 cells under 2 columns"):
        Table("t", ("a", "b"), (("c",),))


def test_interval_text() -> None:
    assert intervals.interval_text(Interval(0.9, 0.7454, 0.9661, 20)) == "0.900 (0.745 to 0.966)"
    assert intervals.interval_text(Interval(-0.1, -0.2, 0.05, 20), "+") == "-0.100 (-0.200 to +0.050)"
    assert intervals.interval_text(Interval(0.9, math.nan, math.nan, 1)) == "0.900"
    assert intervals.interval_text(None) == ""


def test_values_that_are_not_finite_are_left_out(run) -> None:
    table = tables.overview([run(scored("snapkv", [1, math.nan, 1]))])
    assert re.match(r"1\.000 \(0\.342", rows(table)[0]["score"])  # Wilson, 2 of 2
