"""A config reads its own project's files and the shipped ones, whatever it writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tiny_config
from tiny_messages import names

from rl import simple_launch
from rl.config.imports import ROOT_VARIABLE
from rl.config.jsonnet import evaluate

OUTSIDE = "lies outside"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A clone with a config two folders down, and a secret beside the clone."""
    project = tmp_path / "project"
    (project / ".git").mkdir(parents=True)
    (project / ".git" / "config").write_text("https://hunter2@host")
    (project / ".env").write_text("hunter2")
    (project / "runs" / "mine").mkdir(parents=True)
    (project / "shared.libsonnet").write_text("{ a: 1 }")
    (tmp_path / "secret").write_text("hunter2")
    (project / "to_secret").symlink_to(tmp_path / "secret")
    (project / "to_folder").symlink_to(tmp_path)
    os.mkfifo(project / "pipe")
    return project


def told(config: Path, text: str, overrides: tuple[str, ...] = (), root: str = "") -> str:
    """What comes of it: its JSON, or why not."""
    config.write_text(text)
    values, problems = evaluate(config, overrides, {ROOT_VARIABLE: root} if root else {})
    return "; ".join(problems) if values is None or problems else json.dumps(values)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["importstr", "import", "importbin"])
@pytest.mark.parametrize(
    "place",
    [
        *("/etc/passwd", "/proc/self/environ", "/dev/zero", "../../../secret", "../../to_secret"),
        *("../../to_folder/secret", "../../to_folder/project/../secret", "./../.././../secret"),
        *("../../.git/config", "../../.env", "../../pipe", "..", ""),
    ],
)
def test_what_lies_elsewhere_is_not_read(project: Path, verb: str, place: str, monkeypatch) -> None:
    config = project / "runs" / "mine" / "run.jsonnet"
    importing = f"{verb} {json.dumps(place)}"
    in_a_file = told(config, f"{{ x: {importing} }}")
    assert OUTSIDE in in_a_file or "is hidden or no file" in in_a_file
    monkeypatch.chdir(config.parent)
    as_override = told(config, "{ x: 1 }", (f"x={importing}",))
    assert OUTSIDE in as_override or "is hidden or no file" in as_override
    for said in (in_a_file, as_override):
        assert "hunter2" not in said and "root:" not in said and len(said) < 600


def test_its_own_project_and_the_shipped_configs_are(project: Path) -> None:
    config = project / "runs" / "mine" / "run.jsonnet"
    assert told(config, "import '../../shared.libsonnet'") == '{"a": 1}'
    assert told(config, f"import '{project}/shared.libsonnet'") == '{"a": 1}'
    assert "format" in told(config, "{ names: std.objectFields(import 'base.libsonnet') }")
    assert told(config, "{ x: std.length(importstr 'earl/base.libsonnet') > 9 }") == '{"x": true}'
    assert "(at" in told(config, "{ x: importstr '../../../secret' }"), "the place is named"


def test_a_byte_order_mark_is_read_over_and_what_is_no_text_is_told(
    project: Path, monkeypatch
) -> None:
    config = project / "runs" / "mine" / "run.jsonnet"
    (project / "bom.libsonnet").write_text("{ a: importstr 'bom.txt' }", "utf-8-sig")
    (project / "bom.txt").write_text("b", "utf-8-sig")
    config.write_text("import '../../bom.libsonnet'", "utf-8-sig")
    assert evaluate(config, (), {}) == ({"a": "b"}, [])
    config.write_text("{ a: 1 }", "utf-16")
    assert names(evaluate(config, (), {})[1][0], "run.jsonnet ... UTF-16; save it as UTF-8")
    with (project / "huge.txt").open("wb") as file:
        file.truncate(3 << 30)
    for verb in ("import", "importstr", "importbin"):
        assert names(told(config, f"{{ a: {verb} '../../huge.txt' }}"), "huge.txt ... 16 MiB")


def test_without_a_clone_it_is_the_configs_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "other.libsonnet").write_text("{ a: 1 }")
    (tmp_path / "a" / "b" / "near.libsonnet").write_text("import '../other.libsonnet'")
    config = tmp_path / "a" / "b" / "run.jsonnet"
    assert OUTSIDE in told(config, "import '../other.libsonnet'")
    assert OUTSIDE in told(config, "import 'near.libsonnet'"), "nor does what it imports"
    assert told(config, "import '../other.libsonnet'", root=str(tmp_path / "a")) == '{"a": 1}'
    assert OUTSIDE in told(config, "import 'near.libsonnet'", root=str(config.parent))
    assert "is no folder" in told(config, "{}", root=str(tmp_path / "nowhere"))


def test_the_launcher_and_its_ranks_are_told_the_root(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, "")  # the launcher sets it for its ranks
    real = tiny_config.write(tmp_path, tiny_config.nothing(tmp_path))
    config = tmp_path / "mine" / "run.jsonnet"
    config.parent.mkdir()
    config.write_text(f"import '../{real.name}'")
    with pytest.raises(SystemExit) as refused:
        simple_launch.main(["--check", str(config)])
    assert refused.value.code == 1 and OUTSIDE in capsys.readouterr().err
    with pytest.raises(SystemExit) as passed:
        simple_launch.main(["--check", "--jsonnet-root", str(tmp_path), str(config)])
    assert passed.value.code == 0, capsys.readouterr().err
    assert os.environ[ROOT_VARIABLE] == str(tmp_path)
    with pytest.raises(SystemExit) as wrong:
        simple_launch.main(["--check", "--jsonnet-root", str(tmp_path / "no"), str(config)])
    assert wrong.value.code == 2
