"""The report page in a real Chromium. Skipped without one: `scripts/test.sh --with-chromium`."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_report import EVIL, write_lines, write_run

from rl.files import open_picture, read_rows
from rl.tools.commands import report

CHROMIUM = shutil.which("chromium")
api = pytest.importorskip("playwright.sync_api", reason="scripts/test.sh installs playwright")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: scripts/test.sh --with-chromium brings it"
    ),
]
HOSTILE_NAME = "run <b>'&#\u202e %41"
"""The name of a run folder; a file name cannot hold a slash or a lone surrogate."""
SCHEMES = ("light", "dark")
LEVELS = ("serious", "critical")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`<run>/report` of a complete run, with a comparison with another run."""
    runs = tmp_path_factory.mktemp("runs")
    run_dir = write_run(runs / HOSTILE_NAME, name=f"mine {EVIL}")
    other = write_run(runs / f"other {HOSTILE_NAME}")
    assert report.main([str(run_dir), "--against", str(other)]) == 0
    return run_dir / "report"


class Tab:
    """A browser tab that records its errors, dialogs and requests."""

    def __init__(self, browser: Any, page: Path, scheme: str = "light", width: int = 1280) -> None:
        self.page = browser.new_page(
            color_scheme=scheme, viewport={"width": width, "height": 900}, reduced_motion="reduce"
        )
        self.url = page.as_uri()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type != "log" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda d: (self.problems.append(f"dialog {d.message}"), d.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def find(self, selector: str, **options: str) -> Any:
        """The elements of the view that is shown."""
        return self.page.locator(f"section:not([hidden]) {selector}", **options)

    def go(self, view: str, ready: str, first: str = "") -> Any:
        """The first element with the text `first` that matches `ready` in that view. Opens the
        view from a blank page, as the previous view could match too."""
        self.page.goto("about:blank")
        self.page.goto(self.url + view)
        element = self.find(ready, has_text=first).first
        element.wait_for()
        return element

    def until(self, script: str) -> None:
        """Waits for this JavaScript to be true. Playwright's own wait would evaluate it inside the
        page, whose policy forbids that."""
        end_s = time.monotonic() + 10
        while not self.page.evaluate(f"Boolean({script})"):
            assert time.monotonic() < end_s, script
            self.page.wait_for_timeout(20)

    def texts(self, selector: str) -> list[str]:
        return [" ".join(text.split()) for text in self.find(selector).all_text_contents()]


OpenTab = Callable[..., Tab]


@pytest.fixture
def open_tab(browser: Any, folder: Path) -> Iterator[OpenTab]:
    """Opens tabs that must end without errors and without network requests."""
    tabs: list[Tab] = []

    def open_one(page: str | Path = "index.html", **settings: Any) -> Tab:
        tabs.append(Tab(browser, folder / page, **settings))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        tab.page.close()
        assert tab.problems == []
        assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []


@pytest.fixture
def tab(open_tab: OpenTab) -> Tab:
    return open_tab()


VIEWS = {
    "": "figure svg",
    "#held-out": ".card img",
    "#training": "tbody tr",
    "#it=2&g=2": ".member",
    "#eval=4": ".card img",
    "#eval=4&id=s0": ".across .pic",
    "#settings": "tbody tr",
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [1280, 400])
def test_every_view_is_accessible_and_fits_the_window(
    open_tab: OpenTab, scheme: str, width: int
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    tab = open_tab(scheme=scheme, width=width)
    for view, ready in VIEWS.items():
        tab.go(view, ready)
        violations = axe.run(tab.page).response["violations"]
        bad = [(v["id"], v["nodes"][0]["html"]) for v in violations if v["impact"] in LEVELS]
        assert bad == [], view
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, view
    background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, background[4:-1].split(","))) < 60) == (scheme == "dark")


