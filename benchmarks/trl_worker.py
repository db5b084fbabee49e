"""The worker of `side_by_side.py` for TRL: `GRPOTrainer`, whose reward function renders and judges.

'stock' is a user's first version: one completion at a time is conditioned and rendered by
diffusers' pipeline. 'tuned' batches and caches, and renders with this project's renderer;
`trl_tunings.py` adds more. TRL computes old log-probs for its importance sampling only if vLLM
samples. Here `rollout_func` returns fixed completions, so 'stock' sets `use_vllm` afterwards.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from benchmarks import toy
from benchmarks.link import JUDGE_WAIT, PARTS, POLICY, RENDER, REST, SAMPLING, Link, watch_models
from benchmarks.our_worker import SAMPLER_LOGPROB
from benchmarks.toy import Shape, renderer_section
from benchmarks.trl_tunings import Tuning, assert_equal, cache_features, prompt_once, trainer_class
from rl.api.data import RowRules
from rl.api.plugin import Resources
from rl.api.types import HiddenStates, RenderJob, RewardInput, Sample
from rl.config.schema import JudgeConfig
from rl.judge.client import JudgeClient
from rl.judge.http import BackgroundLoop
from rl.renderers.qwen_image_config import DenoisingConfig
from rl.renderers.qwen_image_edit import QwenImageEdit
from rl.rewards.judged import VieScore, VieScoreConfig
from rl.rollout.episodes import PromptOrder

NUM_DROPPED_TOKENS = 64
"""Tokens of the system prompt, whose states do not condition the DiT."""
PICTURES_AT_THE_JUDGE = 2
"""Pictures that 'stock' grades concurrently, with two questions each."""


def run(
    connection: Connection, folder: Path, shape: Shape, api_base: str, tuning: Tuning, samples: bool
) -> None:
    """Trains with TRL. `folder`: models of `toy.py`; `samples`: also sample, for its cost."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    link = Link(connection, {part: part for part in PARTS})
    TrlRun(folder, shape, api_base, tuning, samples, link).train()


