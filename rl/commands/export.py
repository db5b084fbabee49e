"""Writes what a run trained as a folder for other tools: `rl export <run or checkpoint> <target>`.

    --as model          base + adapter, with tokenizer and image processor: for transformers and
                        vLLM (the default)
    --as adapter        the PEFT folder as the run wrote it, the base beside it unchanged
    --as text-encoder   base + adapter as the `text_encoder` folder of a diffusers pipeline, which
                        serving tools take: where the run drove an editor by its hidden states

Of a run the newest whole checkpoint is taken, or the one of --checkpoint (best, or a number).
Beside the model lies its card, README.md: what it is, how to use it, what was learnt and its
limits, with the reward's curve and pictures of the first held-out samples (--no-pictures leaves
them out). After full fine-tuning the model is copied; it is no adapter.

The adapter is added in float32 and rounded once at the end. The run's own config names the base
weights; `--base` and `--text-encoder-from` name them where they are elsewhere now. The whole base
is in memory in float32: 4 bytes a parameter, about 15 GB for 3B and 33 GB for 7B.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, get_args

from rl import build
from rl.api import find
from rl.checkpoints.checkpoint import MODEL_CARD
from rl.commands.export_evidence import gather
from rl.config.messages import validate
from rl.config.schema import RunConfig
from rl.console.console import duration, warn
from rl.console.progress import weights_counted
from rl.edit.trained import Trained, load_trained
from rl.files import adapter_base
from rl.files.model_files import model_problems
from rl.policies.shared.policy_base import TrainedPolicy
from rl.publish import hub
from rl.publish.model_card import PIPELINES, Form, at, model_card
from rl.text import terminal
from rl.text.scrub import scrub

ADAPTER_FILES = (adapter_base.ADAPTER_CONFIG, "adapter_model.safetensors")
WHOLE_MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.tiktoken", "*.safetensors")
DTYPES = ("bfloat16", "float16", "float32")


def main(arguments: Sequence[str] | None = None) -> None:
    terminal.guard()
    parser = argparse.ArgumentParser(
        prog="rl export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", type=Path, help="run folder, or one of its checkpoints")
    add("target", type=Path, help="folder to write; must not exist")
    add("--as", dest="form", choices=get_args(Form), default="model", help="see above")
    add(
        "--checkpoint",
        default="latest",
        help="of a run: latest, best (on held-out samples), or its number of iterations",
    )
    add("--base", help="folder or hub id of weights, tokenizer and processor")
    add("--text-encoder-from", help="folder or hub id of an editor whose text encoder is the base")
    add("--dtype", choices=DTYPES, help="of the result; default: the run's")
    add("--push-to", help="repository of the hub, me/my-model, private if it is made; optional")
    add("--no-pictures", action="store_true", help="none of the held-out samples beside the card")
    args = parser.parse_args(arguments)
    try:
        export(args)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error
    print(f"wrote {args.target}")
    if not args.push_to:
        return
    try:
        with stage(f"uploading to {args.push_to}"):
            hub.upload(args.target, args.push_to, "exported")
    except Exception as error:  # the network and its library may fail in any way
        problem = (
            f"the upload to {args.push_to!r} failed: {error!r}; {args.target} is whole, upload it "
            f"by hand: hf upload {args.push_to} {args.target}"
        )
        warn(scrub(problem))


def export(args: argparse.Namespace) -> None:
    """Raises ValueError for what the user can fix."""
    trained = load_trained(args.source, args.checkpoint)
    if args.target.exists():
        raise ValueError(f"{args.target} exists; name a folder that does not")
    if args.form == "adapter" and not trained.is_adapter:
        raise ValueError(
            f"{trained.model} is a whole model (full fine-tuning): there is no adapter; export it "
            "--as model"
        )
    if args.form == "adapter" and args.dtype:
        raise ValueError("--dtype is of a model; --as adapter copies what the run wrote")
    if args.form == "text-encoder":
        refuse_without_text_encoder(trained)
    is_copied = args.form == "adapter" or not trained.is_adapter
    with written_aside(args.target) as part:
        if is_copied and args.form != "text-encoder" and not args.dtype:
            part.mkdir(parents=True)
            for name in ADAPTER_FILES if trained.is_adapter else WHOLE_MODEL_FILES:
                for file in trained.model.glob(name):
                    shutil.copy2(_inside(file), part)
        else:
            config = model_config(trained, args.base, args.text_encoder_from)
            merge(trained, config, args.dtype or config.dtype, args.form != "text-encoder", part)
        evidence = None
        if trained.run_dir is not None:
            with stage("writing the card"):
                evidence = gather(trained.run_dir, trained.iterations, part, not args.no_pictures)
        card = model_card(trained.config, trained.iterations, trained.metrics, args.form, evidence)
        (part / MODEL_CARD).write_text(scrub(card), encoding="utf-8")


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """`.<target>.rl-export` to write, renamed at the end: under its own name the target is whole.
    One that fails, or that a kill left, is deleted."""
    part = target.with_name(f".{target.name}.rl-export")
    shutil.rmtree(part, ignore_errors=True)
    try:
        yield part
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextmanager
def stage(what: str) -> Iterator[None]:
    """A line when it begins, and how long it took."""
    print(f"{what} ...", flush=True)
    began_s = monotonic()
    yield
    print(f"  {duration(monotonic() - began_s)}", flush=True)


def refuse_without_text_encoder(trained: Trained) -> None:
    """Raises ValueError where what was trained is no editor's text encoder."""
    if at(trained.config, "policy.conditioning") == "base":
        raise ValueError(
            "the run's renderer read the untrained states (policy.conditioning: 'base'): its text "
            "encoder is the base's own; export what was trained --as model"
        )
    renderer = at(trained.config, "renderer.type")
    is_read = renderer in PIPELINES or renderer not in build.plugins_of("renderers")
    if not is_read or "hidden_states" not in policy_class(trained).emits:
        raise ValueError(
            f"a {at(trained.config, 'policy.type')} with renderer {renderer!r} is no editor's text "
            "encoder; export it --as model"
        )


