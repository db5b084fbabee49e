"""Every reward's question to vLLM's own chat server, which serves the tiny policy on the CPU."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_config
from tiny_ranks import held_port
from tiny_rewards import EDIT, RESULT, SOURCES, make

from rl.api.types import RewardInput, RewardOutput, Sample
from rl.config.schema import JudgeConfig
from rl.judge import client
from rl.judge.client import JudgeClient
from rl.judge.http import JudgeHttp
from rl.judge.reply import DIGITS
from rl.rewards.judged import EditQuality, ExpectedScore, Rubric, SpatialReward, VieScore

pytestmark = pytest.mark.slow

MODEL = "tiny"
WEIGHTS = tiny_config.WEIGHTS / "policy"
START_S = 400
EVIDENCE = RewardInput(Sample("a", EDIT, sources=SOURCES[:2]), "words", RESULT)
COMMAND = [
    sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(WEIGHTS),
    "--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager",
    "--max-model-len", "4096", "--max-num-seqs", "8", "--max-logprobs", "-1",
    "--limit-mm-per-prompt", '{"image": 3, "video": 0}',
]  # fmt: skip
ENVIRONMENT = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("vllm")
    with held_port() as port, (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [*COMMAND, "--port", str(port)],
            env=os.environ | ENVIRONMENT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}/v1"
        try:
            asyncio.run(JudgeClient(JudgeConfig(model=MODEL), url).check_health(START_S))
            yield url
        finally:
            print((folder / "log").read_text(errors="replace")[-3000:])
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


def graded(
    url: str, plugin: Any, guided: Any = "never", **config: Any
) -> tuple[RewardOutput, JudgeClient]:
    """(the grade of `EVIDENCE`, the client that asked)."""
    settings = JudgeConfig(
        model=MODEL, max_attempts=1, max_tokens=32, timeout_s=120, guided_json=guided
    )

    async def run() -> tuple[RewardOutput, JudgeClient]:
        asking = JudgeClient(settings, url)
        output = await make(plugin, plugin.Config(**config), asking).grade(EVIDENCE)
        await asking.aclose()
        return output, asking

    return asyncio.run(run())


@pytest.mark.parametrize("guided", ["never", "always"])
@pytest.mark.parametrize(
    ("plugin", "count"), [(VieScore, 2), (EditQuality, 3), (Rubric, 1), (SpatialReward, 2)]
)
def test_questions_for_written_scores_are_accepted(
    url: str, tmp_path: Path, plugin: Any, count: int, guided: str
) -> None:
    """This model writes other words; under a schema it writes white space until it is cut."""
    config: dict[str, Any] = {}
    if plugin is Rubric:
        (tmp_path / "mine.txt").write_text("Was {instruction} done?")
        config = {"prompt": str(tmp_path / "mine.txt"), "scores": {"success": {"high": 5}}}
    output, asking = graded(url, plugin, guided=guided, **config)
    assert output.value is None and (output.failure or "").startswith("unreadable: ")
    assert asking.addresses[0].dialect.names == set(), "every parameter was accepted"
    assert [reply.startswith("{") for reply in output.replies] == [guided == "always"] * count


def test_legal_mass_is_a_share_of_the_whole_vocabulary(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny policy was never trained to write a label, so all log-probs are asked for. The
    reference is the same server's distribution over all tokens, which sums to 1."""
    bodies, request = [], JudgeHttp.request

    async def noting(http: JudgeHttp, method: str, path: str, body: Any, *more: Any) -> Any:
        if path == "/chat/completions":
            bodies.append(json.loads(body))
        return await request(http, method, path, body, *more)

    monkeypatch.setattr(JudgeHttp, "request", noting)
    monkeypatch.setattr(client, "TOP_LOGPROBS", -1)
    output, _ = graded(url, ExpectedScore, min_legal_mass=1e-12)
    assert len(bodies) == 2
    masses = []
    for body in bodies:
        answer = httpx.post(f"{url}/chat/completions", json=body, timeout=120).json()
        [first] = answer["choices"][0]["logprobs"]["content"]
        found = [(each["token"], math.exp(each["logprob"])) for each in first["top_logprobs"]]
        assert math.fsum(prob for _, prob in found) == pytest.approx(1, abs=1e-4)
        masses.append(math.fsum(prob for token, prob in found if token in DIGITS))
    assert 0 < output.parts["legal_mass"] == pytest.approx(min(masses), rel=1e-3)
    assert output.value is not None and 0 < output.value < 1


def test_a_label_that_is_not_returned_counts_as_0(url: str) -> None:
    output, _ = graded(url, ExpectedScore)
    assert (output.failure or "").startswith("unreadable: 0 of the first token's probability")
    assert [json.loads(reply)["logprobs"] for reply in output.replies] == [{}, {}]