class TrlRun:
    """TRL's trainer, its rollout function and its reward function."""

    def __init__(
        self, folder: Path, shape: Shape, api_base: str, tuning: Tuning, samples: bool, link: Link
    ) -> None:
        from transformers import Qwen2_5_VLForConditionalGeneration

        self._shape = shape
        self._tuning = tuning
        self._link = link
        self._processor = make_processor(folder / "policy")
        self._tokenizer = self._processor.tokenizer
        self._sampler = toy.StockSampler(folder) if samples else None
        self._judge_loop = BackgroundLoop("judge")
        judge = JudgeClient(JudgeConfig(api_base=api_base, model="stub-judge"), api_base)
        self._reward: Any = VieScore(VieScoreConfig(type="viescore"), Resources(judge, "cpu"))
        self._pool = ThreadPoolExecutor(PICTURES_AT_THE_JUDGE)
        self._rows = ordered_samples(shape)
        self._sample_of = {row.instruction: row for row in self._rows}
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(  # nosec B615 # local
            folder / "policy"
        )
        if tuning.tuned:
            section = DenoisingConfig(**renderer_section(folder, shape))
            self._renderer: Any = QwenImageEdit(section, Resources(None, "cpu"))
        else:
            self._renderer = make_pipeline(folder, shape)
        self._trainer = self._make_trainer(model, folder)
        self._watch()
        if tuning.caches_features:
            cache_features(self._body)
        self._checked = False

    @property
    def _body(self) -> Any:
        """The `Qwen2_5_VLModel`, without head and adapter."""
        return self._trainer.model.get_base_model().model

    def _make_trainer(self, model: Any, folder: Path) -> Any:
        from datasets import Dataset
        from peft import LoraConfig
        from trl import GRPOConfig, GRPOTrainer

        tuned, once = self._tuning.tuned, self._tuning.prompt_once
        trainer_type = GRPOTrainer if once == "never" else trainer_class(once == "always")
        group, num_groups = self._shape.group, self._shape.num_groups
        config = GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=group if tuned else 1,
            gradient_accumulation_steps=num_groups if tuned else group * num_groups,
            gradient_checkpointing=not tuned,
            num_generations=group,
            max_completion_length=self._shape.completion_tokens,
            max_steps=len(self._rows) // num_groups,
            beta=0.04,
            use_bias_correction_kl=False,  # GRPO's KL term, as in this project
            learning_rate=1e-4,
            temperature=1.0,
            loss_type="grpo",
            scale_rewards="group",
            num_iterations=1,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
        )
        rows = {
            "prompt": [_messages(row.instruction) for row in self._rows],
            "image": [row.source for row in self._rows],
        }
        lora = LoraConfig(
            r=toy.LORA["r"],
            lora_alpha=toy.LORA["alpha"],
            target_modules=toy.LORA["target_modules"],
            task_type="CAUSAL_LM",
        )
        trainer = trainer_type(
            model=model,
            reward_funcs=self.tuned_reward if tuned else self.stock_reward,
            args=config,
            train_dataset=Dataset.from_dict(rows),
            processing_class=self._processor,
            peft_config=lora,
            rollout_func=self.rollout,
        )
        if not tuned:
            trainer.use_vllm = True
            trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
            trainer._last_loaded_step = -1
        return trainer

    def _watch(self) -> None:
        meter, trainer = self._link.meter, self._trainer
        watch_models(meter)
        meter.watch(trainer, "training_step", POLICY)
        meter.watch(trainer, "_generate_and_score_completions", REST)
        meter.watch(trainer, "_get_per_token_logps_and_entropies", POLICY)
        meter.watch(torch.optim.AdamW, "step", POLICY)

    def train(self) -> None:
        """Runs an iteration for each order, until the worker is killed or no rows are left."""
        from transformers import TrainerCallback

        link = self._link

        class Steps(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                link.end()
                link.begin()

        self._trainer.add_callback(Steps())
        link.begin()
        self._trainer.train()

    # The rollout

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: returns the fixed completions; each G `prompts` are one group."""
        prompt_ids, ids, logprobs = [], [], []
        for first in range(0, len(prompts), self._shape.group):
            row = self._sample_of[_words(prompts[first])]
            with self._link.meter.span(SAMPLING):
                inputs = self._inputs([row.source], [self._prompt_text(row)])
                if self._sampler is not None:
                    self._sampler.sample(inputs, self._shape)
            for text in toy.make_completions(row.instruction, self._shape):
                prompt_ids.append(inputs["input_ids"][0].tolist())
                ids.append(toy.completion_ids(self._tokenizer, text))
                logprobs.append([SAMPLER_LOGPROB] * len(ids[-1]))
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs}

    def _prompt_text(self, row: Sample) -> str:
        content = [{"type": "image"}, {"type": "text", "text": row.instruction}]
        chat = self._processor.apply_chat_template(
            _messages(content), add_generation_prompt=True, tokenize=False
        )
        return str(chat)

    def _inputs(self, images: list[Any], texts: list[str]) -> dict[str, torch.Tensor]:
        return dict(self._processor(text=texts, images=images, return_tensors="pt"))

    # The reward functions

    def stock_reward(
        self, prompts: Any, completions: Any, image: list[Image.Image], **_: Any
    ) -> list[float]:
        """Renders one completion after another, then asks the judge."""
        span = self._link.meter.span
        reward_inputs = []
        for prompt, completion, source in zip(prompts, completions, image, strict=True):
            row = self._sample_of[_words(prompt)]
            text = completion[0]["content"]
            with span(POLICY):
                states = self._condition_stock(row, source, text)
            with span(RENDER):
                picture = self._renderer(
                    image=source,
                    prompt_embeds=states,
                    prompt_embeds_mask=torch.ones(states.shape[:2], dtype=torch.long),
                    height=self._shape.render_px,
                    width=self._shape.render_px,
                    num_inference_steps=self._shape.num_steps,
                    true_cfg_scale=1.0,
                    generator=torch.Generator().manual_seed(0),
                ).images[0]
            reward_inputs.append(RewardInput(row, text, picture))
        with span(JUDGE_WAIT):
            grades = list(self._pool.map(lambda each: self._ask(each).result(), reward_inputs))
        return [float(grade.value) for grade in grades]

    @torch.no_grad()
    def _condition_stock(self, row: Sample, source: Image.Image, text: str) -> torch.Tensor:
        """Forwards prompt and completion, and computes the logits and all layers' states, too."""
        inputs = self._inputs([source], [self._prompt_text(row) + text + toy.STOP])
        outputs = self._trainer.model(**inputs, output_hidden_states=True)
        return outputs.hidden_states[-1][:, NUM_DROPPED_TOKENS:]

    def tuned_reward(
        self, prompts: Any, completions: Any, image: list[Image.Image], **_: Any
    ) -> list[float]:
        """Renders a group at a time; its pictures are judged while later ones are rendered."""
        span, group = self._link.meter.span, self._shape.group
        grading: list[Any] = []
        for first in range(0, len(prompts), group):
            row = self._sample_of[_words(prompts[first])]
            texts = [completion[0]["content"] for completion in completions[first : first + group]]
            with span(POLICY):
                states_G = self._condition_tuned(row, image[first], texts)
            sample = Sample(row.id, row.instruction, sources=(image[first],))
            jobs = [RenderJob(sample, HiddenStates(states), 0) for states in states_G]
            pictures: dict[int, Any] = {}
            with span(RENDER):
                for index, picture in self._renderer.render(jobs):
                    pictures[index] = self._ask(RewardInput(sample, texts[index], picture))
            grading += [pictures[index] for index in range(group)]
        with span(JUDGE_WAIT):
            grades = [future.result() for future in grading]
        return [float(grade.value) for grade in grades]

    @torch.no_grad()
    def _condition_tuned(
        self, row: Sample, source: Image.Image, texts: list[str]
    ) -> list[torch.Tensor]:
        """Forwards a group in one batch without the head; preprocesses its picture once."""
        prompt = self._inputs([source], [self._prompt_text(row)])
        completion_ids = torch.tensor([toy.completion_ids(self._tokenizer, text) for text in texts])
        if self._tuning.prompt_once == "never":
            return self._in_one_batch(prompt, completion_ids)
        of_prompt, of_rows = prompt_once(self._body, prompt, completion_ids)
        states_G = [torch.cat([of_prompt[NUM_DROPPED_TOKENS:], states]) for states in of_rows]
        if not self._checked:
            self._checked = True
            for ours, plain in zip(
                states_G, self._in_one_batch(prompt, completion_ids), strict=True
            ):
                assert_equal(ours, plain)
        return states_G

    def _in_one_batch(
        self, prompt: dict[str, torch.Tensor], completion_ids: torch.Tensor
    ) -> list[torch.Tensor]:
        """Forwards rows, each of which contains the prompt. Completions have equal lengths, so no
        row is padded."""
        num_rows = len(completion_ids)
        inputs = {
            name: tensor.repeat(num_rows, *[1] * (tensor.ndim - 1))
            for name, tensor in prompt.items()
        }
        for name, tail in (
            ("input_ids", completion_ids),
            ("attention_mask", torch.ones_like(completion_ids)),
            ("mm_token_type_ids", torch.zeros_like(completion_ids)),
        ):
            inputs[name] = torch.cat([inputs[name], tail], dim=1)
        hidden = self._body(**inputs, use_cache=False).last_hidden_state
        return list(hidden[:, NUM_DROPPED_TOKENS:])

    def _ask(self, reward_input: RewardInput) -> Any:
        return self._judge_loop.submit(self._reward.grade(reward_input))


def _messages(content: Any) -> list[dict[str, Any]]:
    from tiny_world.builder.tokenizer import SYSTEM_PROMPT

    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]


