"""`from rl import check, train, load_run, Editor`, and the notebook of the docs."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_config
import tiny_loop
import tiny_report
from PIL import Image

from rl.config.schema import ConfigError
from rl.tools.notebook import TrainingError, check, load_run, train

DOCS = Path(__file__).parents[2] / "docs"


def run_python(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=tiny_loop.environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_import_rl_is_light_and_modules_of_the_same_names_stay_callable(tmp_path: Path) -> None:
    run_python(
        """
import sys, rl
assert not {"torch", "pydantic", "numpy", "PIL"} & sys.modules.keys()
from rl import check, load_run, train
assert "torch" not in sys.modules and check.__doc__ and train.__doc__
import rl.train, rl.check.check_report
assert rl.train.main and rl.check.check_report.problems
assert "no such config file" in rl.check("nowhere.jsonnet").problems[0]
try:
    rl.train("nowhere.jsonnet")
except ValueError as error:
    assert "nowhere.jsonnet" in str(error)
""",
        tmp_path,
    )


def test_a_run_is_read_as_tables(tmp_path: Path) -> None:
    run = load_run(tiny_report.write_run(tmp_path / "tiny"))
    assert run.iterations_done == 4 and run.evaluations == [0, 4] and not run.is_running
    assert run.config["run_name"] == "tiny"
    per_iteration = tiny_report.NUM_GROUPS * tiny_report.NUM_COMPLETIONS
    assert len(run.episodes()) == 4 * per_iteration
    assert len(run.episodes(3)) == len(run.episodes([2, 99])) == per_iteration
    with pytest.raises(ValueError, match="of iteration 99; recorded: 4 from 1 to 4"):
        run.episodes(99)
    with pytest.raises(ValueError, match="of iteration 3; recorded: 2 from 0 to 4"):
        run.held_out(3)
    row = run.episodes(3)[0]
    assert (row.iteration, row.rank, row.member, row.bare_reward) == (3, 0, 0, 0.125)
    record = tiny_report.episode(3, 0, 0)
    assert (row.words, row.reward, row.parts) == (
        record["completion"], record["reward"], record["parts"])  # fmt: skip
    image, [source], target = row.image(), row.sources(), row.target()
    assert image is not None and image.getpixel((0, 0)) == (255, 0, 0)
    assert source.getpixel((0, 0)) == (0, 0, 255) and target is None
    held_out = run.held_out(4).frame()
    assert held_out.reward.mean() == pytest.approx((0.9 + 0.3 + 0.8 + 0.2 + 0.6) / 5)
    assert {"iteration", "sample_id", "reward", "stock_reward"} <= set(held_out.columns)
    assert list(run.metrics().frame().iteration) == [0, 1, 2, 3, 4]
    assert "<table" in run.episodes(1)._repr_html_()


def test_a_run_is_read_while_it_goes_on(tmp_path: Path) -> None:
    folder = tiny_report.write_run(tmp_path / "tiny", num_iterations=2)
    run = load_run(folder)
    with (folder / ".lock").open("w") as lock, (folder / "metrics.jsonl").open("a") as file:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file.write('{"iteration": 3, "reward/mean": 0.5}\n{"iteration": 4, "rew')
        file.flush()
        assert run.is_running and run.iterations_done == 3
        assert run.metrics()[-1]["reward/mean"] == 0.5
    assert not run.is_running


def test_a_picture_outside_of_the_run_is_not_opened(tmp_path: Path) -> None:
    folder = tiny_report.write_run(tmp_path / "tiny", num_iterations=1)
    row = tiny_report.episode(1, 0, 0) | {"image_file": "../secret.png"}
    tiny_report.write_lines(folder / "episodes/it_000001.rank0.jsonl", [row])
    assert load_run(folder).episodes(1)[0].image() is None


def test_a_thumbnail_stands_for_a_picture_that_was_not_saved(tmp_path: Path) -> None:
    folder = tiny_report.write_run(tmp_path / "tiny", num_iterations=1)
    place = "thumbnails/it_000001/rank0_g00.webp"
    sheet = Image.new("RGB", (32, 16), "blue")
    sheet.paste("red", (16, 0, 32, 16))
    (folder / place).parent.mkdir(parents=True)
    sheet.save(folder / place, lossless=True)
    small = {"thumbnail": f"{place}#xywh=16,0,12,8", "source_thumbnails": [f"{place}#xywh=0,0,8,8"]}
    gone = {"image_file": None, "source_file": None, "target_thumbnail": f"{place}#xywh=0,0,x,8"}
    row = tiny_report.episode(1, 0, 0) | small | gone
    tiny_report.write_lines(folder / "episodes/it_000001.rank0.jsonl", [row])
    [read] = load_run(folder).episodes(1)
    image, [source] = read.image(), read.sources()
    assert image is not None and (image.size, image.getpixel((0, 0))) == ((12, 8), (255, 0, 0))
    assert (source.size, source.getpixel((7, 7))) == ((8, 8), (0, 0, 255))
    assert read.target() is None


@pytest.mark.slow
def test_mistakes_are_reported(tmp_path: Path) -> None:
    values = tiny_config.nothing(tmp_path, num_iterations=0)
    with pytest.raises(ConfigError, match="num_iterations"):
        train(values)
    found = check(values)
    assert not found.ok and "num_iterations" in found.problems[0]
    assert check(values, {"base_exp_dir": tmp_path}).problems == found.problems
    assert 'data.train: "{1}" given' in check(values, {"data.train": {1}}).text
    values["num_iterations"] = 3
    with pytest.raises(TrainingError, match="'tiny_p") as failure:
        train(values, {"seed": 7}, nproc=2, echo=False)
    assert failure.value.code == 1
    with pytest.raises(ValueError, match="is no run folder"):
        load_run(tmp_path)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = json.loads((DOCS / "notebook.ipynb").read_text("utf-8"))
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert len(cells) == 6
    # A notebook shows the value of a cell's last expression.
    show = """
import ast
def cell(code):
    *first, last = ast.parse(code).body
    exec(compile(ast.Module(first, []), "cell", "exec"), globals())
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), globals())
        print(type(value).__name__, getattr(value, "shape", getattr(value, "size", value)))
    else:
        exec(compile(ast.Module([last], []), "cell", "exec"), globals())
"""
    out = run_python(show + "\n".join(f"cell({code!r})" for code in cells), tmp_path)
    assert "DataFrame (3, 4)" in out and "DataFrame (5, 4)" in out
    assert "2 iterations done, not running" in out
    assert out.count("Image (64, 64)") == 2
