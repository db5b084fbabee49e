"""The model card of a checkpoint, and its upload to the hub."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from rl.api.policy import ThoughtSection
from rl.api.types import PromptTemplate
from rl.console import duration, warn
from rl.files import with_leaves
from rl.model_files import cached, is_hub_id
from rl.printing import code, load_template, scrub, text

# ---- model card ----------------------------------------------------------------------------------
# Writes the model card (README.md) of a trained model from `model_card.md.j2`, values escaped.

Form = Literal["adapter", "model", "text-encoder"]
"""A PEFT adapter; a model with tokenizer; the `text_encoder` folder of a diffusers pipeline."""
PIPELINES = {
    "qwen_image_edit": "QwenImageEditPipeline",
    "qwen_image_edit_plus": "QwenImageEditPlusPipeline",
    "qwen_image_21": "QwenImage21Pipeline",
}
"""Renderer -> its diffusers class."""
MODEL_CLASSES = {"emu3": "Emu3ForCausalLM", "qwen3_vl": "Qwen3VLForConditionalGeneration"}
"""Policy -> its transformers class, unless that is Qwen2.5-VL's."""
TASKS = {
    **dict.fromkeys((*PIPELINES, "emu3_vq"), "image-to-image"),
    "sd3": "text-generation",
    "images_api": "image-text-to-text",
    "none": "image-text-to-text",
}
"""Renderer -> the hub's `pipeline_tag` of the trained model."""
DESCRIPTIONS = {
    "adapter": "A PEFT adapter of a",
    "model": "A",
    "text-encoder": "The text encoder of an editor: a",
}


def model_card(
    config: Mapping[str, Any],
    iteration: int,
    metrics: Mapping[str, float],
    form: Form | None = None,
    held_out: Mapping[int, float | None] | None = None,
    template: PromptTemplate | None = None,
) -> str:
    """Markdown with the hub's front matter.

    `config`: the resolved run config, any part of which may be missing. `metrics`: the latest
    scalars of the run. `form`: None = the form that a checkpoint holds. `held_out`: iterations done
    -> mean held-out reward, None where not measured. `template`: from `Policy.prompt_template`; the
    card then has a program that prints the policy's words.
    """
    form = form or ("adapter" if at(config, "policy.lora") else "model")
    renderer, run = str(at(config, "renderer.type")), str(config.get("run_name", ""))
    is_editors = bool(at(config, "policy.init_text_encoder_from"))
    thought, revision = at(config, "policy.thought"), at(config, "policy.revision")

    def setting(key: str) -> str:
        value = at(config, key)
        return "unknown" if value is None else str(value)[:60]

    def of_hub(path: object, otherwise: str) -> Markup:
        return Markup(path if is_of_hub(path) else otherwise)  # nosec B704 # a hub id

    processor, editor = at(config, "policy.model_path"), at(config, "renderer.model_path")
    sources = [base_of(config), editor, *training_paths(config)]
    markdown = load_template(
        Path(__file__).with_name("model_card.md.j2"),
        finalize=lambda value: value if isinstance(value, Markup) else text(value),
        keep_trailing_newline=True,
    )
    return markdown.render(
        front=Markup(_front(config, form)),  # nosec B704 # YAML
        name=config.get("run_name", "a policy"),
        description=DESCRIPTIONS[form],
        setting=setting,
        value=lambda key, section=config: at(section, key),
        python=_python,
        prompt=template,
        prompt_lines=re.split(r"(?<=\n)(?=.)", template.text) if template else [],
        iteration=iteration,
        form=form,
        renderer=renderer,
        pipeline=PIPELINES.get(renderer, "DiffusionPipeline"),
        model_class=MODEL_CLASSES.get(
            str(at(config, "policy.type")), "Qwen2_5_VLForConditionalGeneration"
        ),
        editor=of_hub(editor, "<the editor>"),
        base=of_hub(base_of(config), "<the base>"),
        words=of_hub(processor, "<the tokenizer>"),
        revision=Markup(", revision=") + _python(revision)
        if revision and form == "adapter"
        else "",
        thought=ThoughtSection.model_validate(thought) if template and thought else None,
        is_editors=is_editors,
        processor_path=of_hub(processor, "") if is_editors else "",
        task=TASKS.get(renderer),
        run=Markup(  # nosec B704 # letters, digits, "_", ".", "-"
            f"runs/{run}" if re.fullmatch(r"[\w.-]+", run) else "<its run folder>"
        ),
        held_out={n: reward for n, reward in (held_out or {}).items() if reward is not None},
        metrics=metrics,
        sources=[path for path in dict.fromkeys(sources) if isinstance(path, str) and path],
        is_of_hub=is_of_hub,
        licence_of=licence_of,
        config=Markup("\n".join(code(with_leaves(dict(config), _without_path)))),  # nosec B704 # escaped
    )


def _python(value: Any) -> Markup:
    """A literal of Python, which closes no fenced block."""
    literal = ascii(scrub(value) if isinstance(value, str) else value)
    return Markup(literal.replace("`", r"\x60"))  # nosec B704 # escaped


