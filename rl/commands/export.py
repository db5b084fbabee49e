"""What a run trained, as a folder for other tools: `rl export <run, checkpoint, adapter> <target>`.

    --as model          base + adapter, with tokenizer and image processor: for transformers and
                        vLLM (the default)
    --as adapter        the PEFT folder as the run wrote it, the base beside it unchanged
    --as text-encoder   base + adapter as the `text_encoder` folder of a diffusers pipeline, which
                        serving tools take: where the run drove an editor by its hidden states

Of a run the newest whole checkpoint is taken, or the one of --checkpoint (best, or a number).
Beside the model lies its card, README.md: what it is, how to use it, what was learnt and its
limits, with the reward's curve and pictures of the first held-out samples (--no-pictures leaves
them out). After full fine-tuning the model is copied; it is no adapter.

The adapter is added in float32 and rounded once at the end. The run's own config says which weights
it belongs to; for a bare PEFT folder its adapter_config.json. `--base` and `--text-encoder-from`
override both. The whole base is in memory in float32: 4 bytes a parameter, about 15 GB for 3B and
33 GB for 7B.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, get_args

from rl import build
from rl.api import find
from rl.check.this_machine import free_gb
from rl.checkpoints.checkpoint import MODEL_CARD
from rl.commands.export_evidence import gather
from rl.config.messages import validate
from rl.config.schema import RunConfig
from rl.console.console import duration, warn
from rl.console.progress import weights_counted
from rl.edit.trained import Trained, load_trained
from rl.files import adapter_base
from rl.files.atomic import row_of
from rl.files.model_files import cached, model_problems
from rl.files.weights import num_parameters
from rl.policies.shared.model_loading import local_folder
from rl.policies.shared.policy_base import TrainedPolicy
from rl.publish import hub
from rl.publish.card_facts import at
from rl.publish.model_card import PIPELINES, Form, model_card
from rl.text import terminal
from rl.text.scrub import scrub

ADAPTER_FILES = (adapter_base.ADAPTER_CONFIG, "adapter_model.safetensors", MODEL_CARD)
WHOLE_MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.tiktoken", "*.safetensors", MODEL_CARD)
DTYPES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number."""


def main(arguments: Sequence[str] | None = None) -> None:
    terminal.guard()
    parser = argparse.ArgumentParser(
        prog="rl export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", type=Path, help="run folder, checkpoint, or PEFT folder")
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
    if args.push_to:
        push(args.target, args.push_to)


def push(folder: Path, repo_id: str) -> None:
    """Upload it. What goes wrong is a warning: the folder is written."""
    try:
        with stage(f"uploading to {repo_id}"):
            hub.upload(folder, repo_id, "exported")
    except Exception as error:  # the network and its library may fail in any way
        warn(
            scrub(
                f"the upload to {repo_id!r} failed: {error!r}; {folder} is whole, upload it by "
                f"hand: hf upload {repo_id} {folder}"
            )
        )


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
    if is_copied and args.form != "text-encoder" and not args.dtype:
        names = ADAPTER_FILES if trained.is_adapter else WHOLE_MODEL_FILES
        files = sorted(_inside(file) for name in names for file in trained.model.glob(name))
        _require_room(args.target, sum(file.stat().st_size for file in files))
        with written_aside(args.target) as part:
            part.mkdir(parents=True)
            for file in files:
                shutil.copy2(file, part)
            write_card(trained, part, args.form, not args.no_pictures)
        return
    config = model_config(trained, args.base, args.text_encoder_from)
    dtype = args.dtype or config.dtype
    _require_room(args.target, int(num_parameters_of(config) * DTYPES[dtype]))
    with written_aside(args.target) as part:
        merge(trained, config, dtype, args.form != "text-encoder", part)
        write_card(trained, part, args.form, not args.no_pictures)


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
    kind = at(trained.config, "policy.type") or policy_of_folder(trained.model)
    is_read = renderer in PIPELINES or renderer not in build.plugs_of("renderers")
    if not is_read or "hidden_states" not in policies()[kind].emits:
        raise ValueError(
            f"a {kind} with renderer {renderer!r} is no editor's text encoder; export it --as model"
        )


def model_config(trained: Trained, base: str | None, text_encoder_from: str | None) -> Any:
    """The policy section that loads what the result is made of: the base of an adapter, or the
    whole model itself. Raises ValueError naming what is not known and how to say it."""
    if not trained.is_adapter:
        section = trained.policy() if trained.config else {}
        section = {**section, "model_path": str(trained.model)}
        section.pop("lora", None)
    elif trained.config is not None:
        section = dict(trained.config["policy"])
    else:
        noted = adapter_base.read_config(trained.model)
        try:
            section = {} if base else adapter_base.base_of(noted).policy_keys()
        except ValueError as error:
            raise ValueError(
                f"{error}; or give --base (and --text-encoder-from for an editor's text encoder)"
            ) from error
    if "type" not in section:
        section["type"] = policy_of_folder(trained.model, base)
    if trained.is_adapter and base is not None:
        section |= {"model_path": base, "revision": None}
        section.pop("init_text_encoder_from", None)
    if trained.is_adapter and text_encoder_from is not None:
        section["init_text_encoder_from"] = text_encoder_from
    policy = policies().get(section["type"])
    if policy is None:
        raise ValueError(f"policies of type {section['type']!r} cannot be exported here")
    # No attention is computed: the run's kernel need not run here.
    section |= {"adapter_path": "", "attn_implementation": "auto"}
    config, problems = validate(policy.Config, section, at="policy")
    problems = problems or [
        *model_problems(policy.models(config)),
        *policy.problems(config, RunConfig.model_construct()),
    ]
    if problems:
        remedy = "say where the base lies with --base (and --text-encoder-from)"
        raise ValueError("\n".join([*problems, remedy]))
    return config


