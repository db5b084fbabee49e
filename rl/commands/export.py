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

The adapter is added in float32 and rounded once at the end. Which weights it belongs to stands in
the run's own config beside the checkpoint; for a bare PEFT folder in its adapter_config.json.
`--base` and `--text-encoder-from` override both. The whole base is in memory in float32: 4 bytes a
parameter, about 15 GB for 3B and 33 GB for 7B.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from rl import build
from rl.api import find
from rl.api.renderer import Renderer
from rl.commands.export_base import (
    DTYPES,
    merge,
    num_parameters_of,
    policy_config,
    run_config_of,
    stage,
    validated,
)
from rl.commands.export_evidence import gather, is_number
from rl.edit import families
from rl.preflight.disk import free_gb
from rl.record import hub, terminal
from rl.record.adapter_base import ADAPTER_CONFIG
from rl.record.card_facts import at
from rl.record.card_use import Form
from rl.record.checkpoint import (
    MODEL_CARD,
    checkpoint_of,
    model_folder,
    read_state,
)
from rl.record.console import warn
from rl.record.model_card import model_card
from rl.record.scrub import scrub

ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", MODEL_CARD)
WHOLE_MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.tiktoken", "*.safetensors", MODEL_CARD)


@dataclass(frozen=True)
class Trained:
    """What is exported."""

    model: Path
    """A PEFT folder, or one of a whole model."""
    is_adapter: bool
    run_config: Mapping[str, Any] | None = None
    """The config of its run; None where there is no run."""
    run_dir: Path | None = None
    """With the record of its training; None where it lies elsewhere."""
    iteration: int = 0
    """Finished ones."""
    metrics: Mapping[str, float] | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    terminal.guard()
    parser = argparse.ArgumentParser(
        prog="rl export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="run folder, checkpoint, or PEFT folder")
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--as", dest="form", choices=get_args(Form), default="model", help="see above"
    )
    parser.add_argument(
        "--checkpoint",
        default="latest",
        help="of a run: latest, best (on held-out samples), or its number of iterations",
    )
    parser.add_argument("--base", help="folder or hub id of weights, tokenizer and processor")
    parser.add_argument(
        "--text-encoder-from", help="folder or hub id of an editor whose text encoder is the base"
    )
    parser.add_argument(
        "--policy",
        choices=families.policies(),
        help="plug of a folder without a run; default: as its files say",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the result; default: the run's")
    parser.add_argument(
        "--push-to", help="repository of the hub, me/my-model, private if it is made; optional"
    )
    parser.add_argument(
        "--no-pictures", action="store_true", help="none of the held-out samples beside the card"
    )
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
    """Raises ValueError for what the user can mend."""
    trained = find_trained(args.source, args.checkpoint)
    if args.target.exists():
        raise ValueError(f"{args.target} exists; name a folder that does not")
    if args.form == "adapter" and not trained.is_adapter:
        raise ValueError(
            f"{trained.model} is a whole model (full fine-tuning): there is no adapter; export it "
            "--as model"
        )
    if args.form == "adapter" and args.dtype:
        raise ValueError("--dtype is of a model; --as adapter copies what the run wrote")
    if args.form == "text-encoder" and (problem := _no_text_encoder(trained, args.policy)):
        raise ValueError(problem)
    is_merged = trained.is_adapter and args.form != "adapter"
    if not (is_merged or args.form == "text-encoder" or args.dtype):
        names = ADAPTER_FILES if trained.is_adapter else WHOLE_MODEL_FILES
        files = sorted(own_file(file) for name in names for file in trained.model.glob(name))
        num_bytes = sum(file.stat().st_size for file in files)
        write = partial(copy, files)
    else:
        config = model_config(trained, args)
        dtype = args.dtype or config.dtype
        num_bytes = int(num_parameters_of(config) * DTYPES[dtype])
        adapter = trained.model if trained.is_adapter else None
        write = partial(merge, adapter, config, dtype, args.form != "text-encoder")
    _require_room(args.target, num_bytes)
    with written_aside(args.target) as part:
        write(part)
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


def find_trained(source: Path, which: str) -> Trained:
    """What `source` is or holds. Raises ValueError when there is nothing to export."""
    if which != "latest":
        source = checkpoint_of(source, which)
    model = model_folder(source)
    is_adapter = (model / ADAPTER_CONFIG).is_file()
    if not is_adapter and not (
        list(model.glob("*.safetensors")) and (model / "config.json").is_file()
    ):
        raise ValueError(
            f"{model} holds neither an adapter ({ADAPTER_CONFIG}) nor a run's checkpoints; name a "
            "run folder, one of its checkpoints/step_*, or a PEFT folder"
        )
    config = run_config_of(model)
    if config is None:
        return Trained(model, is_adapter)
    folder = model.resolve().parent
    state = read_state(folder)
    number, run_dir = at(state, "iteration"), folder.parent.parent
    metrics = at(state, "meta.metrics")
    metrics = metrics if isinstance(metrics, Mapping) else {}
    return Trained(
        model,
        is_adapter,
        config,
        run_dir if (run_dir / "metrics.jsonl").is_file() else None,
        number if type(number) is int else 0,
        {name: value for name, value in metrics.items() if is_number(value)},
    )


def _no_text_encoder(trained: Trained, bare_policy: str | None) -> str:
    """Why what was trained is no editor's text encoder, or ''."""
    if trained.run_config is None:
        kind = bare_policy or families.of_folder(trained.model)
        is_one = "hidden_states" in families.policies()[kind].emits
        return "" if is_one else f"a {kind} is no editor's text encoder; export it --as model"
    renderer = at(trained.run_config, "renderer.type")
    if at(trained.run_config, "policy.conditioning") == "base":
        return (
            "the run's renderer read the untrained states (policy.conditioning: 'base'): its text "
            "encoder is the base's own; export what was trained --as model"
        )
    if renderer in build.plugs_of("renderers"):
        module = import_module(build.module_of("renderers", renderer))
        plug, _ = find.plug_class(module, build.ROOMS["renderers"])
        assert plug is not None and issubclass(plug, Renderer)
        if plug.accepts != "hidden_states":
            return (
                f"the run's renderer {renderer!r} reads {plug.accepts}, not the policy's hidden "
                "states: what was trained is no text encoder of it; export it --as model"
            )
    return ""


def model_config(trained: Trained, args: argparse.Namespace) -> Any:
    """The policy section that loads what the result is made of: the base of an adapter, or the
    whole model itself. Raises ValueError naming what is not known and how to say it."""
    if trained.is_adapter:
        return policy_config(trained.model, args.base, args.text_encoder_from, args.policy)
    if trained.run_config:
        section = dict(trained.run_config["policy"])
    else:
        section = {"type": args.policy or families.of_folder(trained.model)}
    for key in ("init_text_encoder_from", "text_encoder_subfolder", "revision", "lora"):
        section.pop(key, None)
    return validated({**section, "model_path": str(trained.model)})


def _require_room(target: Path, num_bytes: int) -> None:
    """Say what will be written. Raises ValueError where the disk has no room for it."""
    free = free_gb(target)
    need = f"{num_bytes / 1e9:.3g} GB" if num_bytes else "an unknown size (fetched first)"
    print(f"writing {need} to {target}, where {free:.3g} GB are free")
    if num_bytes / 1e9 > free:
        raise ValueError(
            f"{target}: {need} are to be written and {free:.3g} GB are free; name a larger disk"
        )


def own_file(file: Path) -> Path:
    """`file`, unless it is a link to what is not of its folder: what is exported is passed on. A
    hub's cache has links into its own `blobs`. Raises ValueError."""
    folder, place = file.parent.resolve(), file.resolve()
    blobs = folder.parent.parent / "blobs"
    if file.is_symlink() and not (place.is_relative_to(folder) or place.parent == blobs):
        raise ValueError(f"{file} is a link to {place}, elsewhere; put the file itself there")
    return file


def copy(files: Sequence[Path], target: Path) -> None:
    target.mkdir(parents=True)
    for file in files:
        shutil.copy2(file, target)


def write_card(trained: Trained, target: Path, form: Form, with_pictures: bool) -> None:
    """README.md, of a folder that lies alone the one that lies there."""
    if trained.run_config is None:
        own = trained.model / MODEL_CARD
        if own.is_file() and not (target / MODEL_CARD).exists():
            shutil.copyfile(own_file(own), target / MODEL_CARD)
        return
    evidence = None
    if trained.run_dir is not None:
        with stage("writing the card"):
            evidence = gather(trained.run_dir, trained.iteration, target, with_pictures)
    card = model_card(trained.run_config, trained.iteration, trained.metrics or {}, form, evidence)
    (target / MODEL_CARD).write_text(scrub(card), encoding="utf-8")


if __name__ == "__main__":
    main()