def _front(config: Mapping[str, Any], form: Form) -> str:
    """The card's front matter, as YAML."""
    from huggingface_hub import ModelCardData

    base = base_of(config)
    licence, licence_name = licence_of(base)
    relation = "adapter" if form == "adapter" else "finetune"
    front = ModelCardData(
        library_name={"adapter": "peft", "model": "transformers"}.get(form, "diffusers"),
        tags=["grpo", "reinforcement-learning"],
        pipeline_tag=TASKS.get(str(at(config, "renderer.type"))),
        license=licence,
        license_name=licence_name,
        datasets=sorted(
            {path for path in training_paths(config) if path.count("/") == 1 and is_of_hub(path)}
        )
        or None,
        base_model=base if is_of_hub(base) else None,
        base_model_relation=relation if is_of_hub(base) else None,
    )
    return str(front.to_yaml())


def at(config: Any, key: str) -> Any:
    """The value at 'section.key'; None where there is none."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def is_of_hub(path: object) -> bool:
    """Whether `path` is the id of a hub repository, and not a local folder."""
    return isinstance(path, str) and bool(path) and is_hub_id(path)


def base_of(config: Mapping[str, Any]) -> str:
    """The weights that training started from, folder or hub id; '' if unknown."""
    base = at(config, "policy.init_text_encoder_from") or at(config, "policy.model_path")
    return base if isinstance(base, str) else ""


def training_paths(config: Mapping[str, Any]) -> list[str]:
    """Folders, files and hub ids of the training data."""
    sources = at(config, "data.train")
    paths = [at(s, "path") for s in (sources if isinstance(sources, list) else [])]
    return [path for path in paths if isinstance(path, str)]


def _without_path(value: Any) -> Any:
    """`value` without paths and addresses of the training machine; hub ids stay."""
    if not isinstance(value, str) or value.startswith("pkg://"):
        return value
    if "://" in value:
        return "(an address)"
    is_path = "/" in value or value.startswith("~")
    return f"(a path)/{Path(value).name}" if is_path and not is_of_hub(value) else value


def licence_of(path: str) -> tuple[str, str | None]:
    """(licence, its name if the licence is 'other') from the card of a model or a data set in its
    folder or the hub's cache; ('other', 'unknown') if none states one. Makes no network request."""
    from huggingface_hub import metadata_load

    front: Mapping[str, Any] = {}
    with suppress(Exception):  # no card, or the YAML reader, which may raise anything
        card = cached(path, "README.md") if is_of_hub(path) else Path(path, "README.md")
        front = (card and metadata_load(card)) or {}
    licence, name = front.get("license"), front.get("license_name", "unknown")
    if not isinstance(licence, str) or not isinstance(name, str):
        return "other", "unknown"
    return licence, name if licence == "other" else None


# ---- hub -----------------------------------------------------------------------------------------
# Uploads a checkpoint's model folder to the hub during training; a failure never stops the run.

CLOSE_TIMEOUT_S = 600.0
"""Longest wait for uploads at the end of a run."""


class Pusher:
    """Uploads model folders from rank 0, one at a time, in a thread.

    `main` gets the newest model; the branch `ckpt_000020` keeps the model after 20 iterations. Any
    failure is logged as one warning.
    """

    def __init__(self, repo_id: str) -> None:
        self._repo_id = repo_id
        self._thread: threading.Thread | None = None
        self.uploading: set[int] = set()
        """Iterations whose checkpoints are being read, or will be."""

    def push(self, folder: Path, iteration: int, final: bool = False) -> None:
        """Start the upload of `folder`. While another one runs, the upload is left out, unless it
        is the `final` one: that comes after the other."""
        earlier = self._thread
        if earlier is not None and earlier.is_alive() and not final:
            self._warn(iteration, "not uploaded: an earlier upload is not done")
            return
        self.uploading |= {iteration}
        # A daemon, unlike an executor's thread: a stuck network keeps no process alive.
        arguments = (folder, iteration, earlier)
        self._thread = threading.Thread(target=self._upload, args=arguments, daemon=True)
        self._thread.start()

    def close(self, say: Callable[[str], None], timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait at most `timeout_s` for running uploads; `say` prints a line."""
        if self._thread is None or not self._thread.is_alive():
            return
        say(f"uploading to {self._repo_id} (waiting {duration(timeout_s)} at most)")
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            warn(
                f"push_to_hub to {self._repo_id!r} is not done after {duration(timeout_s)}; the "
                "run ends. Upload the newest checkpoint's model folder by hand (hf upload)"
            )

    def _upload(self, folder: Path, iteration: int, earlier: threading.Thread | None) -> None:
        if earlier is not None:
            earlier.join()
        try:
            upload(folder, self._repo_id, f"iteration {iteration}", f"ckpt_{iteration:06d}")
        # huggingface_hub and the network may raise anything.
        except Exception as error:
            self._warn(iteration, f"failed, the run goes on: {error!r}")
        self.uploading -= {iteration}

    def _warn(self, iteration: int, reason: str) -> None:
        warn(scrub(f"push_to_hub to {self._repo_id!r}, iteration {iteration}: {reason}"))


def upload(folder: Path, repo_id: str, message: str, branch: str) -> None:
    """Make one commit on `main` of the repository (created as private if missing), and point
    `branch` to it. Raises whatever the network or huggingface_hub raises."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # they would garble the console
    api = HfApi()
    api.create_repo(repo_id, private=True, exist_ok=True)
    commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message).oid
    if any(ref.name == branch for ref in api.list_repo_refs(repo_id).branches):
        api.delete_branch(repo_id, branch=branch)  # a resumed run repeats this iteration
    api.create_branch(repo_id, branch=branch, revision=commit)
