"""`index.html` and its command: content, escaping and hostile input."""

from __future__ import annotations

import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tiny_messages import holds
from tiny_report import EVIL, data_of, write_run

from rl.files import json_line
from rl.run.metric_table import METRICS, doc_of
from rl.tools.commands import report
from rl.tools.report import page as pages
from rl.tools.report import reading
from rl.tools.report.page import MAIN_METRICS, Page, alarms, learnt, times
from rl.tools.report.reading import CURVES, MAX_POINTS, Evaluation, curve_data


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", name=f"mine {EVIL}")


class Tags(HTMLParser):
    """All tags of a page with their attributes, and its text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] not in ("script", "style"):
            self.texts.append(data)


def test_a_single_measurement_is_not_shown_as_a_change(tmp_path: Path) -> None:
    """A run that has just begun."""
    (tmp_path / "metrics.jsonl").touch()
    page = Page(tmp_path).write()
    assert "No iteration" in page.read_text()
    once = write_run(tmp_path / "run", num_iterations=0)
    Page(once).write()
    text = " ".join(Tags((once / "report" / "index.html").read_text()).texts)
    assert holds(text, "0 of 4 iterations ... 1 held-out ... 0 groups")
    assert "\u2192" not in text.partition("Keys:")[0]


def facts_of(page: str) -> Any:
    return json.loads(page.partition("const page = {facts: ")[2].partition("};\n")[0])


def test_text_of_a_run_adds_no_html_tag(run_dir: Path) -> None:
    page = Page(run_dir).write()
    text = page.read_text("utf-8")
    plain = write_run(run_dir.parent / "plain")
    config = json.loads((plain / "config.json").read_text().replace(json.dumps(EVIL), '"kind"'))
    (plain / "config.json").write_text(json.dumps(config))
    tags = [tag for tag, _ in Tags(text).tags]
    assert tags == [tag for tag, _ in Tags(Page(plain).write().read_text("utf-8")).tags]
    assert f"mine {EVIL}" in "".join(Tags(text).texts)
    assert "alert(1)</script>" not in text.replace(html.escape(EVIL), "")


def test_the_page_loads_nothing_from_other_places(run_dir: Path) -> None:
    page = Page(run_dir).write()
    tags = Tags(page.read_text("utf-8")).tags
    keys = {name for _, attributes in tags for name in attributes}
    assert not {name for name in keys if name.startswith("on")}
    links = [a[key] for _, a in tags for key in ("src", "href") if a.get(key)]
    assert links and all(str(link).startswith(("#", "data:,", "../")) for link in links)
    [policy] = [a["content"] for _, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none';")
    assert "http" not in policy and "*" not in policy


def test_the_page_shows_what_was_learnt(run_dir: Path) -> None:
    page = Page(run_dir).write()
    text = " ".join(" ".join(Tags(page.read_text("utf-8")).texts).split())
    # s0, s1, s3, s4: gains 0.8, -0.6, 0.0, 0.1
    assert "all 4 0.425 0.500 +0.075" in text
    assert "noun 2 0.300 0.750 +0.450" in text
    assert holds(text, "Left out: 1 ... Iteration 4: ... drifted")
    assert "render 7.5 75.0 %" in text
    data = data_of(run_dir, "metrics")
    assert data["docs"]["policy/entropy"][1] == METRICS["policy/entropy"].meaning
    assert data["of"]["policy/entropy"] == [None, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "metrics.jsonl").open("a").write('{"iter'), "metrics.jsonl (1)"),
        (lambda d: next(d.glob("episodes/*3.rank0*")).open("a").write("{"), "it_000003 (1)"),
        (lambda d: edit(d, lambda row: row.update({"groups/dead": 0.9}) is None), "are dead"),
        (lambda d: edit(d, lambda row: row.update({"status/ungraded": 0.3}) is None), "30.0%"),
        (lambda d: edit(d, lambda row: row.update({"drift/alarm": 1.0}) is None), "have drifted"),
    ],
)
def test_damage_and_bad_metrics_give_alarms(tmp_path: Path, change: object, message: str) -> None:
    assert callable(change)
    run_dir = write_run(tmp_path / "run", num_iterations=3)
    assert "No alarm: no drift" in Page(run_dir).write().read_text()
    change(run_dir)
    text = Page(run_dir).write().read_text()
    assert message in text and "No alarm" not in text


def edit(run_dir: Path, keeps: object) -> None:
    """Rewrites metrics.jsonl with the rows that `keeps` accepts (and may have changed)."""
    assert callable(keeps)
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().split("\n") if line]
    path.write_text("".join(json_line(row) for row in rows if keeps(row)))


@pytest.mark.parametrize(
    "name", ["report", "report/data", "report/index.html", "report/data/it_000001.js"]
)
def test_a_report_is_not_written_through_links(run_dir: Path, tmp_path: Path, name: str) -> None:
    Page(run_dir).write()
    path = run_dir / name
    path.rename(tmp_path / "theirs")
    path.symlink_to(tmp_path / "theirs")
    theirs = tmp_path / "theirs"
    before = theirs.stat().st_mtime_ns
    (run_dir / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=re.escape(f"{path} is a link")):
        Page(run_dir).write()
    assert theirs.stat().st_mtime_ns == before


def test_two_reports_are_not_written_at_the_same_time(run_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(pages, "MAX_WAIT_S", 0.1)
    with reading.locked(reading.own_folder(run_dir / "report") / ".lock", 0.0):
        with pytest.raises(ValueError, match="another process"):
            Page(run_dir).write()
        assert not (run_dir / "report/index.html").exists()
    Page(run_dir).write()


def test_no_invalid_number_or_text_fails_a_report(run_dir: Path, capsys) -> None:
    huge = 10**400
    invalid = [
        {"iteration": it, "eval/reward": 0.5} for it in (huge, -1, 1.5, True, None, "2", 10**9 + 1)
    ]
    metrics = ["eval/reward", "eval/gain_over_stock", "eval/gain_of_thought"]
    metrics += ["drift/bare_fall", "drift/state_l2"]
    for value in (math.inf, math.nan, huge, "text", 1e308):
        invalid += [{"iteration": 10**9, name: value} for name in metrics]
    invalid += [{"iteration": 5, "eval/gain_over_stock": 0.1, "drift/state_l2": 0.1}]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in invalid))
    config = {"format": 3, "policy": [], "run_name": "half \ud800"}
    config |= {"seed": math.nan, "list": [math.inf]}
    (run_dir / "config.json").write_text(json.dumps(config))
    assert report.main([str(run_dir)]) == 0
    text = (run_dir / "report/index.html").read_text("utf-8")
    assert "1,000,000,000 of ? iterations" in text
    assert "NaN" in text and "[Infinity]" in text and "over the untrained system" in text
    assert "Traceback" not in capsys.readouterr().err


def test_recently_ungraded_episodes_raise_an_alarm() -> None:
    shares = [0.0] * 990 + [0.5] * 10
    rows = [{"iteration": it, "status/ungraded": value} for it, value in enumerate(shares, 1)]
    [alarm] = alarms(rows, {}, {})
    assert alarm.startswith("0.5% of the episodes") and alarm.count("50.0%") == 2


def test_a_category_may_have_any_name(tmp_path: Path) -> None:
    records = {
        str(n): {"reward": reward, "category": category}
        for n, (reward, category) in enumerate([(0.0, "held-out reward"), (1.0, "b\n")])
    }
    one = Evaluation(0, tmp_path, records)
    result = learnt([one, one])
    assert result is not None
    expected = [("held-out reward", 0.5), ("b\\n", 1.0), ("held-out reward", 0.0)]
    assert [(c.name, c.before) for c in result.changes] == expected


def test_every_curve_has_a_meaning() -> None:
    for curve in CURVES:
        for metric, _, style in curve["lines"]:
            assert doc_of(metric), metric
            assert style in ("main", "dash", "dot", "dashdot")


def test_the_main_metrics_are_shown_first(run_dir: Path) -> None:
    page = Page(run_dir).write()
    curves = facts_of(page.read_text("utf-8"))["curves"]
    main = [{metric for metric, _, style in c["lines"] if style == "main"} for c in curves[:6]]
    assert [metrics & set(MAIN_METRICS) for metrics in main] == [{name} for name in MAIN_METRICS]
    assert [curve["main"] for curve in curves] == [True] * 6 + [False] * (len(CURVES) - 6)
    assert all(doc_of(name) for name in MAIN_METRICS)


def test_the_chart_data_has_every_metric_and_few_points() -> None:
    rows = [
        {"iteration": it, "x": 2.0 * it, "time/iteration_s": 36.0, "odd": "text"}
        | ({"eval/part/sc": 1 / 3} if it % 500 == 0 else {})
        for it in range(1001)
    ]
    data = curve_data(rows, 96)
    assert len(data["it"]) <= MAX_POINTS and data["span"] == 3
    assert data["it"][:2] == [0, 2] and data["it"][-1] == 1000, "the ends are not averaged"
    assert data["of"]["x"][:2] == [0, 4] and data["of"]["x"][-1] == 2000
    assert data["hours"][:2] == [0.01, 0.04] and data["hours"][-1] == 10.01
    assert data["pictures"][1] == 192
    evaluated = [value for value in data["of"]["eval/part/sc"] if value is not None]
    assert evaluated == [0.333333] * 3 and len(data["of"]["eval/part/sc"]) == len(data["it"])
    assert "odd" not in data["of"] and data["docs"]["time/iteration_s"][0] == "s"
    for few in ([], rows[:1], rows[:2]):
        assert curve_data(few, None)["it"] == [row["iteration"] for row in few]


def test_time_outside_of_phases_is_shown() -> None:
    first = {"iteration": 1, "time/iteration_s": 4.0, "time/render_s": 1.0}
    rows = [first | {"time/learn_s": 2.5}, first | {"iteration": 2}]
    assert times(rows) == [("(other)", 3.5, 0.4375), ("learn", 2.5, 0.3125), ("render", 2.0, 0.25)]
