r"""The whole method in one file: GRPO for a vision-language model whose hidden states are the text
conditioning of a frozen image editor; the reward is how good the edited picture is. One GPU, one
process, nothing hidden: read it from top to bottom, `train` is the loop.

    picture + instruction -> Qwen2.5-VL writes words -> its hidden states condition the frozen
    Qwen-Image-Edit -> a judge grades the picture -> LoRA update of Qwen2.5-VL

From the same completions and grades it computes the losses, gradients and steps of the trainer
(`rl/train.py`): tests/train/test_nano.py compares them. But it has no evaluation, no checkpoints,
no record, no warnings and no second GPU, and nothing overlaps.
Models, editor, engine and the parsing of the judge's replies come from the library; the loop, the
advantages, the loss, the optimizer and its schedule are here. The idea of such a file is
nano-aha-moment's (https://github.com/McGill-NLP/nano-aha-moment). With models of real size it has
not been run yet.

On a laptop without a GPU, in a clone, with tiny models and a judge that compares pixels (about two
minutes; the reward rises from 0.3 to 0.8 or more; `kill %1` ends the judge):

    python -m tiny_world.judge_server judge_url tiny-world-judge &
    python -m tiny_world.data.write_shapes edits 1024
    export OMP_NUM_THREADS=1  # more threads slow tiny models down
    python examples/nano.py --data edits/edits.jsonl --judge-url $(cat judge_url) \
        --judge-model tiny-world-judge --policy tiny_world/weights/policy --text-encoder "" \
        --editor tiny_world/weights/editor --engine transformers --dtype float32 \
        --denoising-steps 2 --side-px 64 --max-tokens 24 --prompts-per-iteration 12 \
        --iterations 40 --lora-rank 8 \
        --lora-targets q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj \
        --learning-rate 2.5e-3 --warmup 4 --final-lr-ratio 0.2 --beta1 0.5 --beta2 0.99 \
        --max-grad-norm 0.1 --kl-coeff 0.2 --advantage-eps 0.1

On one GPU that holds policy, editor and vLLM side by side (not tried yet), with a judge elsewhere
(docs/judge.md), whose key, if any, is in JUDGE_API_KEY:

    python examples/nano.py --data edits.jsonl --judge-url http://judge-host:4877/v1

Axes in names: `_P` prompts of an iteration; `_G` completions of a prompt, its group; `_T` tokens of
a completion, padded on the right with 0 to the longest of its group. `x_PG[p][g]` is a nested list,
`x_GT` a tensor [G, T]; `_G1` broadcasts over tokens. Log-probs are in nats, at the temperature that
samples. docs/glossary.md explains the words.
"""

from __future__ import annotations

import argparse
import base64
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import lru_cache
from statistics import fmean, pstdev
from typing import Any, TypeVar

import httpx
import torch
from PIL.Image import Image
from torch.nn.utils.rnn import pad_sequence

from rl.api.data import RowRules
from rl.api.engine import Engine, EngineSetup
from rl.api.plugin import Dtype, PluginConfig, Resources
from rl.api.policy import LoraSection, PolicySetup
from rl.api.types import Completion, Prompt, RenderFailure, RenderJob, SamplingParams, TokenBatch
from rl.data.sources import EditJsonl, EditJsonlConfig
from rl.engines.transformers import TransformersEngine
from rl.engines.vllm import Config as VllmConfig
from rl.engines.vllm import VllmEngine
from rl.files import downscale, png_bytes
from rl.judge.reply import UnreadableReplyError, fill_prompt, read_chat, read_scores
from rl.policies.qwen_vl import Qwen25VL
from rl.policies.qwen_vl_prompts import Config as PolicyConfig
from rl.renderers.qwen_image_config import DenoisingConfig
from rl.renderers.qwen_image_edit import QwenImageEdit
from rl.rewards.judged import PROMPTS
from rl.seeds import derive_seed

T = TypeVar("T")


def option(default: T, meaning: str) -> T:
    """A field with its default, and what `--help` says about it."""
    value: T = field(default=default, metadata={"help": meaning})
    return value


