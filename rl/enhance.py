"""Better prompts from a trained policy, outside of training: asked as its run trained it (same
chat, system prompt, picture sizes and banned tokens), sampled in batches.

    enhancer = Enhancer(adapter_path="runs/my-run/checkpoints/step_000200/model")
    print(enhancer.enhance("a cat made of rain").enhanced)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL.Image import Image

from rl import build
from rl.api.types import Sample
from rl.config.messages import validate
from rl.config.schema import RunConfig
from rl.edit import families
from rl.edit.editor import Editor, EditRequest, EditResult
from rl.edit.trained import (
    find_weights,
    pick_device,
    pick_dtype,
    refuse_plugins,
    written_config,
)
from rl.record.adapter_base import ADAPTER_CONFIG, base_of, read_config
from rl.rewards.prompt_quality import score

DEFAULT_MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
SYSTEM_PROMPT = (Path(__file__).parent / "enhance_system_prompt.txt").read_text("utf-8").strip()
"""What an untrained model is asked under, and `configs/prompt_enhancement.jsonnet` trains under."""
MAX_NEW_TOKENS = 120


@dataclass(frozen=True)
class Enhanced:
    """One prompt, rewritten."""

    original: str
    enhanced: str
    """The original where the model wrote nothing."""
    thought: str
    """What it wrote before, where its run thinks."""
    num_tokens: int
    """Written, the stop token included."""
    finish: Literal["stop", "length"]
    """'length': cut off at max_new_tokens."""
    failure: str | None
    """Why the original stands in for what the model wrote; None where it does not."""
    quality: Mapping[str, float]
    """Five points of 0..1 about the words alone, see `rl/rewards/prompt_quality.py`."""

    @property
    def quality_0_5(self) -> float:
        return sum(self.quality.values())


class Enhancer:
    """A loaded policy that rewrites prompts."""

    def __init__(
        self,
        model_path: str | None = None,
        adapter_path: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        system_prompt: str | None = None,
    ) -> None:
        """Load the model.

        Args:
            model_path: folder or hub id of a Qwen2.5-VL or a Qwen3-VL; None = the adapter's own
                base, or `DEFAULT_MODEL` without an adapter.
            adapter_path: a run folder (its newest whole checkpoint), a checkpoint, or its `model`
                folder (PEFT adapter, or the whole model of a full fine-tuning). The run's
                `config.json`, where it lies above, says how it was trained.
            device: 'auto' = CUDA, else the CPU.
            dtype: 'auto' = bfloat16, on the CPU float32.
            system_prompt: None = the run's, without a run `SYSTEM_PROMPT`.

        Raises ValueError when the adapter cannot be used so.
        """
        self.device = pick_device(device)
        section = policy_section(model_path, adapter_path, system_prompt)
        section["dtype"] = pick_dtype(self.device) if dtype == "auto" else dtype
        self._editor = Editor(_bare_run(section), self.device)
        self.system_prompt: str = section["system_prompt"]
        self.max_new_tokens = own_max_new_tokens(adapter_path)

    def enhance(self, prompt: str, image: Image | None = None, **options: Any) -> Enhanced:
        """One prompt; `options` as for `enhance_stream`."""
        return self.enhance_batch([prompt], [image], **options)[0]

    def enhance_batch(
        self, prompts: Sequence[str], images: Sequence[Image | None] | None = None, **options: Any
    ) -> list[Enhanced]:
        """All results at once; arguments as for `enhance_stream`."""
        return list(self.enhance_stream(prompts, images, **options))

    def enhance_stream(
        self,
        prompts: Sequence[str],
        images: Sequence[Image | None] | None = None,
        batch_size: int = 8,
        temperature: float = 0.7,
        max_new_tokens: int | None = None,
        seed: int = 0,
    ) -> Iterator[Enhanced]:
        """One result per prompt, in order, each batch as it is done.

        A result depends on its prompt, its picture and `seed`, not on the rest of the batch (but
        for float rounding, which in bfloat16 may turn a word). All prompts are checked first:
        raises ValueError for one that is empty or too long, or a `batch_size` below 1.

        Args:
            prompts: the users' words.
            images: a picture that goes with each, or None; None = none has one.
            batch_size: prompts decoded together.
            temperature: 0 = the likeliest words; training samples at 1.
            max_new_tokens: longest rewriting, tokens, a thought's included; None = the Enhancer's
                own, see `own_max_new_tokens`.
            seed: another one gives other words.
        """
        max_new_tokens = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; a batch holds one prompt at least")
        if temperature < 0 or max_new_tokens < 1:
            raise ValueError(
                f"temperature is {temperature}, max_new_tokens {max_new_tokens}; they must be at "
                "least 0 and 1"
            )
        pictures = [None] * len(prompts) if images is None else list(images)
        requests = [
            EditRequest(prompt.strip(), picture, id=prompt.strip())
            for prompt, picture in zip(prompts, pictures, strict=True)
        ]
        for number, request in enumerate(requests, 1):
            if not request.instruction:
                raise ValueError(f"prompt {number} is empty; write what the picture should show")
            picture = request.image
            sources = (picture,) if isinstance(picture, Image) else ()
            self._editor.policy.build_prompt(  # or it is too long
                Sample(f"prompt {number}", request.instruction, sources)
            )
        results = self._editor.edit_stream(
            requests,
            batch_size=batch_size,
            seed=seed,
            temperature=temperature,
            max_tokens=max_new_tokens,
        )
        return map(_read, results)


def _read(result: EditResult) -> Enhanced:
    original = result.request.instruction
    enhanced = result.words or original
    num_tokens = len(result.token_ids)
    failure = None if result.words else result.failure
    quality = score(original, enhanced)
    return Enhanced(original, enhanced, result.thought, num_tokens, result.finish, failure, quality)


def policy_section(
    model_path: str | None, adapter_path: str | Path | None, system_prompt: str | None
) -> dict[str, Any]:
    """The config section of the policy to load; see `Enhancer`."""
    section: dict[str, Any] = {
        "type": families.DEFAULT,
        "model_path": DEFAULT_MODEL,
        "lora": None,
        "system_prompt": SYSTEM_PROMPT,
    }
    if model_path is not None:
        section["type"] = families.of_model(model_path) or families.DEFAULT
    if adapter_path is not None:
        folder = find_weights(Path(adapter_path))
        run = run_of(folder)
        known = (
            dict(_trained(run).policy) if run else {"type": families.of_folder(folder, model_path)}
        )
        section = {**section, "model_path": "", **known}
        section.update(_weights(folder, known_base=bool(model_path or section["model_path"])))
    # Where the run trained is not where the model is used: other devices, other kernels.
    section.update(device="auto", attn_implementation="auto")
    if model_path is not None:
        if adapter_path is not None and section["lora"] is None:
            raise ValueError(
                f"{adapter_path} is a whole model and needs no other: drop model {model_path!r}"
            )
        section["model_path"] = model_path
        for key in ("revision", "init_text_encoder_from"):  # of the run's own base
            section.pop(key, None)
    if system_prompt is not None:
        section["system_prompt"] = system_prompt
    return section


def own_max_new_tokens(adapter_path: str | Path | None) -> int:
    """`MAX_NEW_TOKENS`, which leaves no room for a thought: with a run that thinks, as many as it
    trained with."""
    run = None if adapter_path is None else run_of(find_weights(Path(adapter_path)))
    config = None if run is None else _trained(run)
    if config is None or not config.policy.get("thought"):
        return MAX_NEW_TOKENS
    return config.sampling.max_completion_tokens


def run_of(folder: Path) -> Path | None:
    """The `config.json` of the run that wrote a checkpoint's `model` folder, or None."""
    checkpoints = folder.resolve().parent.parent
    file = checkpoints.parent / "config.json"
    return file if checkpoints.name == "checkpoints" and file.is_file() else None


