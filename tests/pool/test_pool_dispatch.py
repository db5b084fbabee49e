"""Batches reach workers, and again other workers if something dies; nothing is lost or mixed."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_messages import holds
from tiny_pictures import make_picture
from tiny_pool import FakeWorker, FakeWorkers, dispatcher_of, jobs, seeds_of

from rl.api.types import RenderFailure, Sample
from rl.pool import pool_worker
from rl.pool.pool_worker import Worker
from rl.ranks import signals

ALL = {number: number for number in range(40)}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_number_of_workers_draws_the_same_batches(count: int) -> None:
    made = {f"w{i}": FakeWorker(seconds=1.0 + i) for i in range(count)}
    workers = FakeWorkers(**made)
    dispatcher = dispatcher_of(workers)
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    drawn = {tuple(batch) for worker in made.values() for batch in worker.batches}
    assert drawn == {tuple(range(i, i + 4)) for i in range(0, 40, 4)}
    assert all(worker.batches for worker in made.values()), "each one draws"
    num_drawn = sum(worker.num_drawn for worker in made.values())
    assert num_drawn == 10 + count - 1, "all but the first one draw the reference"
    metrics = dispatcher.take_metrics()
    assert (metrics["pool_workers"], metrics["pool_remote_share"]) == (count, 1.0)
    assert metrics["pool_restarts"] == 0
    assert 0 < metrics["pool_queue"] <= count, "each one draws a batch, and has one that waits"


def test_jobs_are_taken_only_when_a_worker_has_a_free_slot() -> None:
    workers = FakeWorkers(w=FakeWorker())
    dispatcher = dispatcher_of(workers, batches_per_worker=2)
    taken: list[Any] = []
    counted = (taken.append(job) or job for job in jobs(40))  # type: ignore[func-returns-value]
    for drawn, _ in enumerate(dispatcher.render(counted), 1):
        assert len(taken) <= drawn + 2 * 4 + 4


def test_a_dead_workers_batch_is_drawn_by_another_one(capsys: pytest.CaptureFixture[str]) -> None:
    dying = FakeWorker(dies=lambda number, _: number == 2)
    other = FakeWorker()
    dispatcher = dispatcher_of(FakeWorkers(a=dying, b=other))
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    assert dispatcher.take_metrics()["pool_restarts"] == 1
    assert holds(capsys.readouterr().err, "render_pool: a is lost (killed) ... drawn elsewhere")


def test_a_batch_that_kills_every_worker_is_ungraded_and_the_others_are_drawn() -> None:
    deadly = [FakeWorker(dies=lambda _, seeds: 21 in seeds) for _ in range(2)]
    workers = FakeWorkers(a=deadly[0], b=deadly[1])
    found = seeds_of(dispatcher_of(workers, max_tries=3).render(jobs(40)))
    failed = {number for number, seed in found.items() if isinstance(seed, RenderFailure)}
    assert failed == {20, 21, 22, 23}
    assert holds(found[21].reason, "worker_lost: killed (after 3 tries)")
    assert {number: seed for number, seed in found.items() if number not in failed}.items() <= (
        ALL.items()
    )


def test_a_worker_that_hangs_is_restarted_after_its_deadline() -> None:
    workers = FakeWorkers(a=FakeWorker(), b=FakeWorker())
    dispatcher = dispatcher_of(workers)
    assert len(seeds_of(dispatcher.render(jobs(8)))) == 8
    workers.workers["a"].hangs = True
    workers.workers["b"].hangs = True
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    assert dispatcher.take_metrics()["pool_restarts"] == 2


def test_a_straggler_is_hedged_once_and_the_first_result_wins() -> None:
    slow, fast = FakeWorker(), FakeWorker()
    workers = FakeWorkers(a=slow, b=fast)
    dispatcher = dispatcher_of(workers, batches_per_worker=1)
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    slow.seconds, began_s = 1000.0, workers.now_s
    drawn_before = len(slow.batches) + len(fast.batches)
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    assert workers.now_s - began_s < 60, "nobody waits for the slow worker"
    assert len(slow.batches) + len(fast.batches) - drawn_before == 10


def test_waiting_for_a_slow_workers_first_batch_makes_no_straggler() -> None:
    """Batches take 15 s and 10 s; the slow worker's second one is drawn from 15 s to 30 s."""
    slow, fast = FakeWorker(seconds=15), FakeWorker(seconds=10)
    workers = FakeWorkers(a=slow, b=fast)
    dispatcher = dispatcher_of(workers)
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    before = len(workers._calls)
    assert len(seeds_of(dispatcher.render(jobs(16)))) == 16
    calls = [method for _, _, method, _ in list(workers._calls.values())[before:]]
    assert calls.count("draw") == 4


