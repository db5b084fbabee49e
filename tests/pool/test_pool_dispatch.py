"""Batches reach actors, and others if something dies; nothing is lost or mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_messages import holds
from tiny_pictures import make_picture
from tiny_ray import FakeRay, Killed, Painter, jobs, make_pool, seeds_of

from rl.api.types import HiddenStates, RenderFailure, RenderJob, Sample
from rl.pool import ray_process
from rl.pool.pooled_renderer import PooledRenderer, packed
from rl.ranks import signals

ALL = {number: number for number in range(40)}


@pytest.fixture
def ray() -> FakeRay:
    return FakeRay()


@pytest.fixture
def pool(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> PooledRenderer:
    """Of two workers."""
    return make_pool(monkeypatch, ray, 2)


def failing(
    monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException, times: int, seed: int = -1
) -> None:
    """Makes `where` of the painters raise that often; `seed`: at the batch with this one only."""
    left = iter(range(times))

    def fail(seeds: Sequence[int] = ()) -> None:
        if (seed in seeds or seed < 0) and next(left, None) is not None:
            raise error

    monkeypatch.setattr(Painter, where, staticmethod(fail))


@pytest.mark.parametrize("count", [1, 2, 3, "'auto'"])
def test_every_number_of_workers_draws_the_same_batches(
    monkeypatch: pytest.MonkeyPatch, count: int | str
) -> None:
    pool = make_pool(monkeypatch, FakeRay(), count)
    pool.wait()
    assert pool.state_dim == 8
    assert seeds_of(pool.render(jobs(40))) == ALL
    batches = {tuple(range(i, i + 4)) for i in range(0, 40, 4)}
    assert {tuple(batch) for batch in Painter.drawn} == batches
    until_ready(pool, 3 if count == "'auto'" else int(count))
    assert pool.take_metrics() == {"pool_workers": pool._state.num_ready, "pool_restarts": 0}


def until_ready(pool: PooledRenderer, count: int) -> None:
    for _ in range(1000):
        if pool._state.num_ready == count:
            return
        pool._received()
    raise AssertionError(pool._state)


def test_jobs_are_taken_only_when_a_worker_has_a_free_slot(monkeypatch: Any) -> None:
    pool = make_pool(monkeypatch, FakeRay(), 1)
    pool.wait()
    taken: list[Any] = []
    counted = (taken.append(job) or job for job in jobs(40))  # type: ignore[func-returns-value]
    for drawn, _ in enumerate(pool.render(counted), 1):
        assert len(taken) <= drawn + 3 * 4 + 4


def test_large_pictures_and_jobs_never_make_both_sides_wait(
    pool: PooledRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe holds 200 kB: a side that writes while the other one does, too, must be read."""
    monkeypatch.setattr(Painter, "side_px", 1200)
    made = (RenderJob(Sample(f"{seed}", "x" * 2_000_000), "words", seed) for seed in range(40))
    assert seeds_of(pool.render(made)) == ALL


def test_a_dead_workers_batch_is_drawn_by_another_one(
    pool: PooledRenderer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, "on_draw", Killed(), times=1, seed=21)
    assert seeds_of(pool.render(jobs(40))) == ALL
    assert pool.take_metrics()["pool_restarts"] == 1
    assert holds(capsys.readouterr().err, "render_pool: worker ... is lost (killed)")
    until_ready(pool, 2)


def test_a_batch_that_kills_every_worker_is_ungraded_and_the_others_are_drawn(
    pool: PooledRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "on_draw", Killed(), times=99, seed=21)
    found = seeds_of(pool.render(jobs(40)))
    failed = {number for number, seed in found.items() if isinstance(seed, RenderFailure)}
    assert failed == {20, 21, 22, 23}
    assert holds(found[21].reason, "worker_lost: ... (after 3 tries)")
    assert all(found[number] == number for number in ALL.keys() - failed)


