"""README and docs agree with the code: metrics, file names, links and printed examples."""

from __future__ import annotations

import json
import os
import re
import textwrap
import tomllib
from dataclasses import fields
from pathlib import Path

import _jsonnet
import pytest
import tiny_config
from PIL import Image
from tiny_typing import typing_errors

from rl import build
from rl.api.plugin import Resources
from rl.api.types import RenderJob, RewardInput, Sample
from rl.check import check_report
from rl.config.schema import load_config
from rl.run.metric_table import markdown_table, shipped_rows
from rl.simple_launch import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "PROMISES.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def test_the_page_of_metrics_lists_those_of_shipped_plugins() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert page.endswith(markdown_table(shipped_rows())), "python -m rl.run.metric_table"
    assert "(docs/metrics.md)" in README


def test_every_file_named_in_the_docs_exists() -> None:
    folders = r"(?:configs|scripts|rl|benchmarks|tests|examples)/"
    kinds = folders + r"[\w/.]*\w\.(?:jsonnet|libsonnet|sh|py|md)"
    paths = {path for page in PAGES for path in re.findall(kinds, page.read_text("utf-8"))}
    assert len(paths) >= 40
    assert [path for path in sorted(paths) if not (ROOT / path).is_file()] == []


def test_the_page_of_plugins_lists_all_that_a_reward_and_a_renderer_read() -> None:
    page = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    named = [("x", RewardInput), ("x.sample", Sample), ("job", RenderJob)]
    names = [f"{name}.{field.name}" for name, cls in named for field in fields(cls)]
    names += ["x.words", "x.sample.source"]
    assert [name for name in names if f"`{name}" not in page] == []


def test_the_citation_is_of_this_package_and_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [entry] = printed("README.md", "Citing")
    assert f"version = {{{project['version']}}}" in entry and project["license"] in entry
    title = f"{project['name']}: {project['description']}"
    assert title in entry.replace("{", "").replace("}", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_the_docs_leads_to_a_page_and_heading(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        path, _, heading = link.partition("#")
        if path.startswith("https://"):
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.M) if heading else ()
        anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not heading or heading in anchors, link


def printed(page: str, heading: str = "") -> list[str]:
    """The code blocks of a page, or of one of its sections, verbatim."""
    text = (ROOT / page).read_text("utf-8")
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0] if heading else text
    blocks = re.findall(r"(?:^    .*\n|^\n)+", section, flags=re.M)
    return [textwrap.dedent(block).strip() + "\n" for block in blocks if block.strip()]


@pytest.mark.slow
def test_the_plugins_of_the_docs_work_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *plugins, section = printed("docs/plugins.md")
    (tmp_path / "my_plugins").mkdir()
    for code in plugins:
        (tmp_path / code.split("\n")[0].removeprefix("# ")).write_text(code)
    assert len(plugins) == 5
    assert printed("README.md", "Write a reward")[0].startswith(plugins[0])
    assert typing_errors(sorted((tmp_path / "my_plugins").glob("*.py")), tmp_path) == []
    (tmp_path / "wishes.txt").write_text("a red cat\n\na blue dog\n")
    monkeypatch.syspath_prepend(tmp_path)
    values = json.loads(_jsonnet.evaluate_snippet("README", f"{{ {section} }}"))
    values["data"]["train"][0]["path"] = str(tmp_path / "wishes.txt")
    qwen = {"type": "qwen2_5_vl", "model_path": "Qwen/Qwen2.5-VL-7B-Instruct"}
    config = load_config(
        tiny_config.write(tmp_path, tiny_config.real(tmp_path, policy=qwen, **values))
    )
    assert check_report.problems(config) == []

    resolved = build.resolve(config)
    [source] = build.build_data(resolved, resolved.train)
    assert (len(source), source.num_skipped) == (2, 1)
    assert source[1].instruction == "a blue dog"
    bright, colours = (
        plugin.cls(plugin.config, Resources(None, "cpu")) for plugin in resolved.rewards.values()
    )
    grey = Image.new("RGB", (4, 4), (51, 51, 51))
    gradient = Image.linear_gradient("L")
    inputs = [RewardInput(Sample("a", "b"), "c", image) for image in (grey, gradient)]
    assert bright.grade(inputs[0]) == pytest.approx(0.2)
    plain, rich = colours.score_group(inputs)
    job = RenderJob(source[0], "a poster", noise_seed=0)
    poster = resolved.renderer.cls(resolved.renderer.config, Resources(None, "cpu"))
    [(_, drawn)] = poster.render([job])
    assert drawn.size == (512, 512) and len(set(drawn.tobytes())) > 1
    assert rich.value == 1.0 and plain.value == pytest.approx(plain.parts["share"] ** 0.5)


def test_the_printed_commands_for_trainer_and_judge_on_one_machine_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = printed("docs/judge.md", "Trainer and judge on one machine")
    lines = [line for line in "\n".join(blocks).split("\n") if line]
    judge, exports, check, launch = lines[0], lines[1:-2], lines[-2], lines[-1]
    assert judge == "CUDA_VISIBLE_DEVICES=7 scripts/serve_judge.sh"
    for line in exports:
        for assignment in line.removeprefix("export ").split():
            name, _, value = assignment.partition("=")
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("APP__BASE_EXP_DIR", str(tmp_path))
    trained = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    assert sorted([*trained, "7"]) == list("01234567")
    assert check.replace("rl check", "rl train") == launch
    arguments = ["--check", *check.removeprefix("rl check ").split()]
    with pytest.raises(SystemExit) as done:
        main(arguments)
    text = " ".join(capsys.readouterr().out.split())
    assert done.value.code == 0 and text.endswith("nothing is wrong")
    assert f"prompts 14 an iteration 2 on each of {len(trained)} ranks" in text