def test_hostile_text_is_shown_literally(tab: Tab) -> None:
    """Unicode direction marks in a text do not reorder the text around it."""
    evil = " ".join(EVIL.split())
    tab.go("#it=2&g=2", ".member")
    assert tab.texts("h2") == [f"instruction 2 {evil}"]
    assert f"completion {evil}" in tab.texts(".member p.t")
    assert f"ungraded: no_reply: {evil}" in tab.texts(".member .said")
    assert any(evil in text for text in tab.texts(".member .said")), "the judge's reason"
    image = tab.go("#it=2&g=1", ".member img")
    assert any(evil in text for text in tab.texts(".parts th"))
    assert image.get_attribute("alt") == f"instruction 1 {EVIL}"
    assert " ".join(tab.page.title().split()) == f"mine {evil}"
    tab.go("#settings", "tbody tr")
    assert any(evil in text for text in tab.texts("td"))
    kinds = "[...document.querySelectorAll('bdi, .t')].map(e => getComputedStyle(e).unicodeBidi)"
    assert set(tab.page.evaluate(kinds)) == {"isolate"}


def test_the_overview_shows_the_first_sample_before_and_after(tab: Tab) -> None:
    tab.go("", ".first img")
    source, before, after = tab.texts(".first figure")
    assert (source, before[:12], after[:11]) == ("source", "before: 0.10", "after: 0.90")
    tab.find(".first a").click()
    tab.page.locator("#at-sample:not([hidden]) .across").wait_for()


def test_a_group_shows_all_data_of_its_completions(tab: Tab) -> None:
    tab.go("#it=2&g=2", ".member")
    one, lost, bare = tab.texts(".member")
    assert bare.startswith("0.13bare variant, the user's own words")
    assert one.startswith("0.50advantage +0.50") and "noise seed 77" in one
    assert "ungraded" in lost
    assert (tab.find(".tops img").count(), tab.find(".member img").count()) == (1, 3)
    assert len(tab.texts(".member:first-child pre")) == 2, "raw replies"
    tokens = tab.find(".member:first-child .tokens span")
    doubts = "of => of.map(e => e.style.getPropertyValue('--doubt'))"
    assert tokens.evaluate_all(doubts) == ["0.22", "1.00", "0.00"], "1 - exp(nats)"
    crisp = "getComputedStyle(document.querySelector('.member img')).imageRendering"
    tab.until(f"{crisp} == 'pixelated'")


def test_the_judges_regions_are_drawn_over_the_picture(tab: Tab) -> None:
    """The pictures have 16 x 16 pixels."""
    tab.go("#it=2&g=1", ".member svg.regions text")
    member = tab.find(".member").first
    frame = "r => ['x', 'y', 'width', 'height'].map(side => r.getAttribute(side))"
    assert member.locator("rect").last.evaluate(frame) == ["4", "8", "8", "8"]
    image, overlay = (member.locator(f".boxed {tag}").bounding_box() for tag in ("img", "svg"))
    assert image == overlay
    assert tab.texts(".member:first-child ol.regions li") == [f"hat {' '.join(EVIL.split())}"]
    tab.go("#it=2&g=2", ".member")
    assert tab.find(".member .regions").count() == 0


def test_a_held_out_sample_shows_its_arms_and_checkpoints(tab: Tab) -> None:
    tab.go("#eval=4&id=s0", ".across .pic:nth-child(2)")
    tops = tab.texts(".tops figcaption")
    assert tops[:2] == ["source", "now: 0.90"]
    assert tops[2].endswith("own words: 0.10") and tops[3].endswith("system: 0.20")
    assert [text.split(": ")[1][:4] for text in tab.texts(".across p.fine")] == ["0.10", "0.90"]
    assert tab.find("pre").all_text_contents() == [f"it is {EVIL}"]
    assert "noise seed 78" in " ".join(tab.texts("p.fine"))
    assert tab.find(".tokens span").count() == 2
    tab.find(".across a").first.click()
    tab.find("h2 + p", has_text="0 iterations").wait_for()
    assert "#eval=0&id=s0" in tab.page.url
    tab.go("#eval=4&id=s4%20%3C%2Fscript%3E", "h2")
    assert "is not on record" in tab.texts("p.soft")[0]


