"""Pictures over HTTP from a local images API: what is asked, learnt, refused and repeated."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_loop
import tiny_qwen
from PIL import Image
from tiny_faulty_judge import MODEL, Fault, dripping, page, raw
from tiny_images_api import REFUSED, ImagesServer, body_of, expected, job_of, renderer_of
from tiny_messages import holds, raising

from rl.api.types import RenderFailure, RenderJob
from rl.judge.client import JudgeError
from rl.renderers.images_api import Config, ImagesApi

PICTURE = Image.effect_noise((16, 16), 99).convert("RGB")


def outcomes_of(jobs: Sequence[RenderJob], *servers: ImagesServer | str, **changes: Any) -> Any:
    """(the outcomes in the order of the jobs, the metrics)"""
    with closing(renderer_of(*servers, **changes)) as renderer:
        outcomes = dict(renderer.render(iter(jobs)))
        return [outcomes[number] for number in range(len(jobs))], renderer.take_metrics()


@pytest.mark.parametrize("num_sources", [0, 1, 3])
def test_a_request_has_words_seed_sources_and_further_fields(num_sources: int) -> None:
    job = job_of("paint it", 1, num_sources)
    extra = {"num_inference_steps": 4, "negative_prompt": "blur", "quality": None}
    with ImagesServer() as server:
        [picture], _ = outcomes_of([job], server, extra=extra, width_px=64, height_px=32)
    assert picture == expected(server, job) and picture.mode == "RGB"
    [request] = server.requests
    assert {name: str(value) for name, value in request.items()} == {
        "path": "/v1/images/edits" if num_sources else "/v1/images/generations",
        **{"num_images": str(num_sources), "model": MODEL, "prompt": "paint it", "seed": "5"},
        **{"size": "64x32", "response_format": "b64_json", "output_format": "png"},
        **{"num_inference_steps": "4", "negative_prompt": "blur"},
    }


@pytest.mark.parametrize(
    ("server", "num_sources", "seeds_hold", "num_requests", "warning"),
    [
        ({}, 0, 1.0, 4, ""),
        ({}, 2, 1.0, 5, ""),
        ({"ignored": ["seed"]}, 1, 1.0, 5, "ignores the seed"),
        ({"refused_fields": ["output_format", "response_format"]}, 1, 1.0, 7, "without output_fo"),
        ({"refused_fields": ["seed"]}, 1, 0.0, 2, "equal seed ... takes no seed"),
        ({"noisy": True}, 1, 0.0, 5, "equal seed ... of 255 levels"),
    ],
)
def test_made_up_requests_tell_whether_seeds_hold(
    server: dict[str, Any],
    num_sources: int,
    seeds_hold: float,
    num_requests: int,
    warning: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ImagesServer(**server) as api:
        _, metrics = outcomes_of([job_of("a", num_sources=num_sources)] * 2, api, is_first=True)
    assert metrics["seeds_hold"] == seeds_hold and len(api.requests) == num_requests + 2
    assert not api.requests[-1].keys() & {*api.refused_fields}, "it is not sent again"
    assert holds(caplog.text, warning) and bool(caplog.text) == bool(warning)


@pytest.mark.parametrize(
    ("server", "num_sources", "num_requests", "error"),
    [
        ({"ignored": ["prompt"]}, 0, 4, "renderer ignores the prompt"),
        ({"ignored": ["images"]}, 2, 5, "ignores the last source picture ... renderer.model"),
        ({"ignored": ["images", "prompt"]}, 1, 5, "the prompt and the last source"),
        ({"faults": [Fault(400, body="no 3 px")]}, 0, 1, "no 3 px ... renderer.extra"),
        ({"faults": [Fault(401, body="who?")]}, 0, 1, "401 ... renderer.api_key_env"),
        ({"faults": [Fault(404, body="what?")]}, 1, 1, "404 ... renderer.model='tiny-judge'"),
        ({"faults": [Fault(500, body="ow")] * 6}, 0, 6, "http_500: ow ... renderer.api_base"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_at_the_first_picture(
    server: dict[str, Any], num_sources: int, num_requests: int, error: str
) -> None:
    with ImagesServer(**server) as api, raising(JudgeError, error):
        outcomes_of([job_of("a", num_sources=num_sources)], api, is_first=True)
    assert len(api.requests) == num_requests


def test_a_refusal_is_the_policys_failure_only_if_the_users_words_pass() -> None:
    wicked = f"some {REFUSED}"
    jobs = [job_of(f"{REFUSED} {n}") for n in range(3)] + [job_of("a wish"), job_of("fine", 1)]
    with ImagesServer() as server:
        outcomes, metrics = outcomes_of(
            [*jobs, job_of(wicked, 2, wish=wicked)], server, price_per_picture=0.5
        )
    assert [getattr(outcome, "blame", None) for outcome in outcomes] == [
        *["policy"] * 3, None, None, "renderer"
    ]  # fmt: skip
    assert all(holds(outcomes[n].reason, "refused: ... moderation_blocked") for n in (0, 5))
    assert metrics == {  # the picture of the user's words is asked for once
        **{"requests": 6, "cost": 1.0, "input_tokens": 14, "output_tokens": 200},
        "refused_share": 4 / 6,
    }


SILENCE = Fault(stall_s=3.0)
TRANSIENT = {
    "an error": Fault(500, body="oops"),
    "a reset": Fault(reset=True),
    "too many requests": Fault(429, headers={"Retry-After": "0.1"}),
    "no JSON": Fault(body="<html>"),
    "other JSON": Fault(body='{"data": []}'),
    "a list": Fault(body="[1]"),
    "a number": Fault(body='{"data": [{"b64_json": 5}]}'),
    "no base64": Fault(body='{"data": [{"b64_json": "%%%"}]}'),
    "no picture": Fault(body='{"data": [{"b64_json": "AAAA"}]}'),
    "a cut picture": Fault(body=body_of(PICTURE, num_bytes=200)),
    "another format": Fault(body=body_of(PICTURE, "GIF")),
    "a URL": Fault(body='{"data": [{"url": "http://127.0.0.1:1/a.png"}]}'),
    "half an answer": page(body_of(PICTURE).encode(), length=10**6),
    "an endless answer": dripping(b" ", b"HTTP/1.1 200 OK\r\n\r\n"),
    "silence": SILENCE,
}


@pytest.mark.parametrize("name", TRANSIENT)
def test_a_request_without_a_picture_is_sent_again(name: str) -> None:
    with ImagesServer(faults=[TRANSIENT[name]]) as server:
        [picture], _ = outcomes_of([job_of("a")], server, timeout_s=1.0)
    assert picture == expected(server, job_of("a")) and len(server.requests) == 2


@pytest.mark.parametrize(
    ("faults", "always", "reason"),
    [
        ([Fault(500, body="oops")] * 3, None, "http_500: oops (2 tries)"),
        ([], TRANSIENT["a URL"], "no_reply ... b64_json ... http://127.0.0.1:1/a.png"),
        ([], raw(b"HTTP/1.1 200 OK\r\n\r\n", b" " * (2**26 + 1)), "longer than 67108864 bytes"),
        ([], Fault(500), "outage: no answer for 2 s"),
        ([], SILENCE, "timeout"),
        ([], Fault(body=body_of(Image.new("I;16", (9, 9)))), "greys of more than 8 bits"),
    ],
)
def test_a_server_without_pictures_leaves_them_ungraded(
    faults: Sequence[Fault], always: Fault | None, reason: str
) -> None:
    with ImagesServer(faults, always) as server:
        [outcome], _ = outcomes_of([job_of("a")], server, max_attempts=2, timeout_s=2.0)
    assert isinstance(outcome, RenderFailure) and outcome.blame == "renderer"
    assert holds(outcome.reason, reason)


def test_a_picture_may_come_in_a_data_url() -> None:
    body = body_of(PICTURE).replace('json": "', 'json": "data:image/png;base64,')
    with ImagesServer(always=Fault(body=body)) as server:
        assert outcomes_of([job_of("a")], server)[0] == [PICTURE]


def test_an_echoed_key_is_written_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PAINTER", "hunter2-hunter2")
    caplog.set_level(logging.DEBUG)
    with (
        ImagesServer([Fault(401, body="no: hunter2-hunter2")]) as server,
        pytest.raises(JudgeError, match="it names PAINTER") as error,
    ):
        outcomes_of([job_of("a")], server, api_key_env="PAINTER")
    assert server.headers[0]["Authorization"] == "Bearer hunter2-hunter2"
    assert "hunter2" not in str(error.value) + caplog.text


def test_pictures_come_as_they_are_drawn_and_belong_to_their_jobs() -> None:
    jobs, taken = [job_of(f"words {n}", n, n % 3) for n in range(12)], []
    lazily = (taken.append(job) or job for job in jobs)
    with (
        ImagesServer(most_stall_s=0.2) as server,
        closing(renderer_of("http://127.0.0.1:1", server, max_concurrency=3)) as renderer,
    ):
        drawing = renderer.render(lazily)
        first, num_taken = next(drawing), len(taken)
        outcomes = dict([first, *drawing])
    assert num_taken <= 4, "one is drawn, at most three are under way"
    assert outcomes == {number: expected(server, job) for number, job in enumerate(jobs)}
    assert 1 < server.max_open <= 3


@pytest.mark.slow
def test_the_order_of_the_answers_changes_no_number_of_a_run(tmp_path: Path) -> None:
    models = {"policy": str(tmp_path / "policy"), "editor": ""}
    tiny_qwen.save_policy_folder(Path(models["policy"]))
    for stall_s, run in ((0.0, tiny_loop.run), (0.3, tiny_loop.run_forked)):
        with ImagesServer(most_stall_s=stall_s) as server:
            renderer = {"type": "images_api", "api_base": server.api_base, "model": MODEL}
            folder = tmp_path / str(stall_s)
            config = tiny_loop.without_judge(models, folder, renderer=renderer, num_iterations=2)
            config["policy"]["system_prompt"] = "Say what to change."
            run(tiny_loop.write_config(folder, config))
        assert len(server.requests) == 5 + 2 * 10, "made-up ones, then one for each picture"
    tiny_loop.assert_same_run(tmp_path / "0.0/tiny", tmp_path / "0.3/tiny", 2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"api_base": "nowhere"}, "api_base='nowhere' ... neither"),
        ({"api_base": []}, "api_base is empty"),
        ({"api_base": "ftp://x"}, "api_base='ftp://x' ... not an http"),
        ({"api_key_env": "NOT_SET"}, "api_key_env names NOT_SET ... export"),
        ({"width_px": 64}, "height_px: give both"),
        ({"api_base": "http://a b"}, "api_base ... space"),
        ({"extra": {"prompt": "a", "n": 2}}, "extra: n, prompt"),
        ({"extra": {"response_format": "url"}}, "extra.response_format: ... b64_json"),
        ({}, "render_pool"),
    ],
)
def test_a_section_that_cannot_work_is_named(changes: dict[str, Any], problem: str) -> None:
    config = Config(**{"api_base": "http://x", "model": "m", **changes})
    run: Any = SimpleNamespace(pool=not changes)
    assert [holds(each, problem) for each in ImagesApi.problems(config, run)] == [True]
