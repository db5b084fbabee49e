"""A trained adapter as a model of its own: `rl export <run, checkpoint, adapter> <target>`.

Takes the newest checkpoint of a run (or the one named, or any PEFT folder), adds the adapter
to the weights it was trained on, in float32 and rounded once at the end, and writes a folder that
transformers and vLLM load, with tokenizer and image processor as the run used them.
A checkpoint's `model` folder is an adapter for PEFT, or after full fine-tuning a model, already.

Which weights the adapter belongs to stands in the run's own config beside the checkpoint; for a
bare PEFT folder in its adapter_config.json. `--base` and `--text-encoder-from` override both. The
whole base is in memory in float32: 4 bytes a parameter, about 15 GB for 3B and 33 GB for 7B.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl.config.messages import validate
from rl.config.schema import RunConfig
from rl.files.model_files import model_problems
from rl.policies.emu3 import loading as emu3_loading
from rl.policies.emu3.plug import Emu3
from rl.policies.qwen2_5_vl import loading as qwen_loading
from rl.policies.qwen2_5_vl.plug import Qwen25VL
from rl.policies.shared.policy import TrainedPolicy
from rl.record import adapter_base, terminal
from rl.record.adapter_base import ADAPTER_CONFIG
from rl.record.checkpoint import model_folder, read_state

DTYPES = ("bfloat16", "float16", "float32")
POLICIES: Mapping[str, tuple[type[TrainedPolicy[Any]], Any]] = {
    "qwen2_5_vl": (Qwen25VL, qwen_loading),
    "emu3": (Emu3, emu3_loading),
}
"""Type -> the plug, and how its base, its tokenizer and its image processor are loaded."""


def main(arguments: Sequence[str] | None = None) -> None:
    terminal.guard()
    parser = argparse.ArgumentParser(
        prog="rl export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="run folder, checkpoint, or PEFT folder")
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    parser.add_argument("--base", help="folder or hub id of weights, tokenizer and processor")
    parser.add_argument(
        "--text-encoder-from", help="folder or hub id of an editor whose text encoder is the base"
    )
    parser.add_argument(
        "--policy", choices=POLICIES, default="qwen2_5_vl", help="plug of a bare PEFT folder"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the result; default: the run's")
    args = parser.parse_args(arguments)
    try:
        adapter = find_adapter(args.source)
        config = policy_config(adapter, args.base, args.text_encoder_from, args.policy)
        if args.target.exists():
            raise ValueError(f"{args.target} exists; name a folder that does not")
        with written_aside(args.target) as part:
            merge(adapter, part, config, args.dtype or config.dtype)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(f"wrote {args.target}")


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """`<target>.part` to write, renamed at the end: under its own name the target is whole. A part
    that fails, or that a kill left, is deleted."""
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        yield part
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def find_adapter(source: Path) -> Path:
    """The PEFT folder that `source` is or holds. Raises ValueError when there is none."""
    folder = model_folder(source)
    if (folder / ADAPTER_CONFIG).is_file():
        return folder
    if list(folder.glob("*.safetensors")) and (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} is a whole model (full fine-tuning): there is no adapter to merge, load it "
            "as it is"
        )
    raise ValueError(
        f"{folder} holds neither an adapter ({ADAPTER_CONFIG}) nor a run's checkpoints; name a "
        "run folder, one of its checkpoints/step_*, or a PEFT folder"
    )


def policy_config(
    adapter: Path, base: str | None, text_encoder_from: str | None, bare_policy: str
) -> Any:
    """The policy section that the adapter was trained under, `bare_policy` telling the plug of one
    that lies alone.

    Raises ValueError naming what is not known and how to say it.
    """
    noted = adapter_base.read_config(adapter)
    if (adapter.parent / "state.json").is_file():
        section = read_state(adapter.parent)["meta"]["config"]["policy"]
        if section["type"] not in POLICIES:
            raise ValueError(f"adapters of policy {section['type']!r} cannot be exported here")
    else:
        section = {"type": bare_policy, **({} if base else _noted_keys(noted))}
    # No attention is computed: the run's kernel need not run here.
    section = {**section, "adapter_path": "", "attn_implementation": "auto"}
    if base is not None:
        section = {**section, "model_path": base, "revision": None}
        section.pop("init_text_encoder_from", None)
    if text_encoder_from is not None:
        section = {**section, "init_text_encoder_from": text_encoder_from}
    policy, _ = POLICIES[section["type"]]
    config, problems = validate(policy.Config, section, at="policy")
    problems = problems or [
        *model_problems(policy.models(config)),
        *policy.problems(config, RunConfig.model_construct()),
    ]
    if problems:
        remedy = "say where the base lies with --base (and --text-encoder-from)"
        raise ValueError("\n".join([*problems, remedy]))
    return config


def _noted_keys(noted: Mapping[str, Any]) -> dict[str, Any]:
    """What loads the base that a bare adapter names. Raises ValueError with the way out."""
    try:
        return adapter_base.base_of(noted).policy_keys()
    except ValueError as error:
        raise ValueError(
            f"{error}; or give --base (and --text-encoder-from for an editor's text encoder)"
        ) from error


def merge(adapter: Path, target: Path, config: Any, dtype: str) -> None:
    """Base + adapter, added in float32 and rounded to `dtype` once."""
    import torch

    _, loading = POLICIES[config.type]
    base = loading.load_model(config.model_copy(update={"dtype": "float32"}))
    from peft import PeftModel

    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    merged.to(getattr(torch, dtype)).save_pretrained(target)
    loading.load_tokenizer(config).save_pretrained(target)
    if config.type == "qwen2_5_vl":
        qwen_loading.load_image_processor(config).save_pretrained(target)


if __name__ == "__main__":
    main()