def test_filters_and_sort_orders_are_kept_in_the_link(tab: Tab) -> None:
    tab.go("#held-out", ".card")

    def count() -> str:
        return tab.texts(".count")[0]

    def choose(name: str, value: str) -> str:
        """Which held-out samples are then shown, in order."""
        field = tab.find(f"form [name={name}]")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
        return " ".join(text.split()[1] for text in tab.texts(".card h3"))

    assert count() == "5 of 5 samples; 2 gained, 1 lost."
    assert choose("sort", "loss").startswith("1 3 ")
    assert choose("sort", "gain") == "0 4 3 1 2", "no gain: last"
    assert choose("cat", "noun") == "0 4 2"
    assert count().startswith("3 of 5")
    assert choose("st", "ungraded") == "2"
    tab.go("#held-out&sort=low&min=0.5", ".card")
    assert choose("part", "viescore") == "4 2 0"
    assert choose("pmax", "0.7") == "4"
    assert "part=viescore" in tab.page.url and "pmax=0.7" in tab.page.url
    tab.go("#training", "tbody tr")
    for name, value in (("q", "instruction 1"), ("st", "ungraded")):
        choose("q", "")
        choose(name, value)
        assert count() == "4 of 12 groups."
    choose("sort", "even")
    assert tab.page.url.endswith("#training&sort=even&st=ungraded")


def test_charts_show_values_under_the_pointer_and_find_any_metric(tab: Tab) -> None:
    figure = tab.go("", ".main figure", first="Reward in training")
    assert tab.texts(".main figcaption") == [
        "Held-out reward", "Reward in training", "Entropy", "Groups without spread of rewards",
    ]  # fmt: skip
    values = figure.locator(".legend .n")
    assert values.all_text_contents() == ["0.25 → 1"]
    figure.scroll_into_view_if_needed()
    box = figure.locator("svg[role=img]").bounding_box()
    # Iterations 1 to 4 are between 44 and 432 of 440 px of the drawing.
    tab.page.mouse.move(box["x"] + box["width"] * (44 + 388 / 3) / 440, box["y"] + 20)
    assert values.all_text_contents() == ["0.5"]
    assert figure.locator(".at").text_content() == "iteration 2"
    tab.page.mouse.move(box["x"], box["y"] - 200)
    assert values.all_text_contents() == ["0.25 → 1"]
    tab.find("form [name=q]").fill("render_s")
    assert tab.texts(".count") == ["1 metrics match:"]
    assert tab.texts(".found figcaption") == ["time/render_s"]
    tab.find("form [name=x]").select_option("hours")
    tab.find("form [name=y]").select_option("log")
    assert tab.page.url.endswith("#overview&q=render_s&x=hours&y=log")
    assert tab.texts(".found .tick.y") == ["1", "10"]
    bins = tab.find(".histograms svg").first.locator("rect.bin")
    assert bins.count() == 4 * 3, "each iteration has the rewards 0, 0.25 and 0.5"


