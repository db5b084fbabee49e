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
from tiny_report import EVIL, data_of, facts_of, metrics, write_lines, write_run

from rl.run.metric_table import METRICS, doc_of
from rl.tools import page as pages
from rl.tools import reading
from rl.tools.commands import report
from rl.tools.page import MAIN_METRICS, Page, alarms, learnt, times
from rl.tools.reading import CURVES, MAX_POINTS, Evaluation, curve_data


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


def page_of(run_dir: Path) -> str:
    return Page(run_dir).write().read_text("utf-8")


def text_of(run_dir: Path) -> str:
    return " ".join(" ".join(Tags(page_of(run_dir)).texts).split())


def test_a_single_measurement_is_not_shown_as_a_change(tmp_path: Path) -> None:
    """A run that has just begun."""
    (tmp_path / "metrics.jsonl").touch()
    assert "No iteration" in page_of(tmp_path)
    text = text_of(write_run(tmp_path / "run", num_iterations=0))
    assert holds(text, "0 of 4 iterations ... 1 held-out ... 0 groups")
    assert "\u2192" not in text.partition("Keys:")[0]


def test_text_of_a_run_adds_no_html_tag(run_dir: Path) -> None:
    text, plain = page_of(run_dir), write_run(run_dir.parent / "plain")
    config = json.loads((plain / "config.json").read_text().replace(json.dumps(EVIL), '"kind"'))
    (plain / "config.json").write_text(json.dumps(config))
    hostile, harmless = ([tag for tag, _ in Tags(t).tags] for t in (text, page_of(plain)))
    assert hostile == harmless
    assert f"mine {EVIL}" in "".join(Tags(text).texts)
    assert "alert(1)</script>" not in text.replace(html.escape(EVIL), "")


def test_the_page_loads_nothing_from_other_places(run_dir: Path) -> None:
    tags = [attributes for _, attributes in Tags(page_of(run_dir)).tags]
    assert not [name for attributes in tags for name in attributes if name.startswith("on")]
    links = [a[key] for a in tags for key in ("src", "href") if a.get(key)]
    assert links and all(str(link).startswith(("#", "data:,", "../")) for link in links)
    [policy] = [a["content"] for a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none';")
    assert "http" not in policy and "*" not in policy


def test_the_page_shows_what_was_learnt(run_dir: Path) -> None:
    text = text_of(run_dir)
    # s0, s1, s3, s4: gains 0.8, -0.6, 0.0, 0.1
    assert "all 4 0.425 0.500 +0.075" in text
    assert "noun 2 0.300 0.750 +0.450" in text
    assert holds(text, "Left out: 1 ... Iteration 4: ... drifted")
    assert "render 7.5 75.0 %" in text
    data = data_of(run_dir, "metrics")
    assert data["docs"]["policy/entropy"][1] == METRICS["policy/entropy"].meaning
    assert data["of"]["policy/entropy"] == [None, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("file", "appended", "message"),
    [
        ("metrics.jsonl", '{"iter', "metrics.jsonl (1)"),
        ("episodes/it_000003.rank0.jsonl", "{", "it_000003 (1)"),
        ("metrics.jsonl", {"groups/dead": 0.9}, "are dead"),
        ("metrics.jsonl", {"status/ungraded": 0.3}, "30.0%"),
        ("metrics.jsonl", {"drift/alarm": 1.0}, "have drifted"),
    ],
)
def test_damage_and_bad_metrics_give_alarms(
    tmp_path: Path, file: str, appended: str | dict[str, float], message: str
) -> None:
    """Metrics are those of every iteration."""
    run_dir = write_run(tmp_path / "run", num_iterations=3)
    assert "No alarm: no drift" in page_of(run_dir)
    if isinstance(appended, str):
        (run_dir / file).open("a").write(appended)
    else:
        write_lines(run_dir / file, [metrics(iteration) | appended for iteration in range(4)])
    text = page_of(run_dir)
    assert message in text and "No alarm" not in text


@pytest.mark.parametrize(
    "name", ["report", "report/data", "report/index.html", "report/data/it_000001.js"]
)
def test_a_report_is_not_written_through_links(run_dir: Path, tmp_path: Path, name: str) -> None:
    Page(run_dir).write()
    path, theirs = run_dir / name, tmp_path / "theirs"
    path.rename(theirs)
    path.symlink_to(theirs)
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
    rows: list[dict[str, Any]] = [
        {"iteration": it, "eval/reward": 0.5} for it in (huge, -1, 1.5, True, None, "2", 10**9 + 1)
    ]
    rows += [
        {"iteration": 10**9, name: value}
        for value in (math.inf, math.nan, huge, "text", 1e308)
        for name in ("eval/reward", "eval/gain_over_stock", "eval/gain_of_thought",
                     "drift/bare_fall", "drift/state_l2")
    ]  # fmt: skip
    rows += [{"iteration": 5, "eval/gain_over_stock": 0.1, "drift/state_l2": 0.1}]
    (run_dir / "metrics.jsonl").open("a").writelines(json.dumps(row) + "\n" for row in rows)
    config = {"format": 3, "policy": [], "run_name": "half \ud800"}
    config |= {"seed": math.nan, "list": [math.inf]}
    (run_dir / "config.json").write_text(json.dumps(config))
    assert report.main([str(run_dir)]) == 0
    text = (run_dir / "report/index.html").read_text("utf-8")
    parts = "1,000,000,000 of ? iterations ... NaN ... [Infinity] ... over the untrained system"
    assert holds(text, parts)
    assert "Traceback" not in capsys.readouterr().err


def test_recently_ungraded_episodes_raise_an_alarm() -> None:
    shares = [0.0] * 990 + [0.5] * 10
    rows = [{"iteration": it, "status/ungraded": value} for it, value in enumerate(shares, 1)]
    [alarm] = alarms(rows, {}, {})
    assert alarm.startswith("0.5% of the episodes") and alarm.count("50.0%") == 2


def test_a_category_may_have_any_name(tmp_path: Path) -> None:
    rows = {"0": (0.0, "held-out reward"), "1": (1.0, "b\n")}
    records = {n: dict(zip(("reward", "category"), row, strict=True)) for n, row in rows.items()}
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
    curves = facts_of(page_of(run_dir))["curves"]
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
