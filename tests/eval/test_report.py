from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import made_up_run
import pytest
from made_up_run import record

from snapkv_gguf.eval import report, tables

RECORDS = [record("a", "full", 1.0, answers=("12",)), record("a", "snapkv", 0.0, answers=("13",))]


# --- folders


def test_load(tmp_path: Path) -> None:
    kept, cost = made_up_run.kept(), made_up_run.cost()
    run = report.load(made_up_run.write(tmp_path / "run", RECORDS, kept=kept, cost=cost, seed=7))
    assert run.records == tuple(RECORDS)
    assert (run.name, run.model_name, run.finished, run.info["seed"]) == ("made-up", "Made-up 135M", True, 7)
    assert run.kept == kept
    assert run.cost == tuple(cost)


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    folder = made_up_run.write(tmp_path / "run", [], finished=False)
    (folder / "records.jsonl").unlink()
    run = report.load(folder)
    assert (run.records, run.kept, run.cost, run.finished) == ((), None, (), False)
    report.write_report([run], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "This run is not finished." in text
    assert "No task was answered with both" in text


@pytest.mark.parametrize("end", ['{"sample": "b", "ta', '{"sample": "b"}'[:-1], '{"sample": "\u00e9'])
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path, end: str) -> None:
    folder = made_up_run.write(tmp_path / "run", RECORDS)
    with (folder / "records.jsonl").open("ab") as file:
        file.write(end.encode()[: len(end)])
    assert report.load(folder).records == tuple(RECORDS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"sample": "b", "ta', r"records\.jsonl, line 2: .*remove the line"),
        ('{"sample": "b"}', r"line 2: no field task, fields, method, budget, prompt_tokens, cells, scores"),
        ("[]", r"line 2: must be an object, is list"),
        (json.dumps({**vars(RECORDS[0]), "scores": 1}), r"line 2: field scores must be an object, is 1"),
    ],
)
def test_a_broken_line(tmp_path: Path, line: str, message: str) -> None:
    folder = made_up_run.write(tmp_path / "run", RECORDS)
    first, second = (folder / "records.jsonl").read_text().splitlines()
    (folder / "records.jsonl").write_text(f"{first}\n{line}\n{second}\n")
    with pytest.raises(ValueError, match=message):
        report.load(folder)


def test_fields_of_later_versions_and_repeated_lines(tmp_path: Path) -> None:
    folder = made_up_run.write(tmp_path / "run", RECORDS)
    again = json.loads((folder / "records.jsonl").read_text().splitlines()[1]) | {"scores": {"score": 1.0}, "new": 1}
    with (folder / "records.jsonl").open("a") as file:
        file.write(f"{json.dumps(again)}\n")
    assert [r.scores["score"] for r in report.load(folder).records] == [1.0, 1.0]