def test_equal_completions_are_one_card_and_other_words_are_marked(
    open_tab: OpenTab, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=1)
    path = run_dir / "episodes/it_000001.rank0.jsonl"
    sheet = run_dir / "thumbnails/it_000001/rank0_g00.webp"
    sheet.parent.mkdir(parents=True)
    picture = Image.new("RGB", (64, 16), "blue")
    picture.paste("red", (32, 0, 48, 16))
    picture.save(sheet, lossless=True)
    place = f"{sheet.relative_to(run_dir)}#xywh=32,0,16,16"
    shown = {"image_file": None, "thumbnail": place, "source_thumbnails": [place]}
    one, other = (row | shown for row in read_rows(path)[0][:2])
    one |= {"completion": "paint it red", "instruction": "it's <b>"}
    write_lines(path, [one] * 3 + [other | {"completion": "paint him red now"}])
    assert report.main([str(run_dir)]) == 0
    tab = open_tab(run_dir / "report/index.html")
    crop = tab.go("#it=1&g=0", ".member svg.crop")
    cards = [text.split("adv")[0] for text in tab.texts(".member h3")]
    assert cards[:2] == ["3 \u00d70.00", "0.25"]
    assert tab.texts(".member mark") == ["him", "now"]
    with open_picture(BytesIO(crop.screenshot())) as image:
        colours = {image.convert("RGB").getpixel((x, image.height // 2)) for x in (9, 90, 200)}
    assert colours == {(255, 0, 0)}, "nothing of the sheet around the part is visible"
    tab.find("summary", has_text="Files, command").click()
    tab.find(".copy code").wait_for()
    [command] = tab.texts(".copy code")
    assert command == "rl edit --run run run/images/it_000001/rank0_g00_source.png 'it'\\''s <b>'"
    record = json.loads(tab.find(".copy pre").text_content())
    assert record["instruction"] == "it's <b>" and len(record["completions"]) == 4
    assert record["completions"][3]["parts"] == {"viescore": 0.25, EVIL: 1.0}
    assert record["completions"][3]["sampler_logprobs"] == [-0.25, -6, 0]
    for only, ready, num in (("spread", "tbody tr", 1), ("none", ".count", 0)):
        tab.go(f"#training&only={only}", ready)
        assert tab.texts(".count") == [f"{num} of 1 groups."]
        assert tab.find(".thumbs svg.crop").count() == num, "source, best and worst are equal"


def test_a_narrow_page_folds_its_filters(open_tab: OpenTab) -> None:
    tab = open_tab(width=400)
    tab.go("#held-out", ".card img")
    assert not tab.find("[name=q]").is_visible()
    tab.find(".filters summary").click()
    tab.find("[name=q]").fill("held-out 1")
    assert tab.texts(".filters summary") == ["Filters and order (1 set)"]


def test_keys_navigate_the_page(tab: Tab) -> None:
    def press(*steps: tuple[str, str]) -> None:
        """(key, JavaScript that is then true)"""
        for key, script in steps:
            tab.page.keyboard.press(key)
            tab.until(script)

    focused = "document.activeElement"
    tab.go("#held-out", ".card")
    press(
        ("j", f"{focused}.textContent.startsWith('held-out 0')"),
        ("ArrowRight", f"{focused}.textContent.startsWith('held-out 1')"),
        ("k", f"{focused}.textContent.startsWith('held-out 0')"),
    )
    assert tab.page.evaluate(f"getComputedStyle({focused}).outlineStyle") == "solid"
    press(("Enter", "document.querySelector('.across .pic')"))
    assert "#eval=4&id=s0" in tab.page.url
    press(
        ("j", "location.hash.includes('id=s1')"),
        ("ArrowLeft", "location.hash.includes('id=s0')"),
        ("Escape", "location.hash == '#held-out'"),
    )
    tab.find(".card").first.wait_for()
    press(
        ("/", f"{focused}.name == 'q'"),
        ("j", f"{focused}.value == 'j'"),
        ("Escape", f"{focused}.tagName == 'BODY'"),
    )
    tab.go("#held-out", ".card").locator("input[type=range]").focus()
    press(("ArrowRight", f"{focused}.value == '51'"))
    tab.go("#it=2&g=2", ".member")
    press(("j", "location.hash == '#it=3&g=0'"))


def test_pictures_are_loaded_only_when_they_come_into_view(tab: Tab) -> None:
    tab.go("", "figure svg")
    first = [url for url in tab.requests if url.endswith(".png")]
    assert all("/evaluation/" in url for url in first) and len(first) <= 3, "the first sample's"
    data = [url.rpartition("/")[2] for url in tab.requests if "/data/" in url]
    assert {*data} == {"metrics.js", "eval_000000.js", "eval_000004.js"}, "of the first sample"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_that_compares_runs_fits(open_tab: OpenTab, scheme: str, width: int) -> None:
    tab = open_tab("compare.html", scheme=scheme, width=width)
    tab.page.goto(tab.url)
    script = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert tab.page.evaluate(script) == 0
