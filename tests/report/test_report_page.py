"""`index.html`, the single-file report and their command: content, escaping and hostile input."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import shutil
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_messages import holds
from tiny_report import EVIL, write_evaluation, write_lines, write_run

from rl.files import json_line
from rl.run.metric_table import METRICS, doc_of
from rl.tools.commands import report
from rl.tools.report import page as single_file
from rl.tools.report import reading
from rl.tools.report.page import MAIN_METRICS, times, value_of, write_page, write_single_file
from rl.tools.report.reading import CURVES, MAX_POINTS, Evaluation, curve_data
from rl.tools.report.summary import alarms, learnt


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
    page, pages = write_page(tmp_path)
    assert "No iteration" in page.read_text() and pages.num_written == 0
    once = write_run(tmp_path / "run", num_iterations=0)
    write_page(once)
    text = " ".join(Tags((once / "report" / "index.html").read_text()).texts)
    assert holds(text, "0 of 4 iterations ... 1 held-out ... 0 groups")
    assert "\u2192" not in text.partition("Keys:")[0]


def facts_of(page: str) -> Any:
    return json.loads(page.partition("const page = {facts: ")[2].partition("};\n")[0])


def test_text_of_a_run_adds_no_html_tag(run_dir: Path) -> None:
    page, _ = write_page(run_dir)
    text = page.read_text("utf-8")
    plain = write_run(run_dir.parent / "plain")
    config = json.loads((plain / "config.json").read_text().replace(json.dumps(EVIL), '"kind"'))
    (plain / "config.json").write_text(json.dumps(config))
    tags = [tag for tag, _ in Tags(text).tags]
    assert tags == [tag for tag, _ in Tags(write_page(plain)[0].read_text("utf-8")).tags]
    assert f"mine {EVIL}" in "".join(Tags(text).texts)
    assert "alert(1)</script>" not in text.replace(html.escape(EVIL), "")


def test_the_page_loads_nothing_from_other_places(run_dir: Path) -> None:
    page, _ = write_page(run_dir)
    tags = Tags(page.read_text("utf-8")).tags
    keys = {name for _, attributes in tags for name in attributes}
    assert not {name for name in keys if name.startswith("on")}
    links = [a[key] for _, a in tags for key in ("src", "href") if a.get(key)]
    assert links and all(str(link).startswith(("#", "data:,", "../")) for link in links)
    [policy] = [a["content"] for _, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none';")
    assert "http" not in policy and "*" not in policy


def test_the_page_shows_what_was_learnt(run_dir: Path) -> None:
    page, _ = write_page(run_dir)
    text = " ".join(" ".join(Tags(page.read_text("utf-8")).texts).split())
    # s0, s1, s3, s4: gains 0.8, -0.6, 0.0, 0.1
    assert "all 4 0.425 0.500 +0.075" in text
    assert "noun 2 0.300 0.750 +0.450" in text
    assert holds(text, "Left out: 1 ... Drift: after 4 iterations")
    assert "render 7.5 75.0 %" in text
    data = value_of((run_dir / "report/data/metrics.js").read_text("utf-8"))
    assert data["docs"]["policy/entropy"][1] == METRICS["policy/entropy"].meaning
    assert data["of"]["policy/entropy"] == [None, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "metrics.jsonl").open("a").write('{"iter'), "metrics.jsonl (1)"),
        (lambda d: next(d.glob("episodes/*3.rank0*")).open("a").write("{"), "it_000003 (1)"),
        (lambda d: edit(d, lambda row: row.update({"groups/dead": 0.9}) is None), "are dead"),
        (lambda d: edit(d, lambda row: row.update({"status/ungraded": 0.3}) is None), "30.0%"),
        (lambda d: edit(d, lambda row: row.update({"drift/alarm": 1.0}) is None), "Drift: after"),
    ],
)
def test_damage_and_bad_metrics_give_alarms(tmp_path: Path, change: object, message: str) -> None:
    assert callable(change)
    run_dir = write_run(tmp_path / "run", num_iterations=3)
    assert "No alarm: no drift" in write_page(run_dir)[0].read_text()
    change(run_dir)
    text = write_page(run_dir)[0].read_text()
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
    _, pages = write_page(run_dir)
    path = run_dir / name
    path.rename(tmp_path / "theirs")
    path.symlink_to(tmp_path / "theirs")
    theirs = tmp_path / "theirs"
    before = theirs.stat().st_mtime_ns
    (run_dir / "metrics.jsonl").touch()
    for write in (write_page, partial(write_single_file, index=pages)):
        with pytest.raises(ValueError, match=re.escape(f"{path} is a link")):
            write(run_dir)
    assert theirs.stat().st_mtime_ns == before and not (run_dir / "report/report.html").exists()


def test_two_reports_are_not_written_at_the_same_time(run_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(reading, "MAX_WAIT_S", 0.1)
    with reading.for_one_report(run_dir / "report"):
        with pytest.raises(ValueError, match="another report"):
            write_page(run_dir)
        assert not (run_dir / "report/index.html").exists()
    write_page(run_dir)


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
    assert "1,000,000,000 iterations" in text
    assert "NaN" in text and "[Infinity]" in text and "the user&#39;s words: ?" in text
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


def embedded_data(page: str) -> Iterator[str]:
    for script in re.findall(r"<script>\n(page\.data\(.*?)</script>", page, re.DOTALL):
        yield script.strip() + "\n"


@pytest.mark.slow
def test_the_single_file_holds_what_fits_its_size_limit(run_dir: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(single_file, "MAX_BYTES", 1_000_000)
    draw = np.random.default_rng(0)
    noise = Image.fromarray(draw.integers(0, 255, (160, 160, 3), dtype=np.uint8))
    for path in [*run_dir.glob("images/*/*"), *run_dir.glob("evaluation/*/*.png")]:
        noise.save(path)
    for iteration in range(5, 14):
        for kind in ("images/it_{}", "episodes/it_{}.rank0.jsonl"):
            old = run_dir / kind.format("000004")
            new = run_dir / kind.format(f"{iteration:06d}")
            if old.is_dir():
                shutil.copytree(old, new)
            else:
                new.write_text(old.read_text().replace("it_000004", f"it_{iteration:06d}"))
    assert report.main([str(run_dir), "--page-only", "--single-file"]) == 0
    output = capsys.readouterr().out
    page = run_dir / "report/report.html"
    assert 800_000 < page.stat().st_size <= 1_000_000
    text = page.read_text("utf-8")
    num_inside = text.count("data:image/webp;base64,")
    [(count, left_out)] = re.findall(r"(\d+) thumbnails inside, (\d+) pictures left out", output)
    assert int(count) == num_inside > 20 and int(left_out) > 0
    assert f"{left_out} pictures" in text
    parts = [script.split('"')[1] for script in embedded_data(text)]
    assert {"eval_000000", "eval_000004", "it_000013", "find_000000"} < set(parts)
    embedded = {int(name[3:]) for name in parts if name.startswith("it_")}
    listed = [int(it) for s in embedded_data(text) if '"find_' in s for it in value_of(s)]
    assert sorted(embedded) == sorted(listed)


def test_the_single_file_has_everything_while_there_is_room(run_dir: Path, capsys) -> None:
    """Also evaluations between the first and the last, and sheets of thumbnails."""
    write_evaluation(run_dir, 2, [0.5])
    path = run_dir / "episodes/it_000004.rank0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    sheet = run_dir / "thumbnails/it_000004/rank0_g00.webp"
    sheet.parent.mkdir(parents=True)
    Image.new("RGB", (32, 16)).save(sheet)
    for row in rows:
        row |= {"image_file": None, "thumbnail": "thumbnails/it_000004/rank0_g00.webp#xywh=0,0,9,9"}
    write_lines(path, rows)
    assert report.main([str(run_dir), "--page-only", "--single-file"]) == 0
    assert "0 pictures left out" in capsys.readouterr().out
    text = (run_dir / "report/report.html").read_text("utf-8")
    parts = {script.split('"')[1] for script in embedded_data(text)}
    assert parts >= {f"eval_{it:06d}" for it in (0, 2, 4)} | {f"it_{it:06d}" for it in range(1, 5)}
    content = base64.b64encode(sheet.read_bytes()).decode()
    place = '"../thumbnails/it_000004/rank0_g00.webp"'
    assert f'{place}:"data:image/webp;base64,{content}"' in text


def test_every_curve_has_a_meaning() -> None:
    for curve in CURVES:
        for line in curve.lines:
            assert doc_of(line.metric), line.metric


def test_the_main_metrics_are_shown_first(run_dir: Path) -> None:
    page, _ = write_page(run_dir)
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
