"""The model card (README.md) of a trained model: for the hub, and for who finds the folder.

Nothing that a run has read or written is trusted: every word goes through `markdown.py`. Paths and
addresses of the machine that trained are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.record.card_facts import (
    at,
    base_of,
    datasets_of,
    is_of_hub,
    judge_of,
    licence_of,
    named,
    training_paths,
    without_places,
)
from rl.record.card_use import PIPELINES, Form, use
from rl.record.markdown import code, table, text
from rl.record.untrusted import shown

TASKS = {
    **dict.fromkeys((*PIPELINES, "emu3_vq"), "image-to-image"),
    "sd3": "text-generation",
    "none": "image-text-to-text",
}
"""Renderer -> the hub's name of what the trained model is for."""

OWN_WORDS = "own_words"
"""In the name of a picture that the user's own words give, where nothing is edited."""


@dataclass(frozen=True)
class Comparison:
    """Mean rewards of the same held-out samples, graded both times, in two arms."""

    name: str
    """A category, or an arm."""
    num_samples: int
    old: float
    """0 to 1."""
    new: float
    interval: tuple[float, float] | None
    """95 % of new - old; None of a single sample."""


@dataclass(frozen=True)
class Shown:
    """One held-out sample before and after."""

    instruction: str
    words: tuple[str, str]
    """Completions before and after."""
    rewards: tuple[float | None, float | None]
    """None: not graded."""
    files: tuple[str, ...]
    """Pictures beside the card: the sources (or what the user's own words give), before, after; ()
    where there are none."""


@dataclass(frozen=True)
class Evidence:
    """What the held-out runs of a run show."""

    iterations: tuple[int, int]
    """Finished ones at the first held-out run, and at the last."""
    learnt: Sequence[Comparison]
    """All samples first, then each category; [] where none was graded both times."""
    arms: Sequence[Comparison]
    """What the model is compared with, under the same noise."""
    num_left_out: int
    """Held-out samples that were not graded both times."""
    ungraded_share: float | None
    """Of the training's episodes."""
    drift_alarms: Sequence[int] | None
    """Iterations after which drift was found; None: it was never measured."""
    curve: str | None
    """A picture beside the card."""
    samples: Sequence[Shown]
    """The first ones, not the best."""


def model_card(
    config: Mapping[str, Any],
    iteration: int,
    metrics: Mapping[str, float],
    form: Form | None = None,
    evidence: Evidence | None = None,
) -> str:
    """Markdown with the hub's front matter.

    `config` is the resolved run config, of which any part may be missing; `metrics` the latest
    scalars of the run; `form` None is what a checkpoint holds.
    """
    form = form or ("adapter" if at(config, "policy.lora") else "model")
    lines = [
        *_front(config, form, evidence),
        f"# {text(config.get('run_name', 'a policy'))}",
        "",
        *_what(config, iteration, form),
        *use(config, form),
        *(_results(evidence) if evidence else _scores(metrics)),
        *(_samples(config, evidence) if evidence else []),
        *_limits(config, metrics, evidence),
        *_licences(config),
        "## Config",
        "",
        *code(without_places(dict(config))),
    ]
    return "\n".join(lines) + "\n"


def _front(config: Mapping[str, Any], form: Form, evidence: Evidence | None) -> list[str]:
    """YAML between two lines of dashes; no value holds the end of a line."""
    from huggingface_hub import ModelCardData

    base = base_of(config)
    licence = licence_of(base)
    more: dict[str, Any] = {}
    if licence is None or licence[0] == "other":
        more["license_name"] = "unknown" if licence is None else licence[1]
    if is_of_hub(base):
        more["base_model_relation"] = "adapter" if form == "adapter" else "finetune"
    front = ModelCardData(
        base_model=base if is_of_hub(base) else None,
        library_name={"adapter": "peft", "model": "transformers"}.get(form, "diffusers"),
        tags=["grpo", "reinforcement-learning"],
        pipeline_tag=TASKS.get(str(at(config, "renderer.type"))),
        license=licence[0] if licence else "other",
        datasets=sorted(set(datasets_of(config))) or None,
        widget=_gallery(config, evidence) or None,
        **more,
    )
    return ["---", front.to_yaml(), "---", ""]


def _gallery(config: Mapping[str, Any], evidence: Evidence | None) -> list[dict[str, Any]]:
    """Of what the model gives for an instruction, where it gives pictures."""
    if evidence is None or TASKS.get(str(at(config, "renderer.type"))) != "image-to-image":
        return []
    return [
        {"text": shown(sample.instruction, 200), "output": {"url": sample.files[-1]}}
        for sample in evidence.samples
        if sample.files
    ]


def _what(config: Mapping[str, Any], iteration: int, form: Form) -> list[str]:
    rewards = at(config, "rewards")
    graders = [
        f"{text(name)} ({text(at(plug, 'type'))})"
        for name, plug in (rewards.items() if isinstance(rewards, Mapping) else ())
    ]
    what = {
        "adapter": "A PEFT adapter of a",
        "model": "A",
        "text-encoder": "The text encoder of an editor: a",
    }[form]
    drives = "Its completions are what is graded"
    if at(config, "renderer.type") != "none":
        drives = f"Its completions drive the frozen renderer {named(config, 'renderer.type')}"
    lines = [
        f"{what} {named(config, 'policy.type')} policy after {iteration} iterations of GRPO. "
        f"{drives}; rewards: {', '.join(graders) or 'unknown'}.",
        "",
        f"- {named(config, 'prompts_per_iteration')} prompts x "
        f"{named(config, 'generations_per_prompt')} completions per iteration, seed "
        f"{named(config, 'seed')}",
        f"- loss {named(config, 'algorithm.loss')}, KL coefficient "
        f"{named(config, 'algorithm.kl_coeff')}, learning rate "
        f"{named(config, 'optimizer.learning_rate')}",
        "",
    ]
    return lines


