"""README and docs agree with the code: metrics, file names, links and printed examples."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import _jsonnet
import pytest
import tiny_config
from PIL import Image
from tiny_config import REPO
from tiny_pages import printed, save_files
from tiny_typing import typing_errors

from rl import build
from rl.__main__ import COMMANDS
from rl.api.find import import_plugin
from rl.api.plugin import Resources
from rl.api.types import RenderJob, RewardInput, Sample
from rl.check import check_report
from rl.config.loading import MOVED, EarlFields, sections
from rl.config.schema import RunConfig, load_config
from rl.run.metric_table import markdown_table, shipped_rows

README = (REPO / "README.md").read_text(encoding="utf-8")
NAMES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "PROMISES.md", "SECURITY.md")
PAGES = [REPO / name for name in NAMES]
PAGES += sorted((REPO / "docs").glob("*.md"))


def test_the_page_of_metrics_lists_those_of_shipped_plugins() -> None:
    page = (REPO / "docs/metrics.md").read_text(encoding="utf-8")
    assert page.endswith(markdown_table(shipped_rows())), "python -m rl.run.metric_table"
    assert "(docs/metrics.md)" in README


def test_every_file_named_in_the_docs_exists() -> None:
    folders = r"(?:configs|scripts|rl|benchmarks|tests|examples)/"
    kinds = folders + r"[\w/.]*\w\.(?:jsonnet|libsonnet|sh|py|md)"
    paths = {path for page in PAGES for path in re.findall(kinds, page.read_text("utf-8"))}
    assert len(paths) >= 40
    assert [path for path in sorted(paths) if not (REPO / path).is_file()] == []


def test_the_reference_lists_all_that_a_reward_and_a_renderer_read() -> None:
    page = (REPO / "docs/reference.md").read_text(encoding="utf-8")
    for cls, more in ((RewardInput, ["words"]), (Sample, ["source"]), (RenderJob, [])):
        section = page.partition(f"### `{cls.__name__}`\n")[2].partition("\n### ")[0]
        names = [*more, *(field.name for field in fields(cls))]
        assert [name for name in names if f"| `{name}` |" not in section] == []
    assert "(docs/reference.md)" in README


def test_the_citation_is_of_this_package_and_version() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [entry] = [block for block in printed("README.md") if block.startswith("@software")]
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


@pytest.mark.slow
def test_the_plugins_of_the_docs_work_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [section] = [block for block in printed("docs/plugins.md") if block.startswith("rewards: ")]
    save_files("docs/plugins.md", tmp_path)
    save_files("docs/judge.md", tmp_path)
    files = sorted((tmp_path / "my_plugins").glob("*.py"))
    assert len(files) == 6 and typing_errors(files, tmp_path) == []
    [more] = [block for block in printed("README.md") if block.startswith("// in the config")]
    save_files("README.md", tmp_path)
    (tmp_path / "wishes.txt").write_text("a red cat\n\na blue dog\n")
    monkeypatch.syspath_prepend(tmp_path)
    values = json.loads(_jsonnet.evaluate_snippet("README", f"{{ {section} }} + {{ {more} }}"))
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
    brief, bright, colours = (
        plugin.cls(plugin.config, Resources(None, "cpu")) for plugin in resolved.rewards.values()
    )
    grey = Image.new("RGB", (4, 4), (51, 51, 51))
    gradient = Image.linear_gradient("L")
    inputs = [RewardInput(Sample("a", "b"), "c", image) for image in (grey, gradient)]
    assert bright.grade(inputs[0]) == pytest.approx(0.2) and brief.grade(inputs[0]) == 1.0
    plain, rich = colours.score_group(inputs)
    job = RenderJob(source[0], "a poster", noise_seed=0)
    poster = resolved.renderer.cls(resolved.renderer.config, Resources(None, "cpu"))
    [(_, drawn)] = poster.render([job])
    assert drawn.size == (512, 512) and len(set(drawn.tobytes())) > 1
    assert rich.value == 1.0 and plain.value == pytest.approx(plain.parts["share"] ** 0.5)


COMING = (REPO / "docs/coming-from.md").read_text(encoding="utf-8")


def shipped_keys() -> set[str]:
    """Every key of the schema, and of the shipped policies, engines and renderers."""
    models = [("", RunConfig)] + [
        (key, import_plugin(build.class_path(folder, name))[0].Config)
        for folder, key in [
            ("policies", "policy"),
            ("engines", "engine"),
            ("renderers", "renderer"),
        ]
        for name in build.SHIPPED[folder]
    ]
    parts = [part for key, model in models for part in sections(model, key)]
    return {f"{key}.{name}".strip(".") for key, part in parts for name in part.model_fields}


def test_the_page_for_newcomers_names_what_exists() -> None:
    """All names in its columns 'here'; behind these and in its sentences, those that look like a
    key in a section, `key: value` or a metric. Other projects' names come before 'here'."""
    keys, column, names = shipped_keys(), 0, []
    metrics = re.findall(r"^[^\t\n]+", (REPO / "rl/run/metrics.tsv").read_text("utf-8"), re.M)
    ours = "|".join({re.split("[./]", name)[0] for name in (*keys, *metrics)})
    for line in COMING.split("\n"):
        cells = line.split("|")
        column = cells.index(" here ") if " here " in cells else column
        here, *others = cells[column:] if cells[1:] else ("", line)
        names += re.findall("`([^`]+)`", here) + re.findall(
            rf"`((?:{ours})[./][^`]+|[\w.]+: [^`]+)`", "".join(others)
        )
    assert len(names) > 200
    patterns = [
        *(re.sub("<.*?>", ".+", name) for name in metrics),
        *(f"rl {name}( --.*)?" for name in COMMANDS),
        *(f"renderer.type: '{name}'" for name in build.SHIPPED["renderers"]),
    ]
    for name in names:
        key, _, value = name.replace("=", ": ", 1).partition(": ")
        is_named = re.fullmatch("|".join(patterns), name) or (REPO / name).exists()
        assert is_named or key in keys, name
        if value and not is_named:  # a value that its key does not take is refused
            build.resolve(tiny_config.shipped("qwen_image_edit", key + "=" + value.strip("'")))


