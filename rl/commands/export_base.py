"""The base that an adapter belongs to, and the two as one model.

What: `policy_config` (which weights, by the run's own config or the adapter's), `run_config_of`,
`num_parameters_of` and `merge`; `stage`, a line for each that takes long. What not: what is asked
for, and where it goes (`export.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from rl.config.messages import validate
from rl.config.schema import RunConfig
from rl.edit import families
from rl.files.model_files import cached, model_problems
from rl.files.weights import num_parameters
from rl.record import adapter_base
from rl.record.card_facts import at
from rl.record.checkpoint import read_state
from rl.record.console import duration
from rl.record.progress import weights_counted

DTYPES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number."""


def run_config_of(model: Path) -> Mapping[str, Any] | None:
    """Of the run whose checkpoint that model is in; None of a folder that lies elsewhere. Raises
    ValueError for one that names no policy."""
    file = model.parent / "state.json"
    if not file.is_file():
        return None
    config = at(read_state(model.parent), "meta.config")
    if not isinstance(at(config, "policy.type"), str):
        raise ValueError(f"{file} is damaged: it names no policy; give its model folder alone")
    return config


def policy_config(
    adapter: Path, base: str | None, text_encoder_from: str | None, bare_policy: str | None
) -> Any:
    """The policy section that the adapter was trained under, `bare_policy` telling the plug of one
    that lies alone (None: its files).

    Raises ValueError naming what is not known and how to say it.
    """
    noted = adapter_base.read_config(adapter)
    if (config := run_config_of(adapter)) is not None:
        section = config["policy"]
    else:
        keys = {} if base else _noted_keys(noted)
        section = {"type": bare_policy or families.of_folder(adapter, base), **keys}
    if base is not None:
        section = {**section, "model_path": base, "revision": None}
        section.pop("init_text_encoder_from", None)
    if text_encoder_from is not None:
        section = {**section, "init_text_encoder_from": text_encoder_from}
    return validated(section)


def validated(section: Mapping[str, Any]) -> Any:
    """The section as its plug reads it. Raises ValueError with all that is wrong and the remedy."""
    policy = families.policies().get(section["type"])
    if policy is None:
        raise ValueError(f"policies of type {section['type']!r} cannot be exported here")
    # No attention is computed: the run's kernel need not run here.
    section = {**section, "adapter_path": "", "attn_implementation": "auto"}
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


def num_parameters_of(config: Any) -> float:
    """Of the model, from its files' headers; 0 where they are not on this machine yet."""
    policy = families.policies()[config.type]
    [model] = [model for model in policy.models(config) if model.weights]
    file: Path | None = Path(model.path, model.subfolder, model.config)
    if not Path(model.path).is_dir():
        file = cached(model.path, str(Path(model.subfolder, model.config)), model.revision)
    return num_parameters(file.parent) if file else 0.0


def merge(adapter: Path | None, config: Any, dtype: str, with_words: bool, target: Path) -> None:
    """Base + adapter (None: the base is what was trained), added in float32 and rounded to `dtype`
    once; `with_words` with what its prompts need."""
    import torch

    policy = families.policies()[config.type]
    with stage(f"loading {config.model_path} in float32"):
        model = policy.loading.load_model(config.model_copy(update={"dtype": "float32"}))
    if adapter is not None:
        from peft import PeftModel

        with stage("adding the adapter"):
            model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    with stage(f"writing the weights in {dtype}"), weights_counted():
        model.to(getattr(torch, dtype)).save_pretrained(target)
    if with_words:
        policy.save_prompt_files(config, target)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """A line when it begins, and how long it took."""
    print(f"{what} ...", flush=True)
    began_s = monotonic()
    yield
    print(f"  {duration(monotonic() - began_s)}", flush=True)