def test_a_batch_that_does_not_fit_is_halved_for_all_workers(
    pool: PooledRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Painter, "fits", 2)
    assert seeds_of(pool.render(jobs(40))) == ALL
    Painter.drawn.clear()
    assert seeds_of(pool.render(jobs(40))) == ALL
    assert {len(batch) for batch in Painter.drawn} == {2}


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_worker_that_draws_other_bits_is_not_used(
    pool: PooledRenderer,
    ray: FakeRay,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_restarted: bool,
) -> None:
    """Also one that was started in place of a dead one, which drew the right bits."""
    pool.wait()
    if is_restarted:
        assert seeds_of(pool.render(jobs(40))) == ALL
        until_ready(pool, 2)
    monkeypatch.setattr(Painter, "on_make", staticmethod(lambda: 1))
    if is_restarted:
        ray.kill(next(actor for name, actor in ray.actors.items() if name.endswith("/0")))
    assert seeds_of(pool.render(jobs(40))) == ALL
    for _ in range(100):
        pool._received(0.01)
    assert pool._state.num_ready == 1
    assert holds(capsys.readouterr().err, "worker 0 could not be started: it draws other bits")


def test_a_renderer_that_loads_nowhere_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "on_make", OSError("no weights"), times=3)
    pool = make_pool(monkeypatch, FakeRay(), 2)
    with pytest.raises(RuntimeError, match=r"no worker can draw (.|\n)*first: no weights"):
        pool.wait()


def test_one_worker_that_cannot_load_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "on_make", OSError("no weights"), times=2)
    assert seeds_of(make_pool(monkeypatch, FakeRay(), 2).render(jobs(40))) == ALL


def test_without_a_worker_the_run_waits_then_stops(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.hangs = lambda actor: True
    pool = make_pool(monkeypatch, ray, 2)
    monkeypatch.setattr(ray_process, "MAX_WAIT_S", 0.3)
    with pytest.raises(RuntimeError, match=r"no worker can draw after .* same command"):
        list(pool.render(jobs(8)))


def test_the_death_of_ray_is_an_error_that_a_run_saves_after(
    pool: PooledRenderer, ray: FakeRay
) -> None:
    pool.wait()
    ray.is_alive = False
    with pytest.raises(RuntimeError, match=r"raylet\) has ended.*same command"):
        list(pool.render(jobs(40)))
    with pytest.raises(RuntimeError, match="same command"):
        list(pool.render(jobs(40)))


def test_a_stop_is_noticed_while_workers_draw(
    pool: PooledRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = pool.render(jobs(40))
    next(outcomes)
    monkeypatch.setitem(signals._received_s, 15, 1.0)
    found = [outcome for _, outcome in outcomes if isinstance(outcome, RenderFailure)]
    assert holds(found[0].reason, "asked to stop")
    sources = [Sample("1", "red it", ())]
    assert pool.decode_sources(sources) == sources


def test_what_a_renderer_raises_is_raised(
    pool: PooledRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "on_draw", ValueError("true_cfg_scale"), times=99)
    with pytest.raises(RuntimeError, match=r"render_pool: .*true_cfg_scale"):
        list(pool.render(jobs(8)))


def test_another_worker_prepares_samples_if_one_dies(
    pool: PooledRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "on_draw", Killed(), times=1)
    samples = [Sample("a", "x", target=make_picture(2)), Sample("b", "y")]
    found = pool.decode_sources(samples)
    assert [sample.id for sample in found] == ["a", "b"]
    assert found[0].target is not None and found[0].target.tobytes() == make_picture(2).tobytes()
    failing(monkeypatch, "on_draw", Killed(), times=9)
    with pytest.raises(RuntimeError, match="decode_sources: worker_lost"):
        pool.decode_sources(samples)


def test_metrics_of_batches_are_weighted_by_their_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(monkeypatch, FakeRay(), 1)
    monkeypatch.setattr(
        Painter, "take_metrics", lambda self: {"share": float(len(self.drawn[-1]) == 1)}
    )
    assert len(seeds_of(pool.render(jobs(9)))) == 9  # batches of 4, 4 and 1
    assert pool.take_metrics()["share"] == pytest.approx(1 / 9)


def test_jobs_travel_without_what_only_rewards_read() -> None:
    states, shared = torch.zeros(2, 3), torch.ones(1, 3)
    sample = Sample("a", "x", target=make_picture(1), hidden={"answer": "7"})
    made = packed(RenderJob(sample, HiddenStates(states, shared), seed) for seed in range(2))
    assert all(job.sample.target is None and not job.sample.hidden for job in made)
    one, two = (job.payload for job in made)
    assert one.embeds.equal(states) and one.negative_embeds is two.negative_embeds
