"""Write a commented config for a run of your own.

rl init my.jsonnet --system edit --judge http://judge-host:4877
rl init q.jsonnet --system reasoning --data my.jsonl --gpus 1 --gpu-gb 24
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from jinja2 import Template

from rl import printing
from rl.check import check_report
from rl.check.this_machine import gpus
from rl.config.loading import not_a_file
from rl.config.schema import load_config
from rl.data.rows import Lines
from rl.files import write_atomically

COLUMNS = {
    "instruction": ("instruction", "edit_instruction", "prompt", "question", "problem", "caption"),
    "source": ("image", "images", "source_image", "input_image", "original_image"),
    "answer": ("answer", "solution", "label", "target"),
}
"""What a sample needs -> the columns in which data sets usually have it."""
MAX_HELD_OUT = 64
DATA = {
    "hf_dataset": "rows: .jsonl, .parquet or hub id; empty: the example's",
    "prompts": "prompts: .txt or .jsonl; empty: the built-in ones",
    "emu3_tokens": "a list written by `rl prepare tokenize`",
}
"""Type of the data source -> what the user can give."""


class System(NamedTuple):
    """A system that a config can be written for."""

    title: str
    config: str  # the shipped config that the new one extends
    data: str = ""  # key of DATA; '': needs no GPU, has its own data and judge
    columns: str = ""  # keys of COLUMNS
    one_gpu: str = ""  # the shipped config for one GPU, or for smaller ones; '': the same
    on_large_gpus: str = ""  # line for `config` on GPUs that are large enough for all models
    gpus: int = 1  # that `config` is written for
    gpu_gb: int = 80
    has_judge: bool = False


SYSTEMS = {
    "quickstart": System("Tiny models on this CPU, in minutes: to see how it works", "quickstart"),
    "edit": System(
        "A VLM writes, Qwen-Image-Edit or 2.1 draws, a judge grades",
        "qwen_image_edit",
        data="hf_dataset",
        columns="instruction source",
        one_gpu="one_gpu_80gb",
        gpus=8,
        gpu_gb=141,
        has_judge=True,
    ),
    "prompts": System(
        "A VLM rewrites prompts, Stable Diffusion 3 draws, CLIP grades",
        "prompt_enhancement",
        data="prompts",
        columns="instruction",
        one_gpu="one_gpu_48gb",
        on_large_gpus="one_gpu:: true,  // policy, SD3 and CLIP share each GPU",
    ),
    "reasoning": System(
        "A VLM answers questions about pictures; right answers are rewarded",
        "vlm_reasoning",
        data="hf_dataset",
        columns="instruction source answer",
        one_gpu="one_gpu_24gb",
        gpus=2,
    ),
    "earl": System(
        "Emu3 writes the edited picture as tokens, a judge grades",
        "sft_s__rl_s",
        data="emu3_tokens",
        gpus=4,
        has_judge=True,
    ),
}
JUDGE_URL = "http://localhost:4877"
JUDGE_MODEL = "Qwen/Qwen3-VL-32B-Instruct-FP8"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"


def _data_path(text: str) -> str:
    """A file or folder, or the id of a data set."""
    problem = not_a_file(text)
    if problem and not Path(text).is_dir() and not re.fullmatch(f"{NAME}/{NAME}", text):
        problem += "; give a file, or the id of a data set on the hub"
        raise argparse.ArgumentTypeError(f"{text} {problem}")
    return text


TEXT = """\
// {{ system.title }}.
//
//   rl check {{ file }}            what it would do, and its mistakes
//   rl train --smoke {{ file }}    a trial of two iterations
//   rl train {{ file }}            the same command resumes the run
//
// What is not set here comes from the shipped configs/{{base}}.jsonnet. Every key, with its meaning
// and default, is in configs/base.libsonnet. `key+: { ... }` changes a part of a section,
// `key: { ... }` replaces all of it.
(import '{{ base }}.jsonnet') + {
  run_name: {{ quoted(name) }},
  base_exp_dir: 'runs',  // the run is written to runs/<run_name>
{% if system.data %}
{% if system.on_large_gpus and base == system.config %}
  {{ system.on_large_gpus }}
{% endif %}
  world_size: {{ gpus }},  // GPUs
  gpu_gb: {{ gpu_gb }},  // memory of each, GB
{% endif %}
{% for key, source in sources %}
{% if loop.first %}
  data+: {  // docs/data.md; paths count from the folder in which `rl` is started
{% endif %}
    {{ key }}: [{ {{ source }} }],
{% if loop.last %}
  },
{% endif %}
{% endfor %}
{% if system.has_judge %}
  judge+: {  // an OpenAI-compatible endpoint; docs/judge.md: how to start one
    api_base: {{ quoted(judge) }},
    model: {{ quoted(judge_model) }},
  },
{% endif %}
}
"""


@printing.program
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if nothing was written, or what was written has mistakes."""
    parser = printing.Parser("rl init", __doc__)
    parser.add_argument("file", nargs="?", help="the config to write; default: <name>.jsonnet")
    add = parser.add_argument
    systems = ". ".join(f"{name}: {system.title}" for name, system in SYSTEMS.items())
    add("--system", choices=list(SYSTEMS), default="quickstart", help=systems)
    add("--gpus", type=int, help="number of GPUs; default: those of this machine")
    add("--gpu-gb", type=int, help="memory of each GPU, GB; default: of this machine's")
    add("--judge", help=f"its URL; default: {JUDGE_URL}")
    add("--judge-model", help=f"its name; default: {JUDGE_MODEL}")
    kinds = "; ".join(f"{name}: {kind}" for name, kind in DATA.items())
    add("--data", type=_data_path, default="", help=kinds)
    held_out = "default: the last rows of the training data, where these can be split"
    add("--held-out", type=_data_path, default="", help=held_out)
    add("--name", help="name of the run; default: from the file's name")
    args = parser.parse_args(arguments)
    file, text = written(args)
    write_atomically(file, text)
    print(f"wrote {file}")
    config = load_config(file)
    report, code = check_report.report(config, config.gpu_gb)
    if code:
        printing.complain(f"rl check {file}:")
        print(report[report.rfind("\n", 0, report.rindex(" wrong\n")) + 1 :], file=sys.stderr)
        return code
    *_, last_line = report.split("\n")
    printing.show(f"rl check {file}: {last_line}", "bold green")
    print(f"next: rl train --smoke {_for_shell(file)}\nthen: rl train {_for_shell(file)}")
    return 0