def model_config(trained: Trained, base: str | None, text_encoder_from: str | None) -> Any:
    """The policy section that loads what the result is made of: the base of an adapter, or the
    whole model itself. Raises ValueError for what is not there, with the option that names it."""
    section = dict(trained.config["policy"] if trained.is_adapter else trained.policy())
    if trained.is_adapter and base is not None:
        section |= {"model_path": base, "revision": None}
        section.pop("init_text_encoder_from", None)
    if trained.is_adapter and text_encoder_from is not None:
        section["init_text_encoder_from"] = text_encoder_from
    # No attention is computed: the run's kernel need not run here.
    section |= {"adapter_path": "", "attn_implementation": "auto"}
    policy = policy_class(trained)
    config, problems = validate(policy.Config, section, at="policy")
    problems = problems or [
        *model_problems(policy.models(config)),
        *policy.problems(config, RunConfig.model_construct()),
    ]
    if problems:
        remedy = "say where the base is with --base (and --text-encoder-from)"
        raise ValueError("\n".join([*problems, remedy]))
    return config


def policy_class(trained: Trained) -> type[TrainedPolicy[Any]]:
    """The run's policy. Raises ValueError for a plugin that is not shipped: its code would run."""
    name = at(trained.config, "policy.type")
    if name not in build.plugins_of("policies"):
        raise ValueError(f"policies of type {name!r} cannot be exported here")
    module, _ = find.import_plugin(build.module_of("policies", name))
    [plugin] = find.plugins_in(module, build.ROOMS["policies"])
    assert issubclass(plugin, TrainedPolicy)
    return plugin


def merge(trained: Trained, config: Any, dtype: str, with_words: bool, target: Path) -> None:
    """Base + adapter (or what was trained whole), added in float32 and rounded to `dtype` once;
    `with_words` with what its prompts need."""
    import torch

    policy = policy_class(trained)
    with stage(f"loading {config.model_path} in float32"):
        model = policy.loading.load_model(config.model_copy(update={"dtype": "float32"}))
    if trained.is_adapter:
        from peft import PeftModel

        adapter_base.read_config(trained.model)  # refuses one that names code to import
        with stage("adding the adapter"):
            model = PeftModel.from_pretrained(model, str(trained.model)).merge_and_unload()
    with stage(f"writing the weights in {dtype}"), weights_counted():
        model.to(getattr(torch, dtype)).save_pretrained(target)
    if with_words:
        policy.save_prompt_files(config, target)


def _inside(file: Path) -> Path:
    """`file`, unless it is a link out of its folder: what is exported is passed on. A hub's cache
    has links into its own `blobs`. Raises ValueError."""
    folder, place = file.parent.resolve(), file.resolve()
    blobs = folder.parent.parent / "blobs"
    if file.is_symlink() and not (place.is_relative_to(folder) or place.parent == blobs):
        raise ValueError(f"{file} is a link to {place}, elsewhere; put the file itself there")
    return file


if __name__ == "__main__":
    main()
