"""The stock arm equals the stock pipeline and is drawn once; drift metrics measure training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_editor
import tiny_loop
import tiny_policy
import tiny_qwen
import torch
from brightness_reward import Brightness
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as stock_edit
from PIL import Image
from tiny_act import act_group
from tiny_messages import holds
from tiny_policy import move
from tiny_rounding import PRODUCT_TOL
from tiny_run import episode, run_config, writes

from rl.api.plugin import PluginConfig, Resources
from rl.api.types import Prompt, RenderJob, RewardInput, RewardOutput, Sample
from rl.judge.http import BackgroundLoop
from rl.policies.emu3 import Emu3
from rl.progress import PhaseTimer
from rl.ranks.dist import Dist
from rl.record.run_record import BackgroundWriter
from rl.renderers.qwen_image_edit import QwenImageEdit
from rl.rollout.stream import RolloutContext
from rl.run.evaluation import draw_untrained, evaluate, untrained_rewards, write_untrained
from rl.run.paired import paired
from rl.seeds import derive_seed

pytestmark = pytest.mark.slow

Make = Callable[..., RolloutContext]
SAMPLES = [
    replace(tiny_qwen.sample(0), reference="blue"),
    tiny_qwen.sample(1, width=128),
    replace(tiny_qwen.sample(2), reference="make it red"),
]


class Drawing(QwenImageEdit):
    """Records the sample ids that it was asked to draw."""

    def __init__(self, config: QwenImageEdit.Config, resources: Resources) -> None:
        super().__init__(config, resources)
        self.asked: list[str] = []

    def render(self, jobs: Iterator[RenderJob]) -> Iterator[tuple[int, Any]]:
        taken = list(jobs)
        self.asked += [job.sample.id for job in taken]
        return super().render(taken)


class Picky(Brightness):
    """Returns ungraded while `fails` is set."""

    fails = False

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        if self.fails:
            return RewardOutput(None, failure="timeout: no answer")
        return await super().grade(reward_input)


def make_context(
    models: dict[str, str], loop: BackgroundLoop, guidance: float = 1.0, **section: Any
) -> RolloutContext:
    """`section`: keys of the policy's config."""
    keys = tiny_loop.config_of(models, Path())["renderer"] | {"true_cfg_scale": guidance}
    config = QwenImageEdit.Config(**keys)
    template = QwenImageEdit.prompt_template(config)
    policy = tiny_policy.make(models["policy"], negative_prompt=" ", template=template, **section)
    resources = Resources(None, "cpu")
    renderer, reward = Drawing(config, resources), Picky(PluginConfig(), resources)
    rewards = {"bright": reward}
    return RolloutContext(run_config(renderer=keys), policy, renderer, rewards, True, loop)


@pytest.fixture
def make(models: dict[str, str]) -> Iterator[Make]:
    with BackgroundLoop() as loop:
        yield partial(make_context, models, loop)


@pytest.fixture
def context(make: Make) -> RolloutContext:
    return make()


def held_out(context: RolloutContext, run_dir: Path, iteration: int) -> dict[str, float]:
    """Makes an evaluation and returns its metrics."""
    engine = writes(context.policy.encode_completion("make the square green"))
    with BackgroundWriter(run_dir) as writer:
        arguments = (context, engine, SAMPLES, iteration, run_dir, Dist(), PhaseTimer(), writer)
        return Dist().reduce(evaluate(*arguments))