def written(args: argparse.Namespace) -> tuple[Path, str]:
    """(the config's file, its text). Raises ValueError for an answer that cannot be used."""
    system = SYSTEMS[args.system]
    without_effect = [] if system.data else ["data", "held_out", "gpus", "gpu_gb"]
    without_effect += [] if system.has_judge else ["judge", "judge_model"]
    for name in without_effect:
        if getattr(args, name):
            option = name.replace("_", "-")
            raise ValueError(
                f"--{option} has no effect with --system {args.system}; see rl init --help"
            )
    sizes_gb = [int(gpu.total_gb) for gpu in gpus()[0]]
    num = (len(sizes_gb) or system.gpus) if args.gpus is None else args.gpus
    gpu_gb = args.gpu_gb or min(sizes_gb, default=system.gpu_gb)
    base = system.config
    if system.one_gpu and (num == 1 or gpu_gb < 80):
        base = system.one_gpu
    sources = list(_sources(args, system)) if system.data else []
    stem = Path(args.file).stem if args.file else f"my-{base.replace('_', '-')}"
    name = args.name or (stem if re.fullmatch(NAME, stem) else "my-run")
    file = Path(args.file or f"{name}.jsonnet")
    if file.exists():
        raise ValueError(f"{file} exists; name another file: rl init FILE")
    template = Template(TEXT, trim_blocks=True, keep_trailing_newline=True)
    return file, template.render(
        system=system,
        file=_for_shell(file),
        base=base,
        name=name,
        gpus=num,
        gpu_gb=gpu_gb,
        sources=sources,
        judge=args.judge or JUDGE_URL,
        judge_model=args.judge_model or JUDGE_MODEL,
        quoted=_quoted,
    )


def _for_shell(file: Path) -> str:
    """The path as one word of a shell, on one line."""
    return quote(str(file)).replace("\n", r"'$'\n''")


def _sources(args: argparse.Namespace, system: System) -> Iterator[tuple[str, str]]:
    """(key of the section `data`, fields of its source); none for the shipped config's data."""
    train, held_out = args.data, args.held_out
    if not train:
        if held_out or system.data == "emu3_tokens":
            raise ValueError(f"--data is missing: {DATA[system.data]}")
        return
    can_split = system.data == "hf_dataset"  # and its columns can be named
    if not held_out and not can_split:
        raise ValueError("--held-out is missing: this data cannot be split")
    is_jsonl = train.endswith(".jsonl")
    rows = Lines(Path(train)) if is_jsonl else ()
    columns = {need: _column(need, train, rows) for need in system.columns.split()}
    more, splits = "", ("", "")
    if can_split:
        if not held_out:
            num = max(1, min(MAX_HELD_OUT, len(rows) // 5)) if is_jsonl else MAX_HELD_OUT
            splits = (f", split: 'train[:-{num}]'", f", split: 'train[-{num}:]'")
        if "answer" in columns:
            columns["hidden"] = f"{{ answer: {columns.pop('answer')} }}"
        mapping = ", ".join(f"{need}: {column}" for need, column in columns.items())
        more = f", columns: {{ {mapping} }}"
    elif columns and not train.endswith(".txt"):
        more = f", prompt_key: {columns['instruction']}"
    parts = zip(("train", "validation"), (train, held_out or train), splits, strict=True)
    for key, path, split in parts:
        yield key, f"type: '{system.data}', path: {_quoted(path)}{split}{more}"


def _column(need: str, path: str, rows: Sequence[Mapping[str, object]]) -> str:
    """The column (as Jsonnet) that has what a sample needs; without rows, the usual one."""
    for column in COLUMNS[need]:
        if not rows or column in rows[0]:
            return _quoted(column)
    fix = f"rename the right one to {COLUMNS[need][0]!r}"
    raise ValueError(f"{path} has no column for the {need}, only {[*rows[0]]}; {fix}")


def _quoted(text: str) -> str:
    """As a Jsonnet string."""
    return json.dumps(text) if "'" in text or "\\" in text else f"'{text}'"


if __name__ == "__main__":
    sys.exit(main())