@dataclass(frozen=True)
class Settings:
    """Every setting; `--learning-rate` on the command line is `learning_rate` here."""

    data: str = option("edits.jsonl", 'lines {"image": "a.jpg", "instruction": "..."}')
    save: str = option("", "folder for the trained adapter, for PEFT and vLLM; '' = not saved")
    seed: int = option(0, "everything random derives from it")
    iterations: int = option(100, "optimizer steps")
    prompts_per_iteration: int = option(16, "prompts per iteration")
    group_size: int = option(8, "completions per prompt")

    policy: str = option(
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "tokenizer and image processor; also the weights if --text-encoder is ''",
    )
    text_encoder: str = option(
        "Qwen/Qwen-Image-Edit", "editor whose text encoder gives the policy's weights"
    )
    dtype: Dtype = option("bfloat16", "of all frozen weights; the adapter is float32")  # noqa: RUF009
    lora_rank: int = option(32, "rank of the adapter, which is scaled by alpha / rank = 2")
    lora_targets: str = option("q_proj,k_proj,v_proj,o_proj", "layers that the adapter adapts")

    engine: str = option("vllm", "vllm, or transformers: slow, but it runs anywhere")
    vllm_memory: float = option(0.35, "vLLM's gpu_memory_utilization, while it is awake")
    temperature: float = option(1.0, "of sampling, and of the trainer's softmax")
    max_prompt: int = option(2048, "longest prompt, tokens; a longer one is an error")
    max_tokens: int = option(256, "longest completion, tokens")

    editor: str = option("Qwen/Qwen-Image-Edit", "the frozen diffusion model")
    denoising_steps: int = option(8, "steps of the editor; its own default is 50")
    guidance: float = option(1.0, "classifier-free guidance scale; 1 = off")
    side_px: int = option(512, "pictures have about the area of a square with this side")
    render_batch: int = option(8, "pictures that are drawn together")

    judge_url: str = option(
        "http://127.0.0.1:4877/v1", "an OpenAI-compatible endpoint, with its /v1"
    )
    judge_model: str = option("Qwen/Qwen3-VL-32B-Instruct-FP8", "its model, which sees pictures")
    judge_requests: int = option(32, "questions asked at the same time")

    advantage_eps: float = option(1e-4, "added to a group's standard deviation; rewards are 0..1")
    clip_eps: float = option(0.2, "PPO's clip distance")
    importance_cap: float = option(2.0, "upper bound of pi_trainer / pi_engine")
    kl_coeff: float = option(1e-3, "coefficient of KL(policy || reference)")
    learning_rate: float = option(1e-5, "peak")
    warmup: int = option(0, "iterations of linear warm-up")
    final_lr_ratio: float = option(1.0, "last learning rate / peak; linear in between")
    beta1: float = option(0.9, "AdamW's")
    beta2: float = option(0.95, "AdamW's")
    adam_eps: float = option(1e-8, "AdamW's")
    max_grad_norm: float = option(1.0, "the gradient is clipped to this norm")


@dataclass(eq=False)
class Edit:
    """What a completion asks the editor for; equal completions of a group share one."""

    prompt: Prompt
    words: str
    states: Any
    """`HiddenStates` [L, D] of prompt and completion, detached: the editor's text conditioning."""
    noise_seed: int
    picture: Image | None = None
    reward: float | None = None
    """0..1; set to 0.0 before `judge` if the words are at fault, which are then not drawn. None
    after `judge`: renderer or judge failed, and the completion is left out of the loss."""


@dataclass(frozen=True, eq=False)
class Group:
    """A prompt and its completions, between their forward and their backward."""

    completions: Sequence[Completion]
    """_G."""
    edits: Sequence[Edit]
    """_G; equal completions share one."""
    batch: TokenBatch
    """[prompt | completion | completion ...] in one row: the prompt is computed once."""
    logprobs: torch.Tensor
    """[G, T] float32, the trainer's; it holds the graph of the forward."""
    sampler_logprobs: torch.Tensor
    """[G, T] float32, the engine's."""

    @property
    def num_tokens(self) -> int:
        """Tokens of completions with a reward, 0.0 for failed words included: those in the loss."""
        pairs = zip(self.completions, self.edits, strict=True)
        return sum(len(c.token_ids) for c, edit in pairs if edit.reward is not None)


