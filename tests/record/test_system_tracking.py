"""wandb in its offline mode, and failures of wandb that must not affect the run."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import wandb
from PIL import Image
from tiny_run import episode, run_config

from rl import trackers
from rl.ranks.dist import Dist
from rl.record.run_record import RunRecord
from rl.trackers import BeforeAfter, Tracker, allowed_by_env, page_id

TABLES = "wandb/offline-run-*/files/media/table"
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_wandb_in_the_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "run" / "wandb"))


def tracker(folder: Path, mode: str, dist: Dist | None = None, **config: Any) -> Tracker:
    config = run_config(tracking={"wandb": mode, "images_per_iteration": 3}, **config)
    dist = dist or Dist()
    return Tracker(folder / "run", config, dist, RunRecord(folder / "run", config, dist).config)


def use(tracker: Tracker) -> None:
    """Calls the tracker as the training loop does."""
    tracker.log_episodes(1, [[episode(), episode()]], [[1.0, -1.0]])
    tracker.log(1, {"reward/mean": 0.25})
    tracker.close()


def page_of(folder: Path) -> bytes:
    (page,) = (folder / "run").glob("wandb/offline-run-*/run-*.wandb")
    return page.read_bytes()


@pytest.mark.slow
def test_an_offline_page_has_scalars_table_and_config_but_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("JUDGE_TOKEN", "hunter2-hunter2")
    page = tracker(tmp_path, "offline", rewards={"judge": {"type": "x", "header": KEY}})
    page.log_episodes(1, [[episode(failure="401: hunter2-hunter2")]], [[1.5]])
    page.log(1, {"reward/mean": 0.25})
    page.close()
    assert b"reward/mean" in page_of(tmp_path) and b"iteration" in page_of(tmp_path)
    (table,) = (tmp_path / "run").glob(f"{TABLES}/episodes_*.json")
    columns = ["source", "target", "rendered", "instruction", "completion", "status", "failure"]
    columns += ["reward", "judge", "judge/edit_success", "advantage"]
    assert table.read_text().count('"make it red"') == 1
    assert all(f'"{column}"' in table.read_text() for column in columns)
    staged = [p for p in (tmp_path / "run" / "wandb" / "artifacts").rglob("*") if p.is_file()]
    pictures = [path for path in staged if path.read_bytes().startswith(b"\x89PNG")]
    assert len(pictures) == 3  # source, target and rendered picture, kept for `wandb sync`
    assert (tmp_path / "run" / "wandb").stat().st_mode & 0o777 == 0o700, "it holds completions"
    for path in tmp_path.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert KEY.encode() not in data and b"hunter2" not in data, path


@pytest.mark.slow
def test_a_resumed_page_shows_the_new_config(tmp_path, monkeypatch):
    """Here the page's earlier config has another seed, as wandb's server gives it on a resume."""
    init, runs = trackers._init, []

    def resumed(*args: Any) -> Any:
        runs.append(init(*args))
        runs[0].config.update({"seed": 1})
        return runs[0]

    monkeypatch.setattr(trackers, "_init", resumed)
    use(tracker(tmp_path, "offline", seed=3))
    assert runs[0].config["seed"] == 3 and runs[0].config["run_name"] == "tiny"


@pytest.mark.slow
def test_the_page_begins_with_the_main_metrics_pictures_and_what_was_learnt(tmp_path):
    picture = Image.new("RGB", (80, 32), "red")
    compared = BeforeAfter(4, [("make it red | before (0.1): a", picture)], {"learnt/gain": 0.5})
    page = tracker(tmp_path, "offline")
    page.log_before_after(lambda: None)
    page.log_before_after(lambda: compared)
    page.log(4, {"reward/mean": 0.25, "loss/total": 1.0})
    run = wandb.run
    assert (run.summary["0_main/training_reward"], run.summary["learnt/gain"]) == (0.25, 0.5)
    shown = run.summary["0_main/before_after"]
    assert shown["captions"] == ["make it red | before (0.1): a"] and shown["width"] == 80
    assert run.summary.get("0_main/kl") is None
    page.close()
    assert (
        len(list((tmp_path / "run/wandb").glob("offline-run-*/files/media/images/0_main/*"))) == 1
    )


def test_wandb_is_not_imported_when_off_or_on_other_ranks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    for page in (tracker(tmp_path, "off"), tracker(tmp_path, "online", Dist(1, 2))):
        use(page)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_wandb_run_id_names_the_page_of_a_new_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_RUN_ID", "sft_s__rl_sc")
    for resumed_in_another_shell in (False, True):
        if resumed_in_another_shell:
            monkeypatch.delenv("WANDB_RUN_ID")
        page = tracker(tmp_path, "offline")
        assert wandb.run.id == "sft_s__rl_sc"
        use(page)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("WANDB_RUN_ID", "of_another_run")
    assert page_id(tmp_path / "run") == "sft_s__rl_sc"
    assert page_id(tmp_path / "new") == "of_another_run"


@pytest.mark.slow
def test_a_wandb_run_id_that_wandb_refuses_gives_a_warning_and_is_not_kept(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("WANDB_RUN_ID", "sft/s:1")
    use(tracker(tmp_path, "offline"))
    assert "Run ID" in capsys.readouterr().err
    monkeypatch.delenv("WANDB_RUN_ID")
    use(tracker(tmp_path, "offline"))
    assert b"reward/mean" in page_of(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "line", "limit_s"),
    [
        ({}, "no API key", 2),
        ({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}, "127.0.0.1:9", 5),
    ],
)
def test_online_without_key_or_network_continues_offline_at_once(
    tmp_path, monkeypatch, capfd, environ, line, limit_s
):
    tries_s = []
    setup = wandb.setup
    monkeypatch.setattr(
        wandb, "setup", lambda **kw: (tries_s.append(time.monotonic()), setup(**kw))[1]
    )
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    started_s = time.monotonic()
    page = tracker(tmp_path, "online")
    # The time until wandb starts; how long its offline start takes depends on the machine.
    assert [at_s - started_s < limit_s for at_s in tries_s] == [True]
    use(page)
    warnings = [text for text in capfd.readouterr().err.splitlines() if "WARNING" in text]
    assert len(warnings) == 1 and line in warnings[0] and "offline" in warnings[0]
    assert b"reward/mean" in page_of(tmp_path)


@pytest.mark.slow
def test_a_hanging_upload_does_not_delay_the_end(tmp_path, monkeypatch, capfd):
    page = tracker(tmp_path, "offline")
    run, hangs = wandb.run, _Hangs()
    finish = run.finish
    monkeypatch.setattr(run, "finish", hangs.finish)
    monkeypatch.setattr(trackers, "FINISH_TIMEOUT_S", 0.2)
    page.close()
    assert hangs.began.is_set() and not hangs.ended.is_set()
    assert "no answer in 0.2 s" in capfd.readouterr().err
    finish()
    hangs.answer.set()


class _Hangs:
    def __init__(self) -> None:
        self.began, self.answer, self.ended = (threading.Event() for _ in range(3))

    def finish(self, exit_code: int) -> None:
        self.began.set()
        self.answer.wait(60)
        self.ended.set()
        raise OSError("so that the page of the next test is not closed")


@pytest.mark.parametrize(
    ("configured", "from_env", "allowed"),
    [
        ("online", "", "online"),
        ("online", "offline", "offline"),
        ("online", "disabled", "off"),
        ("offline", "online", "offline"),
        ("offline", "disabled", "off"),
    ],
)
def test_wandb_mode_can_only_lower_the_configured_mode(monkeypatch, configured, from_env, allowed):
    if from_env:
        monkeypatch.setenv("WANDB_MODE", from_env)
    assert allowed_by_env(configured) == allowed
