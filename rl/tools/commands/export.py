"""Export a trained model as a folder for other tools.

    rl export runs/my-run exported
    rl export runs/my-run lora --as adapter --checkpoint best
    rl export runs/my-run text_encoder --as text-encoder

--as model          base + adapter, with tokenizer and image processor: for
                    transformers and vLLM (the default)
--as adapter        the PEFT folder as the run wrote it, the base unchanged
--as text-encoder   base + adapter as the text_encoder folder of a diffusers
                    pipeline, if the run's renderer read hidden states

From a run folder, the newest whole checkpoint is exported, or the one that
--checkpoint names. The target also gets a model card, README.md. After full
fine-tuning there is no adapter, and the model is copied.

The adapter is added in float32, and the sum is rounded once. The run's config names
the base weights; --base and --text-encoder-from name them if they have moved. The
whole base is in memory in float32: about 15 GB for 3B and 33 GB for 7B.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from rl import build, model_files, printing
from rl.policies.policy_base import TrainedPolicy
from rl.printing import scrub
from rl.progress import weights_counted
from rl.record.checkpoint import MODEL_CARD, held_out_rewards
from rl.record.publish import PIPELINES, Form, at, model_card
from rl.tools.trained import Trained, load_trained, require_trusted

ADAPTER_FILES = (model_files.ADAPTER_CONFIG, "adapter_model.safetensors")
WHOLE_MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.tiktoken", "*.safetensors")


@printing.program
def main(arguments: Sequence[str] | None = None) -> int:
    parser = printing.Parser("rl export", __doc__)
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
    add("--policy", help="the run's policy plugin, whose code you trust")
    args = parser.parse_args(arguments)
    export(args)
    print(f"wrote {args.target}")
    return 0


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
    if args.form == "text-encoder":
        refuse_without_text_encoder(trained)
    is_copied = args.form == "adapter" or not trained.is_adapter
    with written_aside(args.target) as folder:
        if is_copied and args.form != "text-encoder":
            for name in ADAPTER_FILES if trained.is_adapter else WHOLE_MODEL_FILES:
                for file in trained.model.glob(name):
                    if file.is_symlink():
                        raise ValueError(f"{file} is a link; put the file itself there")
                    shutil.copy2(file, folder)
        else:
            merge(trained, args, folder)
        held_out = {} if trained.run_dir is None else held_out_rewards(trained.run_dir)
        card = model_card(
            trained.config,
            trained.iterations,
            trained.metrics,
            args.form,
            {n: reward for n, reward in held_out.items() if n <= trained.iterations},
            build.prompt_template(trained.config),
        )
        (folder / MODEL_CARD).write_text(scrub(card), encoding="utf-8")


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yields `.<target>.rl-export` to write into; it is renamed at the end, so a `target` is always
    whole. One that fails, or that a killed process left, is deleted."""
    folder = target.with_name(f".{target.name}.rl-export")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)  # before the weights load: `target` may not be writable
    try:
        yield folder
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refuse_without_text_encoder(trained: Trained) -> None:
    """Raises ValueError if the trained model is not the text encoder of an editor."""
    if at(trained.config, "policy.conditioning") == "base":
        raise ValueError(
            "the run's renderer read the untrained states (policy.conditioning: 'base'): its text "
            "encoder is the base's own; export what was trained --as model"
        )
    renderer = at(trained.config, "renderer.type")
    if renderer not in PIPELINES and renderer in build.SHIPPED["renderers"]:
        raise ValueError(
            f"a policy with renderer {renderer!r} is not the text encoder of an editor; export it "
            "--as model"
        )


def policy_of(trained: Trained, args: argparse.Namespace) -> build.Plugin[TrainedPolicy[Any]]:
    """The policy whose section loads the base of the adapter, or the whole trained model. Raises
    ValueError if it is not there, for a plugin that is neither shipped nor named by `--policy`,
    because its code would run, and for one that cannot load its model by itself."""
    section = dict(trained.config["policy"] if trained.is_adapter else trained.policy())
    name = section["type"]
    require_trusted(name, name == args.policy, "policy.type", f"rl export --policy {name}")
    if trained.is_adapter and args.base is not None:
        section |= {"model_path": args.base, "revision": None}
        section.pop("init_text_encoder_from", None)
    if trained.is_adapter and args.text_encoder_from is not None:
        section["init_text_encoder_from"] = args.text_encoder_from
    # Nothing is computed, so the run's attention kernel need not work here.
    section |= {"adapter_path": "", "attn_implementation": "auto"}
    policy, problems = build.find_plugin("policies", "policy", section)
    if policy is not None and not issubclass(policy.cls, TrainedPolicy):
        problems = [f"policy.type: {name} derives from no TrainedPolicy"]
    if policy is None or problems:
        remedy = (
            "say where the base is with --base (and --text-encoder-from), or export the adapter "
            "alone: --as adapter"
        )
        raise ValueError("\n".join([*problems, remedy]))
    return policy


def merge(trained: Trained, args: argparse.Namespace, target: Path) -> None:
    """Write base + adapter (or the whole trained model), added in float32 and rounded to the run's
    dtype once; but for a text encoder also the tokenizer and processor."""
    import torch

    policy = policy_of(trained, args)
    config = policy.config
    print(f"loading {config.model_path} in float32 ...", flush=True)
    model = policy.cls.loading.load_model(config.model_copy(update={"dtype": "float32"}))
    if trained.is_adapter:
        from peft import PeftModel

        model_files.read_config(trained.model)  # refuses one that names code to import
        print("adding the adapter ...", flush=True)
        model = PeftModel.from_pretrained(model, str(trained.model)).merge_and_unload()
    print(f"writing the weights in {config.dtype} ...", flush=True)
    with weights_counted():
        model.to(getattr(torch, config.dtype)).save_pretrained(target)
    if args.form != "text-encoder":
        policy.cls.save_prompt_files(config, target)


if __name__ == "__main__":
    sys.exit(main())