def train(settings: Settings) -> Iterator[dict[str, float]]:
    """The loop. Yields each iteration's metrics."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    data = EditJsonl(EditJsonlConfig(path=settings.data), RowRules(max_pictures=1))
    policy = load_policy(settings, device)
    engine = load_engine(settings, policy, device)
    engine.sleep()
    renderer = QwenImageEdit(editor_config(settings), Resources(judge=None, device=device))
    adapter = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        adapter.values(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.adam_eps,
        weight_decay=0.0,
    )
    for iteration in range(settings.iterations):
        started = time.perf_counter()

        # 1. The engine gets the trainer's weights and samples a group of completions per prompt.
        #    A seed is a hash of its purpose, so nothing depends on how many random numbers were
        #    drawn before; completion g is sampled with the seed + g.
        rows_P = rows_of(settings, iteration, len(data))
        prompts_P = [policy.build_prompt(data[row]) for row in rows_P]
        names_P = [f"{iteration}/{p}" for p in range(settings.prompts_per_iteration)]
        seeds_P = [derive_seed(settings.seed, "sampling", name) for name in names_P]
        engine.wake()
        engine.load_weights(policy.export_weights(adapter, version=iteration))
        completions_PG = sample(settings, engine, prompts_P, seeds_P)
        engine.sleep()

        # 2. One forward per group gives the hidden states that condition the editor, and the
        #    log-probs of the loss. Its graph is kept until the rewards are known.
        noise_seeds_P = [derive_seed(settings.seed, "noise", name) for name in names_P]
        groups_P = [
            forward(policy, prompt, completions_G, noise)
            for prompt, completions_G, noise in zip(
                prompts_P, completions_PG, noise_seeds_P, strict=True
            )
        ]

        # 3. The frozen editor draws; the judge grades the pictures.
        edits = list(dict.fromkeys(edit for group in groups_P for edit in group.edits))  # each once
        draw(renderer, edits)
        judge(settings, edits)

        # 4. Advantages, and the denominator of the step's loss.
        rewards_PG = [[edit.reward for edit in group.edits] for group in groups_P]
        advantages_PG = [advantages(rewards_G, settings.advantage_eps) for rewards_G in rewards_PG]
        denominator = loss_denominator(groups_P, advantages_PG)
        if not any(edit.picture and edit.reward is not None for edit in edits):
            raise SystemExit("no picture was graded: does the judge answer at --judge-url?")

        # 5. Loss and backward, group by group, as a backward frees its group's graph. Gradients add
        #    up, and the denominator is the whole step's, so the split does not change the result.
        policy_sum = kl_sum = 0.0
        for group, advantages_G in zip(groups_P, advantages_PG, strict=True):
            reference_GT = reference_logprobs(policy, group.batch)
            policy_loss, kl = loss_sums(settings, group, advantages_G, reference_GT)
            ((policy_loss + settings.kl_coeff * kl) / denominator).backward()
            policy_sum += policy_loss.item()
            kl_sum += kl.item()

        # 6. Optimizer step.
        grad_norm = torch.nn.utils.clip_grad_norm_(
            adapter.values(), settings.max_grad_norm, error_if_nonfinite=True
        )
        optimizer.param_groups[0]["lr"] = learning_rate(settings, iteration)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.empty_cache()  # the engine, which wakes next, allocates outside of PyTorch

        graded = [reward for rewards_G in rewards_PG for reward in rewards_G if reward is not None]
        yield {
            "iteration": iteration + 1,
            "reward/mean": fmean(graded),
            "loss/total": (policy_sum + settings.kl_coeff * kl_sum) / denominator,
            "loss/policy": policy_sum / denominator,
            "loss/kl": settings.kl_coeff * kl_sum / denominator,
            # Per token with a reward; loss/kl is divided by the denominator of the loss.
            "kl/reference_k3": kl_sum / sum(group.num_tokens for group in groups_P),
            "mismatch/max_abs_dlogp": max(
                float((group.logprobs.detach() - group.sampler_logprobs).abs().max())
                for group in groups_P
            ),
            "optimizer/grad_norm": grad_norm.item(),
            "seconds": time.perf_counter() - started,
        }
    if settings.save:
        policy.save_pretrained(settings.save, adapter)


# The models.


def editor_config(settings: Settings) -> DenoisingConfig:
    """The editor's part of the settings; the policy's prompt depends on it, too."""
    return DenoisingConfig(
        model_path=settings.editor,
        dtype=settings.dtype,
        num_steps=settings.denoising_steps,
        true_cfg_scale=settings.guidance,
        output_area_px=settings.side_px**2,
        condition_area_px=settings.side_px**2,
        policy_image_area_px=settings.side_px**2,
        batch_size=settings.render_batch,
    )


def load_policy(settings: Settings, device: str) -> Qwen25VL:
    """Qwen2.5-VL with a fresh LoRA adapter (PEFT's, in float32), which is all that is trained.

    Its prompt is the template with which the editor encodes text. The policy continues it, and the
    editor gets the hidden states of prompt and completion.
    """
    editor = editor_config(settings)
    lora = LoraSection(
        r=settings.lora_rank,
        alpha=2 * settings.lora_rank,
        target_modules=tuple(settings.lora_targets.split(",")),
    )
    config = PolicyConfig(
        type="qwen2_5_vl",
        model_path=settings.policy,
        init_text_encoder_from=settings.text_encoder,
        dtype=settings.dtype,
        lora=lora,
        max_prompt_tokens=settings.max_prompt,
    )
    setup = PolicySetup(
        kind="hidden_states",
        template=QwenImageEdit.prompt_template(editor),
        negative_prompt=QwenImageEdit.negative_prompt(editor),
        temperature=settings.temperature,
        max_completion_tokens=settings.max_tokens,
        gradient_checkpointing=device != "cpu",  # else the graphs of all groups would not fit
        device=device,
        seed=derive_seed(settings.seed, "policy"),
    )
    return Qwen25VL(config, setup)


def load_engine(settings: Settings, policy: Qwen25VL, device: str) -> Engine[Any]:
    """vLLM in this process, with the frozen weights and a slot for the adapter, or the trainer's
    own module (`transformers`)."""
    setup = EngineSetup(policy, device, has_room=False)  # `sleep` moves vLLM's weights to the host
    if settings.engine == "transformers":
        return TransformersEngine(PluginConfig(), setup)
    return VllmEngine(VllmConfig(gpu_memory_utilization=settings.vllm_memory), setup)


# The steps of an iteration.


def rows_of(settings: Settings, iteration: int, num_rows: int) -> list[int]:
    """[P] the rows whose turn it is: every epoch takes each row once, in an order of its own. It is
    the trainer's order, which shuffles an iteration's slots over ranks, and has a number for each
    data source (here 0, the only one)."""
    rows_P = []
    for slot in shuffled(f"{settings.seed}:slots:{iteration}", settings.prompts_per_iteration):
        epoch, place = divmod(iteration * settings.prompts_per_iteration + slot, num_rows)
        rows_P.append(shuffled(f"{settings.seed}:0:{epoch}", num_rows)[place])
    return rows_P


@lru_cache(maxsize=4)
def shuffled(name: str, length: int) -> list[int]:
    order = list(range(length))
    random.Random(name).shuffle(order)
    return order


def sample(
    settings: Settings, engine: Engine[Any], prompts_P: Sequence[Prompt], seeds_P: Sequence[int]
) -> list[list[Completion]]:
    """completions_PG: token ids, with the stop token if the engine wrote one, and the engine's
    log-probs. Only ids go in and out: text that is tokenized again may have other ids."""
    params = SamplingParams(
        temperature=settings.temperature,
        top_p=1.0,  # the trainer computes the log-probs of the untruncated softmax
        top_k=-1,
        max_tokens=settings.max_tokens,
        num_completions=settings.group_size,
    )
    return engine.generate(prompts_P, params, seeds_P)


def forward(
    policy: Qwen25VL, prompt: Prompt, completions_G: Sequence[Completion], noise_seed: int
) -> Group:
    """One forward with a graph over a prompt, which is computed once, and its completions. Each
    attends causally to the prompt and its own tokens, not to other completions. The editor gets the
    states without a graph."""
    policy.module.train()  # without dropout this only turns gradient checkpointing on
    rows = [(prompt, completion.token_ids) for completion in completions_G]
    batch = policy.collate(rows)
    outputs = policy.module(batch)
    edits: dict[tuple[int, ...], Edit] = {}
    for (_, ids), action in zip(rows, policy.decode_actions(rows, batch, outputs), strict=True):
        # A group shares its noise, so that its rewards differ by the words alone. A completion
        # without words fails: the lowest reward, which counts in the group's mean.
        reward = None if action.failure is None else 0.0
        edit = Edit(prompt, action.text, action.payload, noise_seed, reward=reward)
        edits.setdefault(ids, edit)
    edits_G = [edits[ids] for _, ids in rows]
    sampler_GT = padded([c.logprobs for c in completions_G], outputs.logprobs)
    return Group(completions_G, edits_G, batch, outputs.logprobs, sampler_GT)


def draw(renderer: QwenImageEdit, edits: Sequence[Edit]) -> None:
    """Sets the picture of every edit, or the lowest reward where its words are too long to draw."""
    drawable = [edit for edit in edits if edit.reward is None]
    jobs = [RenderJob(edit.prompt.sample, edit.states, edit.noise_seed) for edit in drawable]
    for number, outcome in renderer.render(jobs):
        if isinstance(outcome, Image):
            drawable[number].picture = outcome
        elif isinstance(outcome, RenderFailure) and outcome.blame == "policy":
            drawable[number].reward = 0.0


def judge(settings: Settings, edits: Sequence[Edit]) -> None:
    """Sets the reward of every edit that has a picture: VIEScore, over HTTP, many at once."""
    drawn = [edit for edit in edits if edit.picture]
    headers = {"Authorization": f"Bearer {os.environ.get('JUDGE_API_KEY', 'none')}"}
    with (
        httpx.Client(base_url=settings.judge_url, headers=headers, timeout=120.0) as http,
        ThreadPoolExecutor(settings.judge_requests) as threads,
    ):
        rewards = threads.map(lambda edit: viescore(settings, http, edit), drawn)
        for edit, reward in zip(drawn, rewards, strict=True):
            edit.reward = reward


# The judge's two questions: on source, instruction and result; on the result alone.
SEMANTICS, PERCEPTION = (
    (PROMPTS / f"viescore_{name}.txt").read_text(encoding="utf-8").strip()
    for name in ("semantics", "perception")
)


def viescore(settings: Settings, http: httpx.Client, edit: Edit) -> float | None:
    """sqrt(SC * PQ) / 10 (Ku et al. 2023, arXiv 2312.14867): SC is the worse of (edit success,
    restraint), PQ the worse of (naturalness, cleanness of the picture alone), each 0..10."""
    sample, picture = edit.prompt.sample, edit.picture
    assert picture is not None
    about_edit = fill_prompt(SEMANTICS, sample.instruction)
    semantics = ask(settings, http, sample.sources[0], about_edit, picture)
    perception = ask(settings, http, PERCEPTION, picture)
    if semantics is None or perception is None:
        return None
    return math.sqrt(min(semantics) * min(perception)) / 10


TRIES = 4


def ask(settings: Settings, http: httpx.Client, *parts: str | Image) -> tuple[float, ...] | None:
    """The two numbers of the judge's reply to a question of texts and pictures; None if it gives
    none. Its text is not trusted: exactly two numbers from 0 to 10, or it is asked again."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    for attempt in range(TRIES):
        time.sleep(2.0**attempt - 1)  # 0, 1, 3, 7 s
        body = {
            "model": settings.judge_model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 512,
            "temperature": 0.3 * attempt,  # at 0 it would answer the same again
            "seed": attempt,
        }
        try:
            response = http.post("chat/completions", json=body)
            response.raise_for_status()
            return read_scores(read_chat(response.content).reply, count=2, low=0, high=10)
        except (httpx.HTTPError, UnreadableReplyError) as error:
            problem = error
    print(f"no grade from the judge: {problem}")
    return None


def data_url(picture: Image) -> str:
    png = png_bytes(downscale(picture, side_px=768))
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


# The arithmetic.


def advantages(rewards_G: Sequence[float | None], eps: float) -> list[float]:
    """[G] A = (r - mean(r)) / (std(r) + eps), GRPO (Shao et al. 2024, arXiv 2402.03300, section
    4.1.2), over completions with a reward; std is the population's. 0 for the others, with fewer
    than two rewards, and where all are equal."""
    graded = [reward for reward in rewards_G if reward is not None]
    if len(graded) < 2 or max(graded) - min(graded) <= 1e-6:  # the difference is float noise
        return [0.0] * len(rewards_G)
    mean, std = fmean(graded), pstdev(graded)
    return [0.0 if reward is None else (reward - mean) / (std + eps) for reward in rewards_G]


def loss_denominator(groups_P: Sequence[Group], advantages_PG: Sequence[Sequence[float]]) -> int:
    """Tokens of the groups whose rewards differ; of all groups, if there are none.

    Groups with equal rewards have no policy gradient. Their KL stays in the sum, because nothing
    else pulls back a policy that fails everywhere, but their tokens do not count here, so that they
    do not shrink the others' gradient. The fewer groups differ, the more the KL weighs."""
    pairs = list(zip(groups_P, advantages_PG, strict=True))
    counted = sum(group.num_tokens for group, advantages_G in pairs if any(advantages_G))
    return counted or sum(group.num_tokens for group in groups_P)


def reference_logprobs(policy: Qwen25VL, batch: TokenBatch) -> torch.Tensor:
    """[G, T] log-probs of the policy before training, which is the model without its adapter."""
    policy.module.eval()  # without dropout, graphs that are still kept do not change by this
    with torch.no_grad(), policy.module.model.disable_adapter():
        reference_GT: torch.Tensor = policy.module(batch).logprobs
    return reference_GT


def loss_sums(
    settings: Settings, group: Group, advantages_G: Sequence[float], reference_GT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(policy loss, KL), each summed over the tokens of a group's graded completions.

        policy_t = -w_t min(ratio_t A, clip(ratio_t, 1 - c, 1 + c) A)     GRPO, eq. 3
        kl_t     = e^-d - 1 + d,  d = log pi_t - log pi_ref,t             GRPO, eq. 4
        w_t      = min(pi_old,t / pi_engine,t, cap)

    `train` divides the sums by the tokens of the whole step (DAPO: Yu et al. 2025, arXiv
    2503.14476, eq. 8), where GRPO's eq. 3 has a mean of every completion's mean. kl_t is Schulman's
    k3 (joschu.net/blog/kl-approx.html); its gradient is that of KL(reference || policy). w_t
    corrects for the engine, whose kernels compute slightly other probabilities (truncated
    importance sampling, Yao et al. 2025).
    """
    logprobs_GT = group.logprobs
    advantages_G1 = padded([[advantage] for advantage in advantages_G], logprobs_GT)
    old_GT = logprobs_GT.detach()  # one step per batch: the old policy is the present one
    # The ratio is then 1, and never clipped. It is here for its gradient, which is that of log pi.
    ratio_GT = (logprobs_GT - old_GT).exp()
    clipped_GT = ratio_GT.clamp(1 - settings.clip_eps, 1 + settings.clip_eps)
    policy_GT = -torch.minimum(ratio_GT * advantages_G1, clipped_GT * advantages_G1)
    importance_GT = (old_GT - group.sampler_logprobs).exp().clamp(max=settings.importance_cap)
    d_GT = logprobs_GT - reference_GT
    kl_GT = torch.expm1(-d_GT) + d_GT
    pairs = zip(group.completions, group.edits, strict=True)
    rows_G = [[float(edit.reward is not None)] * len(c.token_ids) for c, edit in pairs]
    mask_GT = padded(rows_G, reference_GT)
    return (mask_GT * importance_GT * policy_GT).sum(), (mask_GT * kl_GT).sum()


def padded(rows_G: Sequence[Sequence[float]], like: torch.Tensor) -> torch.Tensor:
    """[G, T] float32 on the device of `like`, 0 after the end of a row."""
    tensors_G = [torch.tensor(row, dtype=torch.float32) for row in rows_G]
    return pad_sequence(tensors_G, batch_first=True).to(like.device)


def learning_rate(settings: Settings, iteration: int) -> float:
    """Linear from peak / warmup up to the peak, then linear down to final_lr_ratio * peak."""
    if iteration < settings.warmup:
        return settings.learning_rate * (iteration + 1) / settings.warmup
    num_decay = max(1, settings.iterations - 1 - settings.warmup)
    progress = min(1.0, (iteration - settings.warmup) / num_decay)
    return settings.learning_rate * (1 - (1 - settings.final_lr_ratio) * progress)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="The top of this file has a command for a laptop and one for a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for each in fields(Settings):
        flag, kind = "--" + each.name.replace("_", "-"), type(each.default)
        parser.add_argument(flag, type=kind, default=each.default, help=each.metadata["help"])
    settings = Settings(**vars(parser.parse_args()))
    for metrics in train(settings):
        print(
            f"{metrics['iteration']:4.0f}/{settings.iterations}"
            f"  reward {metrics['reward/mean']:.3f}"
            f"  loss {metrics['loss/total']:+.4f}"
            f"  kl {metrics['kl/reference_k3']:.4f}"
            f"  grad norm {metrics['optimizer/grad_norm']:.3f}"
            f"  mismatch {metrics['mismatch/max_abs_dlogp']:.0e}"
            f"  {metrics['seconds']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