def _trained(file: Path) -> RunConfig:
    """The config of a run. Raises ValueError when that run's prompts were not its own."""
    config, problems = validate(RunConfig, written_config(file))
    if config is None:
        raise ValueError("\n".join(f"{file}: {problem}" for problem in problems))
    refuse_plugins({"policy": config.policy, "renderer": config.renderer}, file)
    renderer = config.renderer["type"]
    bare = _bare_run(config.policy).model_copy(update={"renderer": config.renderer})
    plug = build.resolve(bare).renderer.cls
    if plug.accepts != "text" or not plug.makes_images:
        raise ValueError(
            f"{file}: this run's policy wrote for renderer {renderer!r}, which takes "
            f"{plug.accepts}" + ("" if plug.makes_images else " and draws nothing") + "; "
            "only policies that write prompts (renderer 'sd3') can enhance them"
        )
    return config


def _weights(folder: Path, known_base: bool) -> dict[str, Any]:
    """Where the weights come from, and the shape of the adapter, as its own file states them."""
    if not (folder / ADAPTER_CONFIG).is_file():
        whole = {"model_path": str(folder), "init_text_encoder_from": ""}
        return {**whole, "lora": None, "adapter_path": ""}
    adapter = read_config(folder)
    base = {} if known_base else base_of(adapter).policy_keys()
    return {
        **base,
        "adapter_path": str(folder),
        "lora": {"r": adapter["r"], "alpha": adapter["lora_alpha"]},
    }


def _bare_run(policy: Mapping[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_name": "enhance",
            "base_exp_dir": ".",
            "prompts_per_iteration": 1,
            "generations_per_prompt": 1,
            "policy": dict(policy),
            "engine": {"type": "transformers"},
            "renderer": {"type": "none"},
            "rewards": {},
            "data": {"train": []},
        }
    )