def test_the_page_for_newcomers_agrees_with_the_code() -> None:
    """On EARL's fields, on nano.py's options, and on the batch of a shipped config."""
    assert set(EarlFields.model_fields) <= set(re.findall(r"`(\w+)`", COMING))
    assert {row for row in MOVED.items() if row[1] in shipped_keys()} <= set(
        re.findall(r"^\| `(\w+)` \| `(.+?)` \|", COMING, re.M)
    )
    nano = (REPO / "examples/nano.py").read_text().replace("_", "-")
    assert set(re.findall("`--([a-z0-9-]+)`", COMING)) <= set(re.findall(r"\n    ([\w-]+): ", nano))
    report = check_report.report(tiny_config.shipped("qwen_image_edit"), gpu_gb=141)[0]
    [batch] = [block for block in printed("docs/coming-from.md") if block.startswith("prompts ")]
    assert all(line.strip() in report for line in batch.split("\n"))


SEEDS, BENCH = "python -m benchmarks.seeds", "rl bench-gpu"
BESIDE, WANDER = "python -m benchmarks.side_by_side", "## How far controls wander"
SIX = "## One group of 8, prompt to completion 6:1 as in real runs (427 to 72 tokens)"
THIRTEEN = "## One group of 8, prompt to completion 13:1 (427 to 32 tokens)"
QUICKSTART = "## quickstart and its control: 8 new seeds, 256 fresh held-out samples"
SIMULATED = "python -m benchmarks.audit_power"
OPERATIONS = "python -m benchmarks.picture_flops"
DEFECTS = "python -m benchmarks.judge_defects"
QUOTED = [
    ("README.md", "20 sound runs gave no alarm", "python -m benchmarks.chain_faults",
     "chain_faults.md", "## Sound runs"),
    ("README.md", "none of 91 kills during a save lost anything",
     "python -m benchmarks.faults.saves", "faults.md",
     "## Kill -9 before each operation on a file of a save"),
    ("README.md", "it ran for 14 minutes, on one H100", BENCH, "gpu.md", ""),
    ("README.md", "about 150 s of training", SEEDS, "seeds.md", ""),
    ("README.md", "two iterations of a 7B policy with a 20B editor", BENCH, "gpu.md", "## Memory"),
    ("README.md", "rose by 0.27", SEEDS, "seeds.md", WANDER),
    ("README.md", "| 0.284 | **0.984 ± 0.002** | 0.981 | 0.298 ± 0.022 | 8 |",
     SEEDS, "seeds.md", QUICKSTART),
    ("README.md", "| 0.264 | **0.843 ± 0.013** | 0.832 | 0.282 ± 0.010 | 3 |",
     SEEDS, "seeds.md", "### tiny_qwen_image_21"),
    ("README.md", "| 0.257 | **0.947 ± 0.006** | 0.939 | 0.262 ± 0.009 | 3 |",
     SEEDS, "seeds.md", "### tiny_thinking"),
    ("README.md", "| 0.455 | **0.968 ± 0.004** | 0.964 | 0.472 ± 0.029 | 3 |",
     SEEDS, "seeds.md", "### tiny_prompts"),
    ("README.md", "| 0.262 | **0.951 ± 0.016** | 0.941 | 0.298 ± 0.055 | 3 |",
     SEEDS, "seeds.md", "### tiny_reasoning"),
    ("README.md", "| 0.284 | **0.873 ± 0.013** | 0.858 | 0.069 ± 0.010 | 3 |",
     SEEDS, "seeds.md", "### tiny_earl"),
    ("README.md", "Each score is the mean over 256 held-out samples",
     SEEDS, "seeds.md", QUICKSTART),
    ("README.md", "by 0.006 to 0.03 (standard error)", SEEDS, "seeds.md", ""),
    ("docs/first-run.md", "about 150 s", SEEDS, "seeds.md", ""),
    ("docs/first-run.md", "fell from 0.195 to 0.074", SEEDS, "seeds.md", "### tiny_earl"),
    ("docs/first-run.md",
     "by -0.080 to +0.078 over its first evaluation on 19 of 20 seeds, and once to +0.266 (seed "
     "4008: 0.327, 0.593, 0.373, 0.359, 0.420); `tiny_thinking_control` by -0.085 to +0.203; "
     "`tiny_earl_control` fell by 0.13 to 0.275", SEEDS, "seeds.md", WANDER),
    ("docs/first-run.md", "the quickstart's editor scores 1.00 before and after training (worst "
     "seed 0.98)", SEEDS, "seeds.md", QUICKSTART),
    ("docs/troubleshooting.md", "rose by 0.27", SEEDS, "seeds.md", WANDER),
    ("docs/memory-and-speed.md", "**1.3 times** this project's FLOPs on the policy side and 1.4 "
     "times its CPU seconds", BESIDE, "side_by_side.md", THIRTEEN),
    ("docs/memory-and-speed.md", "only 1.06 times the FLOPs and 1.08 times the CPU seconds** where "
     "the prompt is 13 times", BESIDE, "side_by_side.md", THIRTEEN),
    ("docs/memory-and-speed.md", "1.08 and 1.09 times", BESIDE, "side_by_side.md", SIX),
    ("docs/memory-and-speed.md", "commit 88593e05 measured 1.06 times the FLOPs and 1.01 to 1.08",
     BESIDE, "side_by_side.md", "# Side by side"),
    ("docs/memory-and-speed.md", "10.4 at 6:1, 14.5 at 13:1", BESIDE, "side_by_side.md", ""),
    *(("docs/memory-and-speed.md", f"| {six} | {thirteen} |", BESIDE, "side_by_side.md", "")
      for six, thirteen in (
          ("10.4x | 11.3x", "14.5x | 14.7x"), ("6.5x | 6.6x", "8.9x | 8.3x"),
          ("4.5x | 4.8x", "6.1x | 6.5x"), ("3.0x | 3.2x", "3.8x | 3.8x"),
          ("**1.3x** | **1.4x**", "**1.3x** | **1.4x**"),
          ("29.66 (29.48) |", "20.15 (20.06) |"))),
    ("docs/memory-and-speed.md", "stock 437 MB, tuned 629 MB, ours **219 MB**",
     BESIDE, "side_by_side.md", "## Memory"),
    ("docs/memory-and-speed.md", "stock 8.2 s, tuned 2.1 s, ours **1.9 s, and 0.0 s",
     BESIDE, "side_by_side.md", "## Latency"),
    ("docs/memory-and-speed.md", "1.19 to 1.35 times as fast as diffusers'",
     BENCH, "gpu.md", "## Speed"),
    ("docs/gpu.md", "rendering ran at 383 TFLOP/s", BENCH, "gpu.md", "## Speed"),
    ("docs/gpu.md", "had 0.03 to 0.045", BENCH, "gpu.md", "## Log-probs of a 7B in bfloat16"),
    ("docs/gpu.md", "(20.3 PFLOP)", OPERATIONS, "picture_flops.md", ""),
    ("docs/gpu.md", "(3.05 PFLOP)", OPERATIONS, "picture_flops.md", ""),
    ("docs/models.md", "Qwen-Image-Edit 20.3; Qwen-Image-Edit-2511 13.8; Qwen-Image-2.1 2.7 from "
     "text alone, and 3.1, 3.8 and 6.4 with 1, 3 and 10", OPERATIONS, "picture_flops.md", ""),
    ("docs/check-gpu.md", "with 16 cores", "rl check-gpu", "gpu.md", ""),
    ("docs/check-gpu.md", "took 179 s side by side", "rl check-gpu", "gpu.md",
     "## What was proven"),
    ("docs/judge.md", "with 64 cases 0.97 passes and 0.85 fails in at least 98 %",
     SIMULATED, "audit_power.md", ""),
    ("docs/judge.md", "under noise of 1 and 2 points of 10",
     "python -m benchmarks.judge_noise", "judge_noise.md", ""),
    ("docs/judge.md", "no_edit 64 75% 25% 0.88 (0.81-0.92) 0.25 0%",
     DEFECTS, "judge_defects.md", "## ignores a category"),
    ("docs/judge.md", "all kinds 576 88% 12% 0.94 (0.89-0.97) 0.12",
     DEFECTS, "judge_defects.md", "## ignores a category"),
    ("docs/judge.md", "erase 64 42% 58% 0.71 (0.54-0.84) 0.58",
     DEFECTS, "judge_defects.md", "## ignores a category"),
    ("docs/judge.md", "values: 2 levels; 79% are 0, 21% are 1 ungraded: 0 of 720 FAIL erase: AUROC "
     "0.71", DEFECTS, "judge_defects.md", "## ignores a category"),
]  # fmt: skip
"""(page, what it quotes, command that prints it, file of its results, section of that file)."""