def policies() -> Mapping[str, type[TrainedPolicy[Any]]]:
    """Type -> plugin."""
    found = {}
    for name in build.plugs_of("policies"):
        module, _ = find.import_plug(build.module_of("policies", name))
        [plug] = find.plugs_in(module, build.ROOMS["policies"])
        assert issubclass(plug, TrainedPolicy)
        found[name] = plug
    return found


def policy_of_folder(model: Path, base: str | None = None) -> str:
    """The policy's type by the adapter's config, else by the config.json of its base (or `base`),
    or of the whole model; 'qwen2_5_vl' where none says it."""
    path: Any = str(model)
    if (model / adapter_base.ADAPTER_CONFIG).is_file():
        noted = adapter_base.read_config(model)
        model_class = adapter_base.model_class_of(noted)
        for name, plug in policies().items():
            if model_class in plug.model_classes:
                return name
        path = base or noted.get(adapter_base.NAME)
    try:
        file = local_folder(str(path), None, ["config.json"]) / "config.json"
        kind = str((row_of(file.read_bytes()) or {}).get("model_type"))
    except (OSError, ValueError):  # loading it will say what is wrong
        kind = ""
    return next((n for n, plug in policies().items() if kind in plug.model_types), "qwen2_5_vl")


def num_parameters_of(config: Any) -> float:
    """Number of parameters, by the files' headers; 0 where they are not on this machine yet."""
    policy = policies()[config.type]
    [model] = [model for model in policy.models(config) if model.weights]
    file: Path | None = Path(model.path, model.subfolder, model.config)
    if not Path(model.path).is_dir():
        file = cached(model.path, str(Path(model.subfolder, model.config)), model.revision)
    return num_parameters(file.parent) if file else 0.0


def merge(trained: Trained, config: Any, dtype: str, with_words: bool, target: Path) -> None:
    """Base + adapter (or what was trained whole), added in float32 and rounded to `dtype` once;
    `with_words` with what its prompts need."""
    import torch

    policy = policies()[config.type]
    with stage(f"loading {config.model_path} in float32"):
        model = policy.loading.load_model(config.model_copy(update={"dtype": "float32"}))
    if trained.is_adapter:
        from peft import PeftModel

        with stage("adding the adapter"):
            model = PeftModel.from_pretrained(model, str(trained.model)).merge_and_unload()
    with stage(f"writing the weights in {dtype}"), weights_counted():
        model.to(getattr(torch, dtype)).save_pretrained(target)
    if with_words:
        policy.save_prompt_files(config, target)


def _require_room(target: Path, num_bytes: int) -> None:
    """Say what will be written. Raises ValueError where the disk has no room for it."""
    free = free_gb(target)
    need = f"{num_bytes / 1e9:.3g} GB" if num_bytes else "an unknown size (fetched first)"
    print(f"writing {need} to {target}, where {free:.3g} GB are free")
    if num_bytes / 1e9 > free:
        raise ValueError(
            f"{target}: {need} are to be written and {free:.3g} GB are free; name a larger disk"
        )


def _inside(file: Path) -> Path:
    """`file`, unless it is a link out of its folder: what is exported is passed on. A hub's cache
    has links into its own `blobs`. Raises ValueError."""
    folder, place = file.parent.resolve(), file.resolve()
    blobs = folder.parent.parent / "blobs"
    if file.is_symlink() and not (place.is_relative_to(folder) or place.parent == blobs):
        raise ValueError(f"{file} is a link to {place}, elsewhere; put the file itself there")
    return file


def write_card(trained: Trained, target: Path, form: Form, with_pictures: bool) -> None:
    """README.md; a folder without a run keeps the one that it has."""
    if trained.config is None:
        there = trained.model / MODEL_CARD
        if there.is_file() and not (target / MODEL_CARD).exists():
            shutil.copyfile(_inside(there), target / MODEL_CARD)
        return
    evidence = None
    if trained.run_dir is not None:
        with stage("writing the card"):
            evidence = gather(trained.run_dir, trained.iterations, target, with_pictures)
    card = model_card(trained.config, trained.iterations, trained.metrics, form, evidence)
    (target / MODEL_CARD).write_text(scrub(card), encoding="utf-8")


if __name__ == "__main__":
    main()