def test_a_worker_draws_the_reference_once_for_all_ranks() -> None:
    fake, worker = FakeWorker(), Worker({"detached": False})
    worker.draw = fake.draw  # type: ignore[method-assign]
    message = pool_worker.packed_jobs(jobs(2))
    expected = pool_worker.digests_of(fake.draw(message)["outcomes"])
    for digests in (expected, expected, ["other"], ["other"]):
        assert worker.check(message, digests)["digests"] == expected
    assert fake.num_drawn == 3


def test_a_batch_that_does_not_fit_is_halved_for_all_workers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small, large = FakeWorker(fits=2), FakeWorker()
    workers = FakeWorkers(a=small, b=large)
    dispatcher = dispatcher_of(workers)
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    small.batches.clear(), large.batches.clear()
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    assert {len(batch) for batch in small.batches + large.batches} == {2}
    assert holds(capsys.readouterr().err, "renderer.batch_size: 4 ... from now on 2")


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (FakeWorker(facts={"torch": "3", "weights": "a"}), "has torch '3' instead of '2'"),
        (FakeWorker(facts={"torch": "2", "weights": "b"}), "has weights 'b' instead of 'a'"),
        (FakeWorker(shift=1), "draws other bits"),
        (FakeWorker(error="no such file"), "cannot load the renderer: no such file"),
    ],
)
def test_a_worker_that_would_draw_otherwise_is_refused(
    odd: FakeWorker, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = FakeWorkers(a=FakeWorker(), b=odd)
    dispatcher = dispatcher_of(workers)
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    assert dispatcher.ready == ["a"]
    assert holds(capsys.readouterr().err, f"b is not used: it {reason}")


def test_a_restarted_worker_is_checked_before_its_pictures_are_used() -> None:
    """It restarts with other weights between two batches, while nothing waits for it."""
    turned = FakeWorker()
    workers = FakeWorkers(a=turned, b=FakeWorker())
    dispatcher = dispatcher_of(workers)
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    turned.incarnation, turned.shift = 7, 1
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    assert dispatcher.ready == ["b"]


def test_without_a_worker_the_run_waits_then_stops() -> None:
    workers = FakeWorkers(a=FakeWorker())
    dispatcher = dispatcher_of(workers, max_wait_s=100)
    assert len(seeds_of(dispatcher.render(jobs(8)))) == 8
    workers.workers.clear()
    clock = iter(range(0, 1000, 10))
    dispatcher._clock = lambda: float(next(clock))
    with pytest.raises(RuntimeError, match=r"no worker is ready .*resumes with the same command"):
        list(dispatcher.render(jobs(8)))


def test_the_rank_draws_too_while_all_workers_are_busy() -> None:
    dispatcher, rank = dispatcher_of(FakeWorkers(a=FakeWorker(facts={"torch": "2"}))), FakeWorker()
    dispatcher.draws_here(rank.draw_here, {})
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    assert rank.batches[0] == [0, 1, 2, 3], "its first batch is the reference"
    assert 0 < dispatcher.take_metrics()["pool_remote_share"] < 1


def test_a_stop_is_noticed_while_workers_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = dispatcher_of(FakeWorkers(a=FakeWorker()))
    outcomes = dispatcher.render(jobs(40))
    next(outcomes)
    monkeypatch.setitem(signals._received_s, 15, 1.0)
    found = [outcome for _, outcome in outcomes if isinstance(outcome, RenderFailure)]
    assert holds(found[0].reason, "asked to stop")
    sources = [Sample("1", "red it", ())]
    assert dispatcher_of(FakeWorkers()).prepare("decode_sources", sources) == sources


def test_what_a_renderer_raises_is_raised_with_the_worker() -> None:
    workers = FakeWorkers(a=FakeWorker())
    answer = {"incarnation": "0", "raised": ("ValueError", "true_cfg_scale"), "seconds": 0.0}
    workers.workers["a"].draw = lambda message: answer  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="render_pool: a: true_cfg_scale"):
        list(dispatcher_of(workers).render(jobs(8)))