def _scores(metrics: Mapping[str, float]) -> list[str]:
    shown_ones = [n for n in sorted(metrics) if n.startswith(("eval/reward", "reward/mean"))]
    rows = [(text(name), f"{metrics[name]:.4g}") for name in shown_ones]
    return ["## Results", "", *table(["metric", "value"], rows), ""] if rows else []


def _results(evidence: Evidence) -> list[str]:
    before, after = evidence.iterations
    lines = [
        "## Results",
        "",
        f"Rewards of held-out samples, 0 to 1, after {before} iterations and after {after}; the "
        "intervals hold 95 % of the change (paired bootstrap over samples, those that share a "
        "source picture together) and say nothing about other training seeds.",
        "",
    ]
    head = ["held-out samples", "number", "before", "after", "change", "95 % interval"]
    lines += [*table(head, map(_row, evidence.learnt)), ""]
    if evidence.arms:
        head = [f"beside, after {after} iterations", "number", "its reward", "this", "gain"]
        lines += [*table([*head, "95 % interval"], map(_row, evidence.arms)), ""]
    if evidence.curve:
        lines += [f"![reward by iteration]({evidence.curve})", ""]
    return lines


def _row(found: Comparison) -> list[str]:
    interval = "" if found.interval is None else "{:+.3f} to {:+.3f}".format(*found.interval)
    numbers = [f"{found.old:.3f}", f"{found.new:.3f}", f"{found.new - found.old:+.3f}"]
    return [text(found.name), str(found.num_samples), *numbers, interval]


def _samples(config: Mapping[str, Any], evidence: Evidence) -> list[str]:
    if not evidence.samples:
        return []
    lines = [
        f"## The first {len(evidence.samples)} held-out samples",
        "",
        "The first, not the best; rewards beside their words.",
        "",
    ]
    if any(OWN_WORDS in file for sample in evidence.samples for file in sample.files):
        lines[-1:] = ["The first picture is what the user's own words give.", ""]
    rows = []
    for sample in evidence.samples:
        sides = []
        for words, reward in zip(sample.words, sample.rewards, strict=True):
            score = "not graded" if reward is None else f"{reward:.2f}"
            sides.append(f"{text(words) or '(no words)'} ({score})")
        cells = [text(sample.instruction), *sides]
        if sample.files:
            *given, before, after = sample.files
            shown = [" ".join(_given(given)), f"![before]({before})", f"![after]({after})"]
            cells = [f"{picture}<br>{words}" for picture, words in zip(shown, cells, strict=True)]
        rows.append(cells)
    lines += [*table(["asked", "before", "after"], rows), ""]
    return [*lines, *(["<Gallery />", ""] if _gallery(config, evidence) else [])]


def _given(files: Sequence[str]) -> Iterator[str]:
    for number, file in enumerate(files, 1):
        name = OWN_WORDS if OWN_WORDS in file else "source"
        yield f"![{name}{f' {number}' if len(files) > 1 else ''}]({file})"


def _limits(
    config: Mapping[str, Any], metrics: Mapping[str, float], evidence: Evidence | None
) -> list[str]:
    judge = judge_of(config)
    own = f"the judge {judge} and the rewards" if judge else "the rewards"
    lines = [
        "## Limits",
        "",
        f"- Measured by {own} that it was trained against: another judge, or a person, may see it "
        "otherwise. One run, one seed.",
    ]
    share = evidence.ungraded_share if evidence else metrics.get("status/ungraded")
    if share is not None:
        lines.append(f"- {share:.1%} of the training's episodes could not be graded.")
    if evidence and evidence.num_left_out:
        lines.append(
            f"- {evidence.num_left_out} held-out samples were not graded both times and are left "
            "out of the results."
        )
    if evidence and evidence.drift_alarms:
        when = ", ".join(map(str, evidence.drift_alarms))
        lines.append(
            f"- DRIFT: after {when} iterations words that training does not change had lost more "
            "than noise: what the renderer reads has moved away from what it was trained to read."
        )
    elif evidence and evidence.drift_alarms is not None:
        lines.append(
            "- No drift alarm: words that training does not change lost no more than noise."
        )
    elif evidence and at(config, "renderer.type") in PIPELINES:
        lines.append("- Drift of what the renderer reads was not measured.")
    return [*lines, ""]


def _licences(config: Mapping[str, Any]) -> list[str]:
    base, renderer = base_of(config), at(config, "renderer.model_path")
    places = [("base", base), ("renderer", renderer if isinstance(renderer, str) else "")]
    places += [("data", path) for path in training_paths(config)]
    rows = []
    for what, place in dict.fromkeys(places):
        if not place:
            continue
        found = licence_of(place)
        name = "unknown" if found is None else " ".join(found)
        rows.append([what, text(place) if is_of_hub(place) else "local files", text(name)])
    return [
        "## Licences",
        "",
        "As the cards beside their files say; 'unknown' where none lay there: look it up before "
        "you share this model.",
        "",
        *table(["what", "where", "licence"], rows),
        "",
    ]