def test_the_stock_arms_are_the_pictures_of_the_stock_pipeline(
    models: dict[str, str], make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With guidance, with and without token types, and with a trained policy, the stock arms equal
    the pictures of the pipeline's `__call__`."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    shrunk = stock_edit.calculate_dimensions
    monkeypatch.setattr(stock_edit, "calculate_dimensions", lambda _, ratio: shrunk(64**2, ratio))
    parts = tiny_editor.make_stock(state_dim=tiny_loop.STATE_DIM)
    encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(models["policy"]).float().eval()
    pipeline = tiny_editor.stock_pipeline(parts, processor=tiny_qwen.make_processor())
    context = make(guidance=4.0)
    move(context.policy)
    held_out(context, tmp_path, 0)
    rows = {row["id"]: row for row in tiny_loop.rows_of(tmp_path / "stock/rewards.jsonl")}
    differences = []
    for sample in SAMPLES:
        pictures = []
        for arm, text_encoder in (
            ("stock", tiny_qwen.WithTokenTypes(encoder)),
            ("stock_upstream", encoder),
        ):
            pipeline.text_encoder = text_encoder
            [expected] = pipeline(
                image=sample.source,
                prompt=sample.instruction,
                negative_prompt=" ",
                true_cfg_scale=4.0,
                num_inference_steps=2,
                generator=torch.Generator().manual_seed(derive_seed("evaluation", 3, sample.id)),
            ).images
            with Image.open(tmp_path / "stock" / rows[sample.id]["files"][arm]) as ours:
                tiny_editor.assert_same_picture(ours.convert("RGB"), expected)
            pictures.append(torch.tensor(list(expected.tobytes())))
        differences.append((pictures[0] - pictures[1]).abs().max())
    assert min(differences) > 1, "the upstream arm has another picture"


def test_training_leaves_stock_arms_as_they_are(context: RolloutContext, tmp_path: Path) -> None:
    renderer = context.renderer
    before = held_out(context, tmp_path, 0)
    # Three samples' completions and bare words, two references, two stock arms of each sample.
    assert len(renderer.asked) == 3 + 3 + 2 + 2 * 3
    assert before["drift/state_l2"] == pytest.approx(0, abs=PRODUCT_TOL)
    assert before["drift/bare_fall"] == before["drift/alarm"] == 0.0

    move(context.policy)
    renderer.asked.clear()
    after = held_out(context, tmp_path, 1)
    assert len(renderer.asked) == 3 + 3 + 2, "the stock arms are read from the run folder"
    for name in ("eval/stock_reward", "eval/stock_upstream_reward"):
        assert after[name] == before[name]
    assert after["eval/stock_ungraded"] == 0.0
    rows = tiny_loop.rows_of(tmp_path / "evaluation/it_000001/records.jsonl")
    expected = paired([row["reward"] - row["stock_reward"] for row in rows])
    assert after["eval/gain_over_stock"] == pytest.approx(expected.mean)
    assert after["eval/gain_over_stock_error"] == pytest.approx(expected.error)
    assert after["drift/bare_fall"] == pytest.approx(
        before["eval/bare_reward"] - after["eval/bare_reward"]
    )
    assert after["drift/reference_fall"] == pytest.approx(
        before["eval_reference/reward"] - after["eval_reference/reward"]
    )

    distances = []
    for sample in SAMPLES:
        prompt = context.policy.build_prompt(sample)
        bare = context.policy.pass_through_completion(sample)
        [today] = act_group(context.policy, prompt, [bare])
        with context.policy.reference():
            batch = context.policy.collate([(prompt, bare.token_ids)])
            base = context.policy.module(batch).hidden.detach()[-len(bare.token_ids) :]
        states = today.payload.embeds[-len(base) :]
        distances += ((states - base).norm(dim=1) / base.norm(dim=1)).tolist()
    assert after["drift/state_l2"] == pytest.approx(sum(distances) / len(distances), rel=1e-4)
    assert after["drift/state_l2"] > 0.05


def test_samples_that_were_not_graded_before_training_are_left_out(
    context: RolloutContext, tmp_path: Path
) -> None:
    [reward] = context.rewards.values()
    reward.fails = True
    renderer, lenient = context.config.renderer, {"max_failure_rate": 1.0}
    patient = replace(context, config=run_config(renderer=renderer, judge=lenient))
    ungraded = held_out(patient, tmp_path, 0)
    reward.fails = False
    later = held_out(context, tmp_path, 1)
    for metrics in (ungraded, later):
        assert metrics["eval/stock_ungraded"] == 1.0
        assert not {"eval/stock_reward", "eval/gain_over_stock", "drift/alarm"} & metrics.keys()
    # A run that is started again before its first iteration measures its start again.
    assert held_out(context, tmp_path, 0)["eval/stock_ungraded"] == 0.0
    assert "eval/gain_over_stock" in held_out(context, tmp_path, 1)


@pytest.mark.parametrize(
    ("changes", "conditioning", "expected", "absent"),
    [
        ({"bare_arm": "never"}, None, "stock_upstream drift/reference_fall", "bare state_"),
        ({"evaluation": {"stock_arm": False}}, None, "", "stock drift"),
        ({}, "base", "eval/gain_over_stock", "drift/"),  # frozen states cannot drift
    ],
)
def test_what_a_run_does_not_measure_is_not_reported(
    make: Make, tmp_path: Path, changes: Any, conditioning: str | None, expected: str, absent: str
) -> None:
    context = make(**({"conditioning": conditioning} if conditioning else {}))
    config = run_config(renderer=context.config.renderer, **changes)
    metrics = held_out(replace(context, config=config), tmp_path, 0)
    assert all(any(part in name for name in metrics) for part in expected.split())
    assert not [name for name in metrics if any(part in name for part in absent.split())]


@pytest.mark.parametrize("section", [{}, {"lora": None, "conditioning": "policy"}])
def test_the_stock_arm_is_measured_only_before_the_first_step(
    make: Make, tmp_path: Path, section: Any, capsys
) -> None:
    context = make(**section)
    late = held_out(context, tmp_path / "late", 1)
    assert not {name for name in late if "stock" in name or "drift" in name}
    assert not list((tmp_path / "late").glob("stock/*"))
    before = held_out(context, tmp_path / "early", 0)
    move(context.policy, 0.02)
    damaged = min((tmp_path / "early/stock").glob("*.safetensors"))
    damaged.write_bytes(b"")
    capsys.readouterr()
    after = held_out(context, tmp_path / "early", 1)
    assert after["eval/stock_reward"] == before["eval/stock_reward"]
    assert after["drift/state_l2"] > 0.01
    assert holds(capsys.readouterr().err, f"WARNING ... {damaged} is damaged")


def test_the_stock_arm_of_a_text_policy_is_the_users_words(models: dict[str, str]) -> None:
    policy = tiny_policy.make(models["policy"], kind="text")
    prompt, bare = policy.build_prompt(SAMPLES[0]), policy.pass_through_completion(SAMPLES[0])
    assert policy.stock_arms(prompt) == {"stock": (prompt, bare)}


def test_a_policy_that_writes_pictures_is_compared_with_its_untrained_self(
    tmp_path: Path, capsys
) -> None:
    assert Emu3.starts_as_stock
    policy = SimpleNamespace(starts_as_stock=True, reads_states=False)
    context = SimpleNamespace(policy=policy, config=run_config())
    samples_P = [Sample(name, "do") for name in "abc"]
    prompts_P = [Prompt(sample, (1,)) for sample in samples_P]
    written = [
        episode(prompt=prompt, reward=reward)
        for prompt, reward in zip(prompts_P, (0.25, None, 0.5), strict=True)
    ]
    drawn_P = [{"policy": each} for each in written]
    untrained_P = draw_untrained(context, prompts_P, drawn_P, Dist())
    with BackgroundWriter(tmp_path) as writer:
        write_untrained(tmp_path, samples_P, untrained_P, Dist(), writer)
    samples_P = [*samples_P[1:], Sample("d", "do")]
    assert untrained_rewards(tmp_path, samples_P, Dist()) == [{"stock": None}, {"stock": 0.5}, {}]
    assert not capsys.readouterr().err
    file = tmp_path / "stock/rewards.jsonl"
    file.write_text('{"id": "c", "rewards": {"stock": 1}}\n{"id": 5}\n{"rewards": {}}\n')
    for expected in ([{}, {"stock": 1}, {}], [{}, {}, {}]):
        assert untrained_rewards(tmp_path, samples_P, Dist()) == expected
        assert holds(capsys.readouterr().err, f"WARNING ... {file} ... missing or damaged")
        file.unlink(missing_ok=True)
