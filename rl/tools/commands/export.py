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
--checkpoint names. The target also gets a model card, README.md, with pictures of
the first held-out samples (--no-pictures omits them). After full fine-tuning there
is no adapter, and the model is copied.

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
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, get_args

from PIL.Image import Image

from rl import build, model_files, printing
from rl.api import find
from rl.config.loading import validate
from rl.config.schema import RunConfig
from rl.console import duration, warn
from rl.files import downscale, png_bytes
from rl.model_files import model_problems
from rl.policies.policy_base import TrainedPolicy
from rl.printing import scrub
from rl.progress import weights_counted
from rl.record import publish
from rl.record.checkpoint import MODEL_CARD
from rl.record.publish import OWN_WORDS, PIPELINES, Evidence, Form, Shown, at, model_card
from rl.tools.notebook import Row
from rl.tools.report import reading
from rl.tools.report.page import Change, changes_of, learnt
from rl.tools.report.reading import Evaluation, points
from rl.tools.trained import Trained, load_trained, require_trusted

# ---- export evidence -----------------------------------------------------------------------------
# Gathers evidence about an exported model from its run's records, for the model card.

PICTURES_FOLDER = "pictures"
NUM_SAMPLES_SHOWN = 6
PICTURE_SIDE_PX = 512
ARMS = {
    "stock_reward": "the untrained system, given the user's own words (stock)",
    "bare_reward": "this model, given the user's own words as they are (bare)",
}


def gather(run_dir: Path, done: int, target: Path, with_pictures: bool) -> Evidence | None:
    """Evidence about the model after `done` iterations, from the last evaluation up to then;
    writes pictures into `target`. None if there were fewer than two evaluations by then."""
    metrics = [
        row
        for row in reading.read_named(run_dir / "metrics.jsonl", "iteration")
        if row["iteration"] <= done
    ]
    evaluations = reading.read_evaluations(run_dir, done)
    gain = learnt(evaluations)
    if gain is None:
        return None
    before, after = evaluations
    if with_pictures:
        (target / PICTURES_FOLDER).mkdir()
    ungraded = [share for _, share in points(metrics, "status/ungraded")]
    drift = points(metrics, "drift/alarm")
    pairs = [
        tuple(Row(run.records[identity], run.iteration, run.folder) for run in evaluations)
        for identity in before.records
        if identity in after.records
    ]
    return Evidence(
        iterations=(before.iteration, after.iteration),
        learnt=gain.changes,
        arms=_arms(after),
        num_left_out=gain.num_left_out,
        ungraded_share=fmean(ungraded) if ungraded else None,
        drift_alarms=[int(iteration) for iteration, alarm in drift if alarm] if drift else None,
        samples=[
            _sample(number, old, new, target if with_pictures else None)
            for number, (old, new) in enumerate(pairs[:NUM_SAMPLES_SHOWN], start=1)
        ],
    )


def _arms(after: Evaluation) -> list[Change]:
    """Compares the model with each arm that is drawn without the model's words."""
    changes: list[Change] = []
    for key, name in ARMS.items():
        rows = after.records.items()
        others = {identity: {**record, "reward": record.get(key)} for identity, record in rows}
        for change in changes_of(others, after.records)[:1]:  # of all samples
            changes.append(replace(change, name=name))
    return changes


def _sample(number: int, before: Row, after: Row, target: Path | None) -> Shown:
    """One held-out sample before and after training. `target` None: without pictures."""
    sources = enumerate(before.sources(), 1)
    pictures: dict[str, Image | None] = {f"source{n if n > 1 else ''}": p for n, p in sources}
    pictures = pictures or {OWN_WORDS: before.bare_image()}
    pictures |= {"before": before.image(), "after": after.image()}
    files: list[str] = []
    for side, picture in pictures.items():
        if target is not None and picture is not None and None not in pictures.values():
            files.append(f"{PICTURES_FOLDER}/{number:02d}_{side}.png")
            (target / files[-1]).write_bytes(png_bytes(downscale(picture, PICTURE_SIDE_PX)))
    return Shown(
        instruction=str(before.instruction),
        words=(str(before.words), str(after.words)),
        rewards=(reading.number(before.reward), reading.number(after.reward)),
        files=tuple(files),
    )


# ---- export --------------------------------------------------------------------------------------

ADAPTER_FILES = (model_files.ADAPTER_CONFIG, "adapter_model.safetensors")
WHOLE_MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.tiktoken", "*.safetensors")
DTYPES = ("bfloat16", "float16", "float32")


@printing.program
def main(arguments: Sequence[str] | None = None) -> int:
    printing.guard()
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
    add("--dtype", choices=DTYPES, help="dtype of the result; default: the run's")
    add("--push-to", help="repository of the hub, me/my-model; a new one is private; optional")
    add("--no-pictures", action="store_true", help="no held-out samples with the card")
    args = parser.parse_args(arguments)
    export(args)
    print(f"wrote {args.target}")
    if not args.push_to:
        return 0
    try:
        with stage(f"uploading to {args.push_to}"):
            publish.upload(args.target, args.push_to, "exported")
    except Exception as error:  # the network and its library may fail in any way
        problem = (
            f"the upload to {args.push_to!r} failed: {error!r}; {args.target} is whole, upload it "
            f"by hand: hf upload {args.push_to} {args.target}"
        )
        warn(scrub(problem))
    return 0