def _words(prompt: list[dict[str, Any]]) -> str:
    """The user's text in a chat's last message."""
    content = prompt[-1]["content"]
    if isinstance(content, str):
        return content
    return next(part["text"] for part in content if part["type"] == "text")


def make_processor(folder: Path) -> Any:
    """A `Qwen2_5_VLProcessor` with a PIL image processor, and without a video processor, which
    would need torchvision."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    Qwen2_5_VLProcessor.check_argument_for_proper_class = lambda self, name, argument: argument
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")  # nosec B615 # local
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)  # nosec B615 # local
    return Qwen2_5_VLProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=tokenizer.chat_template,
    )


def ordered_samples(shape: Shape) -> list[Sample]:
    """The rows, in the order in which this project's run reads them."""
    num_rows = toy.MAX_ITERATIONS * shape.num_groups
    config = toy.Config(type="benchmarks.toy", num_samples=num_rows, shape=vars(shape))
    source: Any = toy.ToySamples(config, RowRules())
    order = PromptOrder([source], [1.0], 0, shape.num_groups)
    return [row for i in range(toy.MAX_ITERATIONS) for row in order.shard(i, 0, 1, lambda row: row)]


def make_pipeline(folder: Path, shape: Shape) -> Any:
    """diffusers' pipeline. It resizes a source to an area of 1024^2; here that area is
    `render_px`^2, as in this project's renderer, so that both do the same work."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImageEditPipeline,
        QwenImageTransformer2DModel,
    )
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as module

    dimensions = module.calculate_dimensions
    module.calculate_dimensions = lambda area, ratio: dimensions(shape.render_px**2, ratio)
    editor = folder / "editor"
    pipeline = QwenImageEditPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(editor / "scheduler"),
        vae=AutoencoderKLQwenImage.from_pretrained(editor / "vae"),
        transformer=QwenImageTransformer2DModel.from_pretrained(editor / "transformer"),
        text_encoder=None,
        tokenizer=None,
        processor=None,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