def numbers(text: str) -> list[str]:
    """'16' of '16 cores' and '1.3' of '1.3x', nothing of 'H100', '-2511' or '88593e05'."""
    return re.findall(r"(?<![\w.])(?<![A-Za-z]-)\d+(?:\.\d+)?(?=x?B?%?(?!\w))", text)


@pytest.mark.parametrize(("page", "quote", "command", "results", "heading"), QUOTED)
def test_a_quoted_figure_is_what_its_command_printed(
    page: str, quote: str, command: str, results: str, heading: str
) -> None:
    """Up to rounding to the quote's digits."""
    assert quote in " ".join((REPO / page).read_text("utf-8").split())
    name = command.split()[-1]
    assert find_spec(COMMANDS[name].module if name in COMMANDS else name)
    text = (REPO / "benchmarks/results" / results).read_text("utf-8")
    assert command in " ".join(text.split())
    if heading:
        level = heading.split()[0]
        text = text.partition(f"{heading}\n")[2].partition(f"\n{level} ")[0]
    recorded = [float(number) for number in numbers(text)]
    for figure in numbers(quote):
        half_a_digit = 0.5 * 10 ** -len(figure.partition(".")[2]) + 1e-9
        near = [number for number in recorded if abs(number - float(figure)) <= half_a_digit]
        assert near, f"{figure} is not in {results} {heading}"