def export(args: argparse.Namespace) -> None:
    """Raises ValueError for what the user can fix."""
    if not args.source.exists() and (args.target / "checkpoints").is_dir():
        raise ValueError(f"the run comes first: rl export {args.target} {args.source}")
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
        refuse_without_text_encoder(trained, args.policy)
    is_copied = args.form == "adapter" or not trained.is_adapter
    with written_aside(args.target) as folder:
        if is_copied and args.form != "text-encoder" and not args.dtype:
            for name in ADAPTER_FILES if trained.is_adapter else WHOLE_MODEL_FILES:
                for file in trained.model.glob(name):
                    shutil.copy2(_inside(file), folder)
        else:
            policy = policy_class(trained, args.policy)
            config = model_config(trained, policy, args.base, args.text_encoder_from)
            dtype = args.dtype or config.dtype
            merge(trained, policy, config, dtype, args.form != "text-encoder", folder)
        evidence = None
        if trained.run_dir is not None:
            with stage("writing the card"):
                evidence = gather(trained.run_dir, trained.iterations, folder, not args.no_pictures)
        template = build.prompt_template(trained.config)
        card = model_card(
            trained.config, trained.iterations, trained.metrics, args.form, evidence, template
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
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def stage(label: str) -> Iterator[None]:
    """Print a line when the block begins, and how long it took."""
    print(f"{label} ...", flush=True)
    began_s = monotonic()
    yield
    print(f"  {duration(monotonic() - began_s)}", flush=True)


def refuse_without_text_encoder(trained: Trained, trusted: str | None) -> None:
    """Raises ValueError if the trained model is not the text encoder of an editor."""
    if at(trained.config, "policy.conditioning") == "base":
        raise ValueError(
            "the run's renderer read the untrained states (policy.conditioning: 'base'): its text "
            "encoder is the base's own; export what was trained --as model"
        )
    renderer = at(trained.config, "renderer.type")
    is_read = renderer in PIPELINES or renderer not in build.SHIPPED["renderers"]
    if not is_read or "hidden_states" not in policy_class(trained, trusted).emits:
        raise ValueError(
            f"a {at(trained.config, 'policy.type')} with renderer {renderer!r} is not the text "
            "encoder of an editor; export it --as model"
        )


def model_config(
    trained: Trained,
    policy: type[TrainedPolicy[Any]],
    base: str | None,
    text_encoder_from: str | None,
) -> Any:
    """The policy section that loads the base of the adapter, or the whole trained model. Raises
    ValueError if it is not there, and names the option to give."""
    section = dict(trained.config["policy"] if trained.is_adapter else trained.policy())
    if trained.is_adapter and base is not None:
        section |= {"model_path": base, "revision": None}
        section.pop("init_text_encoder_from", None)
    if trained.is_adapter and text_encoder_from is not None:
        section["init_text_encoder_from"] = text_encoder_from
    # Nothing is computed, so the run's attention kernel need not work here.
    section |= {"adapter_path": "", "attn_implementation": "auto"}
    config, problems = validate(policy.Config, section, at="policy")
    problems = problems or [
        *model_problems(policy.models(config)),
        *policy.problems(config, RunConfig.model_construct()),
    ]
    if problems:
        remedy = "say where the base is with --base (and --text-encoder-from)"
        raise ValueError("\n".join([*problems, remedy]))
    return config


def policy_class(trained: Trained, trusted: str | None = None) -> type[TrainedPolicy[Any]]:
    """The run's policy. Raises ValueError for a plugin that is neither shipped nor `trusted`,
    because its code would run, and for one that cannot load its model by itself."""
    name = at(trained.config, "policy.type")
    require_trusted(name, name == trusted, "policy.type", f"rl export --policy {name}")
    shipped = name in build.SHIPPED["policies"]
    found, problems = find.import_plugin(build.class_of("policies", name) if shipped else name)
    plugin, wrong = (
        (None, problems) if problems else find.plugin_class(found, build.PLUGIN_BASES["policies"])
    )
    if plugin is None or not issubclass(plugin, TrainedPolicy):
        wrong = wrong or [f"policy.type: {name} derives from no TrainedPolicy"]
        raise ValueError("\n".join([*wrong, "only its adapter can be exported: --as adapter"]))
    return plugin


def merge(
    trained: Trained,
    policy: type[TrainedPolicy[Any]],
    config: Any,
    dtype: str,
    with_prompt_files: bool,
    target: Path,
) -> None:
    """Write base + adapter (or the whole trained model), added in float32 and rounded to `dtype`
    once; `with_prompt_files`: also the tokenizer and processor."""
    import torch

    with stage(f"loading {config.model_path} in float32"):
        model = policy.loading.load_model(config.model_copy(update={"dtype": "float32"}))
    if trained.is_adapter:
        from peft import PeftModel

        model_files.read_config(trained.model)  # refuses one that names code to import
        with stage("adding the adapter"):
            model = PeftModel.from_pretrained(model, str(trained.model)).merge_and_unload()
    with stage(f"writing the weights in {dtype}"), weights_counted():
        model.to(getattr(torch, dtype)).save_pretrained(target)
    if with_prompt_files:
        policy.save_prompt_files(config, target)


def _inside(file: Path) -> Path:
    """`file`. Raises ValueError if it links to a file outside of its folder, which the export would
    pass on; a hub cache may link into its own `blobs`."""
    folder, target = file.parent.resolve(), file.resolve()
    blobs = folder.parent.parent / "blobs"
    if file.is_symlink() and not (target.is_relative_to(folder) or target.parent == blobs):
        raise ValueError(f"{file} is a link to {target}, elsewhere; put the file itself there")
    return file


if __name__ == "__main__":
    sys.exit(main())
