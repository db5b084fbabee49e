"""Evaluate a policy on held-out samples, without training.

    rl eval my.jsonnet --data held_out.jsonl              (untrained)
    rl eval runs/my-run --trust --data held_out.jsonl
    rl eval runs/my-run --trust --checkpoint best --against untrained runs/other
    rl eval my.jsonnet --adapter me/my-adapter

Draws and grades as a run's held-out evaluations do: greedy words, noise that depends
only on the sample, and the user's own words beside. Without --data: on the samples
of the config's own evaluations. Prints each score with its 95 % interval, and writes
a folder with a page below --out. --against evaluates others on the same samples, by
the same judge and rewards, and prints the paired differences. A stopped evaluation
goes on with the judge's replies that it has; a finished one is only shown.

A run folder may come from a stranger. --trust says that it is yours: the judge and
the plugins that it names may then read your data. A config file is yours.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl import build, printing
from rl.api.types import Sample
from rl.build import Resolved
from rl.check.compatibility import READABLE
from rl.check.this_machine import fetch_small_files, fetch_weights
from rl.check.trials import identity
from rl.config.loading import not_a_file
from rl.config.schema import ConfigError, DataConfig, RunConfig
from rl.judge.http import BackgroundLoop
from rl.progress import Console, PhaseTimer, shown_on
from rl.ranks.dist import Dist
from rl.record.publish import at
from rl.record.run_record import BackgroundWriter, RunRecord
from rl.rollout.episodes import first_samples, usable
from rl.run.checks import contents_of
from rl.run.evaluation import evaluate
from rl.run.set_up import load_models, open_judges
from rl.tools.commands.edit import at_least_one
from rl.tools.commands.report import tell
from rl.tools.reading import CONFIG_ENDINGS, read_evaluations
from rl.tools.trained import (
    READ,
    UNUSED,
    Trained,
    config_for_use,
    config_of,
    load,
    pick_device,
    require_own,
    require_trusted,
)

UNTRAINED = "untrained"
SAME = {
    *("rewards", "final_reward", "judge", "data", "seed"),
    *("evaluation", "algorithm", "bare_arm", "images_per_completion"),
}
"""Sections that decide what a score means: all policies of a command have those of the first."""


@printing.program
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 if a sample was not graded."""
    args = _parser().parse_intermixed_args(arguments)
    first: RunConfig | None = None
    folders: list[Path] = []
    for source in (args.run, *args.against):
        of = args.run if source == UNTRAINED else source
        is_config, adapter = Path(of).suffix in CONFIG_ENDINGS, "" if folders else args.adapter
        trained = load(of, is_config, "" if is_config and folders else args.checkpoint, adapter)
        trained = replace(trained, trusted=trained.trusted or args.trust)
        if source == UNTRAINED:
            trained = replace(trained, untrained=True, iterations=0)
        config = prepared(trained, args, first)
        folder = evaluated(trained, config, args)
        if folder in folders:
            raise ValueError(f"--against {source}: this is the same evaluation; name another one")
        folders.append(folder)
        first = first or config
    folder, *others = folders
    print(folder.name)
    tell(folder, others)
    records = [e.records for each in folders for e in read_evaluations(each)]
    return int(any(row.get("reward") is None for found in records for row in found.values()))


def prepared(
    trained: Trained, args: argparse.Namespace, first: RunConfig | None = None
) -> RunConfig:
    """The config of an evaluation. `first`: that of the first policy of the command, whose judge,
    rewards and data the others have; they need no trust of their own.

    Raises ValueError (also ConfigError) for problems that the user can fix, before anything loads.
    """
    unused = {key: UNUSED[key] for key in ("engine", "render_pool")}
    # A loss is code, too, and an evaluation needs none.
    key = "truncated_completions"
    truncated = {key: at(trained.config, f"algorithm.{key}")}
    place = {"tracking": {}, "base_exp_dir": str(args.out)}
    shared = first.model_dump(mode="json", include=SAME) if first else {}
    values = {**trained.config, **unused, "algorithm": truncated, **place, **shared}
    values = config_of(values, trained.name).model_dump(mode="json")
    if args.seed is not None:
        values["seed"] = args.seed
    values["judge"] = {**values["judge"], "audit": "off"}
    rows = [*values["data"]["train"], *values["data"]["validation"]]
    graders = [] if first else [*values["rewards"].values(), *rows]
    for section in (values["policy"], values["renderer"], *graders):
        for name in (section.get("type"), section.get("pipeline")):
            require_trusted(name, trained.trusted, trained.name, "--trust")
    read = (*READ, "rewards", "final_reward", "judge", "data")
    settings = [each for each in args.set if not first or re.split("[.=]", each)[0] in READ]
    config, _ = config_for_use(trained, settings, args.device, replaced=values, read=read)
    resolved = build.resolve(config)
    for key, part in () if first else resolved.by_judge.items():
        if part.needs_judge:
            require_own(trained, key, part.config.judge, args.set)
    if args.data and not first:
        section = _read_as(resolved, args.data)
        held_out = DataConfig(train=[], validation=[section], on_bad_row=config.data.on_bad_row)
        config = config.model_copy(update={"data": held_out})
    if not config.data.validation:
        raise ValueError(f"{trained.name} has no data.validation: give --data FILE")
    return config