def test_memory_that_lacks_on_the_rank_halves_its_batch_too() -> None:
    """The failed batch must not become the reference, which all workers would miss."""
    dispatcher = dispatcher_of(FakeWorkers(a=FakeWorker()))
    dispatcher.draws_here(FakeWorker(fits=2).draw_here, {})
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    assert dispatcher.ready == ["a"]


def test_a_batch_with_failures_is_no_reference_and_the_loser_of_a_race_draws_again() -> None:
    workers = FakeWorkers(a=FakeWorker(shift=1))
    other = dispatcher_of(FakeWorkers(a=FakeWorker()))
    list(other.render(jobs(4)))
    workers.references.append(other.reference)  # type: ignore[arg-type]
    agree, asked = workers.agree, []
    # The other rank's reference arrives between this rank's question and its own.
    workers.agree = lambda own: asked.append(own) or (own and agree(own))  # type: ignore
    dispatcher = dispatcher_of(workers, max_wait_s=10)
    with pytest.raises(RuntimeError, match="draws other bits"):
        list(dispatcher.render(jobs(40)))
    assert len(asked) >= 2 and workers.workers["a"].num_drawn == 2


def test_an_error_of_one_worker_at_the_start_does_not_end_the_run() -> None:
    broken = FakeWorker(error="no weights")
    dispatcher = dispatcher_of(FakeWorkers(a=broken, b=FakeWorker()))
    assert dispatcher.state_dim() == 8
    alone = dispatcher_of(FakeWorkers(a=broken))
    with pytest.raises(RuntimeError, match="a: cannot load the renderer: no weights"):
        alone.state_dim()


def test_a_refused_worker_is_used_once_ray_has_started_it_elsewhere() -> None:
    odd = FakeWorker(facts={"torch": "3", "weights": "a"})
    workers = FakeWorkers(a=FakeWorker(), b=odd)
    dispatcher = dispatcher_of(workers)
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    odd.facts, odd.incarnation = {"torch": "2", "weights": "a"}, 1
    workers.now_s += 61
    assert seeds_of(dispatcher.render(jobs(40))) == ALL
    assert dispatcher.ready == ["a", "b"]


def test_another_worker_prepares_samples_if_one_dies() -> None:
    deaths = iter([True])
    dying = FakeWorker(dies=lambda *_: next(deaths, False))
    samples = [Sample("a", "x", target=make_picture(2)), Sample("b", "y")]
    found = dispatcher_of(FakeWorkers(a=dying, b=FakeWorker())).prepare("decode_sources", samples)
    assert [sample.id for sample in found] == ["a", "b"]
    assert found[0].target is not None and found[0].target.tobytes() == make_picture(2).tobytes()
    deadly = FakeWorker(dies=lambda *_: True)
    with pytest.raises(RuntimeError, match="no worker answers decode_sources"):
        dispatcher_of(FakeWorkers(a=deadly)).prepare("decode_sources", samples)


def test_metrics_of_batches_are_weighted_by_their_pictures() -> None:
    workers = FakeWorkers(a=FakeWorker())
    draw = workers.workers["a"].draw
    workers.workers["a"].draw = lambda message: {  # type: ignore[method-assign]
        **draw(message),
        "metrics": {"share": float(len(message["items"]) == 1)},
    }
    dispatcher = dispatcher_of(workers)
    assert len(seeds_of(dispatcher.render(jobs(9)))) == 9  # batches of 4, 4 and 1
    assert dispatcher.take_metrics()["share"] == pytest.approx(1 / 9)
