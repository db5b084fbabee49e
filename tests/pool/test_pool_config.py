"""A pool in the config: both ways to write it, its place in `rl check`, and what is refused."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import threading
import time
from unittest.mock import Mock

import psutil
import pytest
from tiny_messages import holds

from rl import build
from rl.check import check_report, compatibility
from rl.config.schema import ConfigError, RenderPoolConfig, RunConfig, load_config
from rl.pool import ray_cluster
from rl.ranks.dist import Dist
from rl.tools.commands import pool

QUICKSTART = "configs/quickstart.jsonnet"


def test_a_renderer_of_type_ray_pool_is_the_section_render_pool() -> None:
    inside = "renderer={type: 'ray_pool', of: {type: 'none'}, workers: 3, address: 'local'}"
    config = load_config(QUICKSTART, [inside])
    assert config.renderer == {"type": "none"} and config.render_pool is not None
    assert (config.render_pool.workers, config.render_pool.address) == (3, "local")
    outside = ["renderer={type: 'none'}", "render_pool={workers: 3, address: 'local'}"]
    assert load_config(QUICKSTART, outside) == config


@pytest.mark.parametrize(
    "wrong", ["workers=-1", "workers=many", "wrokers=2", "num_gpus=-1", "address=host"]
)
def test_a_wrong_key_of_the_pool_is_named(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"render_pool.{wrong.partition('=')[0]}"):
        load_config(QUICKSTART, [f"render_pool.{wrong}"])


def pooled(*overrides: str) -> RunConfig:
    return load_config(QUICKSTART, ["render_pool.workers=2", *overrides])


def test_ranks_keep_no_renderer_unless_they_draw_too() -> None:
    for overrides, keys in (
        ((), ["policy"]),
        (("render_pool.local=true",), ["policy", "renderer"]),
        (("render_pool.workers=0",), ["policy", "renderer"]),
    ):
        resolved = build.resolve(pooled(*overrides))
        assert [claim.key for claim in build.claims(resolved)] == keys


def test_check_counts_the_pool(tmp_path) -> None:
    text, code = check_report.report(pooled(f"base_exp_dir={tmp_path}"), 80)
    assert code == 0, text
    assert holds(text, "render pool ... 2 workers ... s with 2 workers")


def test_a_pool_without_ray_or_without_pictures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = build.resolve(pooled("renderer={type: 'none'}"))
    found = importlib.util.find_spec
    monkeypatch.setattr(
        compatibility, "find_spec", lambda name: None if name == "ray" else found(name)
    )
    problems = "\n".join(compatibility.plugin_problems(resolved))
    assert holds(problems, "render_pool: needs Ray ... vlm-edit-rl[ray]")
    assert holds(problems, "render_pool: renderer none draws nothing")


def test_a_pool_of_no_workers_is_not_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert pool.main(["start", QUICKSTART]) == 1
    assert holds(capsys.readouterr().err, "render_pool.workers: 0 ... 'auto'")


def test_a_pool_is_not_started_with_workers_that_end_with_a_run() -> None:
    workers = Mock(ray_cluster.RayWorkers)
    workers.name = "p"
    workers.status.return_value = [{"worker": "p/0", "state": workers.OF_A_RUN}]
    with pytest.raises(ValueError, match=r"render_pool\.name: a run has started"):
        pool._start(workers, RenderPoolConfig())
    workers.names.assert_not_called()


def test_an_error_of_a_rank_is_raised_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = (("", "", False), "no Ray process here")
    dist = Mock(Dist, is_main=False, gather=lambda own: [own, answer])
    with pytest.raises(ValueError, match="rank 1: no Ray process here"):
        ray_cluster.connect("local", dist)
    monkeypatch.setattr(ray_cluster, "_join_or_start", {}.pop)
    with pytest.raises(ValueError, match=r"^render_pool.address: TypeError: "):
        ray_cluster.connect("local", Dist())


def test_a_started_ray_ends_when_no_rank_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, raylet = Mock(), Mock(ppid=os.getpid, children=Mock(return_value=[]))
    ray._private.state.jobs.side_effect = [[{"IsDead": False}, {"IsDead": dead}] for dead in (0, 1)]
    monkeypatch.setattr(ray_cluster, "_ray", lambda: ray)
    monkeypatch.setattr(ray_cluster, "_raylets", [raylet])
    for _ in range(2):  # the second time without a raylet
        ray_cluster.disconnect(num_ranks=2)
        assert (ray._private.state.jobs.call_count, ray.shutdown.call_count) == (2, 1)


def test_the_death_of_the_raylet_interrupts_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGRTMAX, ray_cluster._interrupt)
    raylet = psutil.Popen(["sleep", "60"])
    monkeypatch.setattr(ray_cluster, "_raylets", [raylet])
    threading.Thread(target=ray_cluster._watch, args=[raylet]).start()
    with pytest.raises(RuntimeError, match=r"\(raylet.* has ended: .* same command"):
        raylet.kill()
        time.sleep(20)
    signal.signal(signal.SIGRTMAX, before)


def test_a_started_ray_gets_the_gpus_that_the_run_does_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    dist, used = Dist(device="cuda:0", world_size=2), {"cuda:0", "cuda:1", "cuda:3"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ray_cluster._free_gpus(dist, used) == ["2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert ray_cluster._free_gpus(dist, used) == ["6"]
    assert ray_cluster._free_gpus(Dist(), used) is None, "ranks on the CPU"
    judge = subprocess.Popen(["/bin/sleep", "60"], env={"CUDA_VISIBLE_DEVICES": "6,8"})
    with pytest.raises(ValueError, match=r"2 ranks .* use all GPUs .*--nproc"):
        ray_cluster._free_gpus(dist, used)
    judge.kill(), judge.wait()


def test_a_cluster_that_accepts_a_wrong_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`true` and `false` in place of the program that asks the head with a wrong token."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(ray_cluster.sys, "executable", shutil.which("false"))
    ray_cluster._require_token("127.0.0.1:1")
    for program, mode in (("true", "token"), ("false", "disabled")):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        monkeypatch.setattr(ray_cluster.sys, "executable", shutil.which(program))
        with pytest.raises(ValueError, match="set RAY_AUTH_MODE=token"):
            ray_cluster._require_token("127.0.0.1:1")