def _read_as(resolved: Resolved, file: str) -> dict[str, Any]:
    """The section of a data source that reads `file` as the config's last source reads such a file
    or, if that reads another kind, with the usual columns and those that rewards need."""
    if why := not_a_file(file):
        raise ValueError(f"--data {file} {why}; paths start at {Path.cwd()}")
    data, renderer = resolved.config.data, resolved.renderer
    needs_source = renderer.cls.needs_source_with(renderer.config)
    own = dict([*data.train, *data.validation][-1])
    if Path(own.get("path") or "-").suffix == Path(file).suffix:
        left_out = ("weight", "coefficient", "image_folder")
        return {**{key: value for key, value in own.items() if key not in left_out}, "path": file}
    if "source_codes" in resolved.policy.cls.needs:
        raise ValueError(f"--data {file}: this policy reads codes: encode the rows by rl prepare")
    if renderer.cls.makes_images and not needs_source:
        keys = {"picture_key": "image"} if file.endswith(".jsonl") else {}
        return {"type": "prompts", "path": file, **keys}
    needs = {need for p in resolved.rewards.values() for need in p.cls.needs_with(p.config)}
    hidden = {name: name for name in needs - READABLE}
    columns = {"hidden": hidden, "source_optional": not needs_source}
    return {"type": "hf_dataset", "path": file, "columns": columns}


def evaluated(trained: Trained, config: RunConfig, args: argparse.Namespace) -> Path:
    """Evaluate on the first `args.samples` held-out samples (0: on all rows of `args.data`, or as
    many as the config's own evaluations have). Returns the folder, below `config.base_exp_dir`:
    that of a run with one evaluation, so `rl report` reads it, too. A folder that is complete is
    left as it is; in another, replies of the judge are used again.

    Raises ValueError (also ConfigError) and JudgeError for problems that the user can fix.
    """
    resolved, console = build.resolve(config), Console(True)
    on_bad_row = config.data.on_bad_row
    with ExitStack() as stack:
        stack.enter_context(shown_on(console))
        sources = build.build_data(resolved, resolved.validation)
        for source in sources:
            stack.callback(source.close)
        all_rows = max(map(len, sources)) * len(sources)
        num = args.samples or (all_rows if args.data else config.evaluation.num_samples)
        held_out = first_samples(sources, min(num, all_rows), on_bad_row)
        if not held_out:
            raise ValueError(f"{trained.name}: the held-out data have no row that can be used")
        weights = UNTRAINED if trained.untrained else f"{trained.iterations or 'adapter'}"
        source_path = Path(trained.name).resolve()
        label = source_path.stem if trained.file else source_path.name
        name = f"{label}-{weights}-{_digest(trained, resolved, held_out)}"
        config = config.model_copy(update={"run_name": name})
        resolved = replace(resolved, config=config)
        folder, dist = config.run_dir, Dist(device=pick_device(args.device))
        complete = folder / "metrics.jsonl"
        if complete.is_file():
            console.say(f"{folder} has this evaluation already")
            return folder
        if problems := fetch_small_files(resolved) or fetch_weights(resolved):
            raise ConfigError(problems)
        record = RunRecord(folder, config, dist)
        record.claim()
        stack.callback(record.release)
        if complete.is_file():  # another process has just made it
            return folder
        loop = stack.enter_context(BackgroundLoop("judge"))
        judges, _ = open_judges(resolved, dist, loop, stack, console, held_out[0])
        for key, judge in judges.items():
            judge.open_journal(folder / "judge" / f"{key}.jsonl")
        console.say(f"loading {trained}")
        policy = build.build_policy(resolved, dist)
        stack.callback(policy.close)
        held_out = usable(held_out, policy.build_prompt, on_bad_row)
        engine, rollout = load_models(resolved, policy, dist, judges, loop, stack, console)
        writer = stack.enter_context(BackgroundWriter(folder))
        console.say(f"evaluating {len(held_out)} samples")
        # 0 measures the untrained system, too: that would be an adapter's.
        iteration = 0 if trained.untrained else max(1, trained.iterations)
        timer = PhaseTimer(console)
        metrics = evaluate(rollout, engine, held_out, iteration, folder, dist, timer, writer)
        writer.flush()
        record.write_config()
        record.write_metrics(iteration, dist.reduce(metrics))
    return folder


def _digest(trained: Trained, resolved: Resolved, held_out: Sequence[Sample]) -> str:
    """Of all that decides an evaluation's result: config, judge's prompts, samples, plugins' code,
    weights."""
    rows = [[*contents_of(s), s.id, s.instruction, repr(s.hidden)] for s in held_out]
    rows += [[s.target.tobytes().hex()] for s in held_out if s.target]
    identities = [identity(part) for part in resolved.by_judge.values()]
    facts = [resolved.config.model_dump(mode="json"), identities, rows]
    digest = hashlib.sha256(json.dumps(facts).encode())
    weights = ("../manifest.json", "adapter_model.safetensors", "adapter_model.bin")
    files = [] if trained.untrained else [trained.model / name for name in weights]
    files += [Path(inspect.getfile(plugin.cls)) for plugin in resolved.plugins]
    for file in files:
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:8]


def _parser() -> printing.Parser:
    parser = printing.Parser("rl eval", __doc__)
    add = parser.add_argument
    add("run", help="run folder, one of its checkpoints, or a config")
    add("--data", metavar="FILE", help="rows; default: the config's data.validation")
    add("--checkpoint", default="", help="of a run: latest, best, or a number of iterations")
    add("--adapter", default="", help="for a config: a PEFT folder, a run, or a hub id")
    add("--against", nargs="+", default=[], metavar="RUN", help="as RUN, or 'untrained'")
    add("--samples", type=at_least_one, metavar="N", help="only the first N")
    add("--out", type=Path, default=Path("evals"), help="default: evals/")
    add("--seed", type=int, help="of the noise; default: the config's")
    add("--device", default="auto", help="default: CUDA, else the CPU")
    add("--trust", action="store_true", help="the run folder is yours")
    text = "a key of the config: --set judge.api_base=http://judge-host:4877"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