def test_folders_that_hold_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        report.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"holds no run\.json"):
        report.load(tmp_path)
    for name, text, message in (
        ("run.json", "{", r"run\.json: is not JSON"),
        ("run.json", "[]", r"run\.json: must be an object, is list"),
        ("kept.json", '{"tokens": []}', r"kept\.json: is no map of kept tokens"),
        (
            "kept.json",
            '{"tokens": ["a"], "maps": [{"method": "m", "budget": 1, "layers": [{"layer": 0, "heads": [[1]]}]}]}',
            "position is not within the 1 tokens",
        ),
        ("cost.json", '[{"method": "m"}]', r"cost\.json: no field budget"),
    ):
        folder = made_up_run.write(tmp_path / str(len(list(tmp_path.iterdir()))), RECORDS)
        (folder / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            report.load(folder)


def test_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no runs"):
        report.write_report([], tmp_path / "report.html")


# --- the file


class _Elements(HTMLParser):
    """Tags with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts.append(data)


def html_of(folder: Path, *runs: report.Run) -> str:
    report.write_report(runs, folder / "report.html")
    return (folder / "report.html").read_text()


def test_it_refers_to_nothing_outside(tmp_path: Path) -> None:
    folder = made_up_run.write(tmp_path / "run", made_up_run.everything(n_samples=1), kept=made_up_run.kept())
    text = html_of(tmp_path, report.load(folder))
    for tag, attributes in _Elements(text).found:
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert not re.findall(r"@import|url\((?!#)", text)


def nasty_run(folder: Path) -> report.Run:
    """A run with markup wherever a model or a file has a say."""
    nasty = made_up_run.INJECTION
    records = [
        record(
            nasty,
            method,
            1.0,
            task=nasty,
            fields={"length": 9, nasty: nasty},
            answers=answers,
            references=(nasty, nasty),
        )
        for method, answers in (("full", (nasty,)), (nasty, (nasty, nasty)))
    ]
    kept = {**made_up_run.kept(), "tokens": [nasty] * 40, "sample": nasty}
    kept["maps"][0]["method"] = nasty
    model = {"name": nasty, "file": nasty}
    cost = made_up_run.cost(nasty)
    return report.load(made_up_run.write(folder, records, kept=kept, cost=cost, name=nasty, model=model, command=nasty))


def test_what_a_model_or_a_file_says_is_text(tmp_path: Path) -> None:
    nasty = made_up_run.INJECTION
    run = nasty_run(tmp_path / "run")
    text = html_of(tmp_path, run, run)
    assert "<script>window" not in text
    assert "<img" not in text
    elements = _Elements(text)
    assert len([tag for tag, _ in elements.found if tag == "script"]) == 3
    answers = json.loads(elements.scripts[1])
    assert answers["samples"][0]["rows"][0][3] == [nasty]


def test_figures_have_alternative_texts_with_the_numbers(tmp_path: Path) -> None:
    folder = made_up_run.write(tmp_path / "run", RECORDS, cost=made_up_run.cost(budgets=(256,), depths=(2000,)))
    labels = [
        a.get("aria-label") for tag, a in _Elements(html_of(tmp_path, report.load(folder))).found if tag == "figure"
    ]
    assert labels == [
        "score of needle against budget. full: 1.00; snapkv: 0.00 at 500.",
        "decode speed, times the full cache's. 2000 tokens: 1.87 at 256.",
        "pass, % of the prefill. 2000 tokens: 1.03 at 256.",
    ]


def test_ids_are_unique(tmp_path: Path) -> None:
    run = report.load(made_up_run.write(tmp_path / "run", made_up_run.everything(n_samples=1), kept=made_up_run.kept()))
    text = html_of(tmp_path, run, run)
    # of figures that are the same, so are the ids
    figures = dict.fromkeys(re.findall(r"<svg .*?</svg>", text, re.DOTALL))
    ids = [name for figure in figures for name in re.findall(r' id="([^"]+)"', figure)]
    rest = re.sub(r"<svg .*?</svg>", "", text, flags=re.DOTALL)
    ids += [attributes["id"] or "" for _, attributes in _Elements(rest).found if "id" in attributes]
    assert len(ids) > 100
    assert len(ids) == len(set(ids))
    for figure in figures:
        used = {*re.findall(r'(?:url\(|href=")#([^")]+)', figure)}
        assert used <= {*re.findall(r' id="([^"]+)"', figure)}


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    run = report.load(made_up_run.write(tmp_path / "run", RECORDS))
    text = html_of(tmp_path, run, run)
    assert "made-up (2): snapkv" in text


def test_kept_positions_as_bits(tmp_path: Path) -> None:
    kept = {"tokens": ["x"] * 11, "maps": [{"method": "m", "budget": 0.25, "layers": [
        {"layer": 3, "heads": [[0, 2, 8, 10], [1]]}, {"layer": 5, "heads": [[1]]}
    ]}]}  # fmt: skip
    run = report.load(made_up_run.write(tmp_path / "run", RECORDS, kept=kept))
    assert report._kept([run])["runs"][0]["maps"] == [
        # bits 0 and 2 of the first byte, 0 and 2 of the second; bit 1
        {"method": "m", "budget": "25 %", "layers": [[3, [0, 1]], [5, [1]]], "sets": ["BQU=", "AgA="]}
    ]


def test_shades_have_enough_contrast() -> None:
    def luminance(colour: str) -> float:
        values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    assert report.shade(None) == ""
    for value in (0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1):
        ground, text = re.fullmatch("background:(#.{6});color:(#.{3})", report.shade(value)).groups()  # type: ignore[union-attr]
        low, high = sorted((luminance(ground), {"#000": 0, "#fff": 1}[text]))
        assert (high + 0.05) / (low + 0.05) >= 4.5, value


def test_many_answers_and_large_maps_make_no_large_file(tmp_path: Path) -> None:
    n = 8192
    maps = [
        {
            "method": f"m{k}",
            "budget": 1024,
            "layers": [
                {"layer": i, "heads": [list(range(k, n - 3 * i - j, 8)) for j in range(0, 24, 8)]}
                for i in range(0, 240, 8)
            ],
        }
        for k in range(20)
    ]
    records = [record(f"s{i}", m, i % 2, answers=("word " * 100,)) for i in range(2000) for m in ("full", "snapkv")]
    run = report.load(made_up_run.write(tmp_path / "run", records, kept={"tokens": [" word"] * n, "maps": maps}))
    text = html_of(tmp_path, run)
    assert len(text.encode()) < 5_000_000
    _, answers = (json.loads(script) for script in _Elements(text).scripts[:2])
    assert answers["total"] == 2000
    assert 500 < len(answers["samples"]) < 2000
    # from the whole range
    assert int(answers["samples"][-1]["sample"][1:]) > 1990
    assert re.search(r"\d+ maps are left out", text)


# --- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
    playwright = None
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        reason = "no playwright: pip install playwright"
    else:
        playwright = sync_playwright
        reason = "no chromium or google-chrome on the PATH"
    if playwright is None or program is None:
        # env: SNAPKV_REQUIRE_BROWSER
        (pytest.fail if os.environ.get("SNAPKV_REQUIRE_BROWSER") == "1" else pytest.skip)(reason)
    with playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


class Page:
    """A report that is open, with all that went wrong in it."""

    def __init__(self, browser, file: Path, **options) -> None:
        self.faults: list[str] = []
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.faults.append(message.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", self._requested)
        self.page.set_default_timeout(20_000)
        self.url = file.as_uri()
        self.page.goto(self.url)

    def _requested(self, request) -> None:
        if request.url not in (self.url, "data:,"):
            self.faults.append(f"request of {request.url}")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def width(self) -> int:
        return self.page.evaluate("document.documentElement.scrollWidth")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    records = made_up_run.everything(n_samples=2)
    run = report.load(made_up_run.write(folder / "run", records, kept=made_up_run.kept(), cost=made_up_run.cost()))
    report.write_report([run], folder / "report #1.html")
    return folder / "report #1.html"


@pytest.fixture
def opened(browser, file: Path) -> Iterator[Page]:
    page = Page(browser, file)
    yield page
    assert page.faults == []
    page.context.close()


def shades(opened: Page) -> list[float]:
    return opened.page.evaluate(
        "[...document.querySelectorAll('#kept-text span')].map((e) => Number(e.style.getPropertyValue('--shade')))"
    )


def test_the_selectors_change_the_map(opened: Page) -> None:
    page = opened.page
    # snapkv, the method to choose a budget of, comes first
    assert page.locator("#kept-map option").all_inner_texts() == ["snapkv, 8", "first-recent, 8"]
    # layer i, head j: 4 i + 2 j + 5 k, k < 8, of 40
    sets = {(i, j): {(4 * i + 2 * j + 5 * k) % 40 for k in range(8)} for i in (0, 1) for j in (0, 1)}
    mean = [sum(p in kept for kept in sets.values()) / 4 for p in range(40)]
    assert shades(opened) == pytest.approx([value**0.5 for value in mean], abs=1e-3)
    assert "of 40 prompt tokens a head kept 8 (20.0 %)" in opened.text("#kept-summary")

    page.select_option("#kept-layer", "1")
    page.select_option("#kept-head", "0")
    assert {i for i, shade in enumerate(shades(opened)) if shade} == sets[1, 0]
    assert page.locator("#kept-text span").nth(4).get_attribute("title") == "position 4, kept by 100 % of 1 heads"
    assert "layer 1, head 0" in opened.text("#kept-summary")

    page.select_option("#kept-map", label="first-recent, 8")
    assert [i for i, shade in enumerate(shades(opened)) if shade] == [0, 1, 2, 3, 36, 37, 38, 39]
    assert page.input_value("#kept-layer") == "1"

    # a line of the overview per layer and head: the last one
    box = page.locator("#kept-overview").bounding_box()
    page.locator("#kept-overview").click(position={"x": 5, "y": box["height"] - 4})
    assert (page.input_value("#kept-layer"), page.input_value("#kept-head")) == ("1", "1")


def test_the_text_is_shown_as_it_is(opened: Page) -> None:
    spans = opened.page.locator("#kept-text span")
    assert spans.count() == 40
    assert spans.nth(1).text_content() == " t1"
    assert spans.nth(9).text_content() == "\u21b5\n"


def test_copy_as_markdown(browser, file: Path) -> None:
    opened = Page(browser, file, permissions=["clipboard-read", "clipboard-write"])
    run = report.load(file.parent / "run")
    for table in (tables.overview([run]), tables.heat_maps([run], "needle")[3]):
        button = opened.page.get_by_role("button", name=f"Copy as Markdown: {table.title}", exact=True)
        button.click()
        opened.page.wait_for_function("(b) => b.textContent === 'Copied'", arg=button.element_handle())
        assert opened.page.evaluate("navigator.clipboard.readText()") == table.markdown()
    assert opened.faults == []
    opened.context.close()


@pytest.mark.parametrize("clipboard", ["undefined", "{ writeText: () => Promise.reject(new Error('no')) }"])
def test_copy_without_a_clipboard(opened: Page, file: Path, clipboard: str) -> None:
    page = opened.page
    page.add_init_script(f"Object.defineProperty(navigator, 'clipboard', {{ value: {clipboard} }})")
    page.reload()
    box = page.locator("#quality .table").first
    box.locator("button.copy").click()
    area = box.locator("textarea")
    area.wait_for()
    expected = tables.overview([report.load(file.parent / "run")]).markdown()
    assert area.input_value() == expected
    assert page.evaluate("document.activeElement.selectionEnd - document.activeElement.selectionStart") == len(expected)


def test_every_table_can_be_copied(opened: Page) -> None:
    assert opened.page.evaluate(
        "[...document.querySelectorAll('table:not(.answers)')].every((t) => t.closest('.table').querySelector('.copy'))"
    )


def test_an_injected_script_does_not_run(browser, tmp_path: Path) -> None:
    run = nasty_run(tmp_path / "run")
    report.write_report([run, run], tmp_path / "report.html")
    opened = Page(browser, tmp_path / "report.html")
    page = opened.page
    page.locator("#answers-box summary").click()
    rows = page.locator("#answers-rows tr")
    rows.first.wait_for()
    assert rows.first.locator("td").nth(5).inner_text() == made_up_run.INJECTION
    assert rows.nth(1).locator("li").all_inner_texts() == [made_up_run.INJECTION] * 4
    assert page.locator("#kept-text span").first.text_content() == made_up_run.INJECTION
    assert page.evaluate("window.injected") is None
    assert page.locator("img").count() == 0
    assert opened.faults == []
    opened.context.close()


def test_answers_are_filtered(opened: Page, file: Path) -> None:
    page = opened.page
    records = [r for r in report.load(file.parent / "run").records if r.answers]
    page.locator("#answers-box summary").click()
    page.wait_for_function("document.querySelectorAll('#answers-rows tr').length === 50")
    assert opened.text("#answers-count") == f"50 of {len(records)} answers"
    page.locator("#answers-more").click()
    assert page.locator("#answers-rows tr").count() == 100
    page.select_option("#answers-task", "needle")
    page.select_option("#answers-method", "random")
    page.select_option("#answers-score", "wrong")
    wrong = [r for r in records if (r.task, r.method) == ("needle", "random") and r.scores["score"] == 0]
    assert opened.text("#answers-count") == f"50 of {len(wrong)} answers"
    cells = page.locator("#answers-rows tr").first.locator("td").all_inner_texts()
    assert cells[:5] == [wrong[0].sample, "random", "128", "0.00", wrong[0].answers[0]]
    page.select_option("#answers-task", "questions")
    page.select_option("#answers-score", "")
    assert page.locator("#answers-rows tr").first.locator("li").all_inner_texts()[:3] == [
        "The name is Ada.", "In 1842.", "I do not know | *really*",
    ]  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(opened: Page, scheme: str) -> None:
    page = opened.page
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 400, "height": 800})
    page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert opened.width() == 400
    # wide tables scroll in their own box
    assert page.evaluate("[...document.querySelectorAll('.scroll')].some((e) => e.scrollWidth > e.clientWidth)")


def test_figures_follow_the_colour_scheme(opened: Page) -> None:
    page = opened.page
    colours = "['#quality figure text', '#quality figure path[style*=series]'].map((s) => { const c = getComputedStyle(document.querySelector(s)); return s.endsWith('text') ? c.fill : c.stroke; })"  # noqa: E501
    page.emulate_media(color_scheme="light")
    light = page.evaluate(colours)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(colours)
    assert light == ["rgb(28, 30, 33)", "rgb(0, 114, 178)"]
    assert dark == ["rgb(230, 232, 235)", "rgb(79, 168, 224)"]


def test_a_prompt_of_8k_tokens(browser, tmp_path: Path) -> None:
    kept = made_up_run.kept(n_tokens=8192, n_layer=30, n_head=3, budget=1024)
    report.write_report([report.load(made_up_run.write(tmp_path / "run", RECORDS, kept=kept))], tmp_path / "r.html")
    opened = Page(browser, tmp_path / "r.html")
    opened.page.select_option("#kept-layer", "29")
    opened.page.select_option("#kept-head", "2")
    assert "of 8192 prompt tokens a head kept 1024 (12.5 %)" in opened.text("#kept-summary")
    assert sum(map(bool, shades(opened))) == 1024
    assert opened.faults == []
    opened.context.close()


def test_several_runs_and_an_unfinished_one(browser, tmp_path: Path) -> None:
    runs = [
        report.load(
            made_up_run.write(
                tmp_path / name,
                made_up_run.everything(n_samples=1, methods=methods),
                kept=made_up_run.kept(n_layer=layers),
                name=name,
                finished=name == "one",
            )
        )
        for name, layers, methods in (
            ("one", 2, ("full", "snapkv", "random")),
            ("two", 3, ("full", "snapkv", "w8-max21-r0.5", "w16-max5-r0.5")),
        )
    ]
    report.write_report(runs, tmp_path / "report.html")
    opened = Page(browser, tmp_path / "report.html")
    page = opened.page
    assert page.locator(".warning").all_inner_texts()[0].startswith("two is not finished.")
    assert page.locator("#quality .legend").first.locator("li").all_inner_texts() == [
        "one: full", "one: snapkv", "one: random",
        "two: full", "two: snapkv", "two: w8-max21-r0.5", "two: w16-max5-r0.5",
    ]  # fmt: skip
    assert page.locator("#ablations figure figcaption").all_inner_texts() == ["window", "kernel"] * 3
    page.select_option("#kept-run", label="two")
    assert page.locator("#kept-layer option").all_inner_texts() == ["all", "0", "1", "2"]
    page.set_viewport_size({"width": 400, "height": 800})
    assert opened.width() == 400
    assert opened.faults == []
    opened.context.close()
