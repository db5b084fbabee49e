"""A pool in the config, its place in `rl check`, and what is refused."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from unittest.mock import Mock

import pytest
from tiny_messages import holds, raising

from rl import build
from rl.check import check_report, compatibility
from rl.config.schema import ConfigError, RunConfig, load_config
from rl.pool import pooled_renderer, ray_process
from rl.ranks.dist import Dist

QUICKSTART = "configs/quickstart.jsonnet"


@pytest.mark.parametrize(
    "wrong",
    ["workers=-1", "workers=many", "wrokers=2", "num_gpus=-1", "address=host", "address=local"],
)
def test_a_wrong_key_of_the_pool_is_named(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"render_pool.{wrong.partition('=')[0]}"):
        load_config(QUICKSTART, [f"render_pool.{wrong}"])


def pooled(*overrides: str) -> RunConfig:
    return load_config(QUICKSTART, ["render_pool.workers=2", *overrides])


def test_ranks_keep_no_renderer_beside_a_pool() -> None:
    for overrides, keys in (((), ["policy"]), (("render_pool.workers=0",), ["policy", "renderer"])):
        assert [claim.key for claim in build.claims(build.resolve(pooled(*overrides)))] == keys


def test_check_counts_the_pool(tmp_path) -> None:
    text, code = check_report.report(pooled(f"base_exp_dir={tmp_path}"), 80)
    assert code == 0 and holds(text, "render pool: 2 workers, Ray at"), text


def test_a_pool_without_ray_or_without_pictures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = build.resolve(pooled("renderer={type: 'none'}"))
    found = importlib.util.find_spec
    monkeypatch.setattr(
        compatibility, "find_spec", lambda name: None if name == "ray" else found(name)
    )
    problems = "\n".join(compatibility.plugin_problems(resolved))
    assert holds(problems, "render_pool: needs Ray ... vlm-edit-rl[ray]")
    assert holds(problems, "render_pool: renderer none draws nothing")


def test_an_error_of_a_rank_is_raised_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, config = build.resolve(pooled()).renderer, pooled()
    dist = Mock(Dist, rank=0, world_size=2, device="cpu")
    dist.gather = lambda own: [own, "rank 1: no Ray process here"]
    for started, of, message in (
        (Mock(return_value="here"), dist, "rank 1: no Ray process here"),
        (Mock(side_effect=OSError("full")), Dist(), r"^rank 0: full$"),
    ):
        monkeypatch.setattr(pooled_renderer.PooledRenderer, "_started", started)
        with pytest.raises(ValueError, match=message):
            pooled_renderer.pooled(plugin, config, of)


def test_a_cluster_that_cannot_be_reached_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Mock(init=Mock(side_effect=ConnectionError("refused")))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_process, "_require_token", lambda address: None)
    with pytest.raises(ValueError, match=r"no Ray cluster answers at '127.0.0.1:1'"):
        ray_process.connect("127.0.0.1:1")


def test_a_cluster_that_accepts_a_wrong_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`true` and `false` in place of the program that asks the head with a wrong token."""
    refused = "set RAY_AUTH_MODE=token"
    for program, mode, parts in (
        ("false", "token", ""),
        ("true", "token", refused),
        ("false", "disabled", refused),
    ):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        monkeypatch.setattr(ray_process.sys, "executable", shutil.which(program))
        with raising(ValueError, parts):
            ray_process._require_token("127.0.0.1:1")
