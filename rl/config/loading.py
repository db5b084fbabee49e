"""Evaluates Jsonnet, names keys and mistakes, reads older formats and EARL's flat fields."""

from __future__ import annotations

import difflib
import errno
import json
import math
import multiprocessing
import os
import re
import resource
import stat
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import _jsonnet
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

# ---- paths ---------------------------------------------------------------------------------------
# Reads regular files only, and of limited size: a pipe could block, a device may never end.

MISSING = "does not exist"
FOLDER = "is a folder, not a file"
NO_FILE = "is a device or a pipe, not a file"
MAX_BYTES = 64 * 10**6
"""Default limit of `read_bytes`, for files of one JSON object; those of a run have a few kB."""


def not_a_file(path: str | Path) -> str:
    """Why `path` is not a regular file, worded to follow its name in a message; '' if it is."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return MISSING
    except OSError as error:
        return f"cannot be reached ({error.strerror})"
    except ValueError:  # a NUL or a lone surrogate
        return "is not a name that a file can have"
    if stat.S_ISDIR(mode):
        return FOLDER
    return "" if stat.S_ISREG(mode) else NO_FILE


def is_folder(path: str | Path) -> bool:
    """`Path.is_dir`, without its OSError for a name that is too long."""
    return not_a_file(path) == FOLDER


def read_bytes(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file. Raises an OSError, which names the file, for anything else and
    for more than `max_bytes`."""
    if is_folder(path):
        raise OSError(errno.EISDIR, FOLDER, str(path))
    # O_NONBLOCK: opening a pipe waits for a writer otherwise; for a file it has no effect.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"{NO_FILE}; remove it", str(path))
        if status.st_size > max_bytes:
            raise OSError(errno.EINVAL, f"is longer than {max_bytes} bytes", str(path))
        return file.read(max_bytes)


def read_text(path: str | Path, max_bytes: int) -> str:
    """The text of a UTF-8 file.

    Raises ValueError if it is not a regular file, cannot be read, is longer than `max_bytes` or is
    not UTF-8; the message is worded to follow the file's name.
    """
    if why := not_a_file(path):
        raise ValueError(why)
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason} at byte {error.start})") from error


# ---- messages ------------------------------------------------------------------------------------
# Reads plain values into a config section, or reports every mistake in it by its key.

M = TypeVar("M", bound=BaseModel)
MAX_PROBLEMS = 100
"""Limit of problems per section: finding the nearest known key takes milliseconds each."""
MAX_SHOWN, MAX_KNOWN = 60, 16
"""Limits of what a message shows: characters of a key or value, and names in a list."""
_ALTERNATIVE = re.compile(r"\[key\]|str|bool|constrained-\w+|(list|tuple|literal)\[.+\]")
"""What pydantic adds to the `loc` of an error inside a union."""


def validate(model: type[M], values: Mapping[str, Any], at: str = "") -> tuple[M | None, list[str]]:
    """`values` as a `model`, or None and every problem.

    Strict: a string is never taken for a number nor a number for a flag. `at`: the key of the
    section, for the messages ('' for the whole config).
    """
    try:
        # Through JSON, because strict mode would refuse a Python list for a tuple.
        return model.model_validate_json(json.dumps(values), strict=True), []
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=True)
        # Each alternative of a union has its own error.
        of_key: dict[tuple[str, ...], dict[str, Any]] = {}
        for each in errors[:MAX_PROBLEMS]:
            loc = tuple(part for part in map(str, each["loc"]) if not _ALTERNATIVE.fullmatch(part))
            first = of_key.setdefault(loc, {**each, "loc": loc})
            if first["msg"] != each["msg"]:
                first["msg"] += f" or {each['msg'].removeprefix('Input should be ')}"
        return None, [_sentence(model, problem, at) for problem in of_key.values()]


def nearest(name: str, known: Sequence[str]) -> str:
    """`did you mean 'x'?`, or the known names (the nearest, of many) if none is similar."""
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f"did you mean {close[0]!r}?"
    shown = sorted(difflib.get_close_matches(name, known, n=MAX_KNOWN, cutoff=0.0))
    return f"known: {', '.join(shown)}{', ...' if len(shown) < len(known) else ''}"


def is_dotted_path(name: str) -> bool:
    """'my_package.my_plugin': Python names, joined by dots."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def sections(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted key, section) of `model` and of every section inside it."""
    yield at, model
    for name, field in model.model_fields.items():
        section = _section_of(field)
        if section:
            yield from sections(section, f"{at}.{name}" if at else name)


def _sentence(model: type[BaseModel], problem: Mapping[str, Any], at: str) -> str:
    loc = problem["loc"]
    key = ".".join(part[:MAX_SHOWN] for part in (at, *loc) if part) or "the config"
    kind = problem["type"]
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {_nearest_key(model, loc, at)}"
    if kind == "value_error":  # the section's own message
        return f"{key}: {problem['ctx']['error']}"
    if not loc:
        return f"{key}: {problem['msg']}"
    field = _field_at(model, loc)
    description = f" ({' '.join(field.description.split())})" if field and field.description else ""
    if kind == "missing":
        return f"{key}: missing{description}"
    given = problem["input"]
    value = json.dumps(given)
    value = value if len(value) <= MAX_SHOWN else f"{value[: MAX_SHOWN - 3]}..."
    must = problem["msg"].replace("Input should be", "must be").replace("String should", "must")
    hint = ""
    if kind == "string_type" and isinstance(given, int | float):
        hint = f"; write it in quotes (on the command line: \"{key}='{value}'\")"
    elif isinstance(given, str) and kind.endswith(("_type", "_parsing")) and kind != "string_type":
        hint = (
            "; write it without quotes; if it is std.extVar('APP__X'), write "
            "std.parseJson(std.extVar('APP__X'))"
        )
    return f"{key}: {value} given, {must}{hint}{description}"


TRL_NAMES: Mapping[str, str] = {
    "adam_epsilon": "optimizer.adam_eps",
    "beta": "algorithm.kl_coeff",
    "bf16": "policy.dtype",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "evaluation.every_n_iterations",
    "gradient_accumulation_steps": "prompts_per_iteration",
    "lora_alpha": "policy.lora.alpha",
    "lora_dropout": "policy.lora.dropout",
    "lora_r": "policy.lora.r",
    "lora_target_modules": "policy.lora.target_modules",
    "loss_type": "algorithm.loss",
    "mask_truncated_completions": "algorithm.truncated_completions",
    "max_completion_length": "sampling.max_completion_tokens",
    "max_prompt_length": "policy.max_prompt_tokens",
    "max_steps": "num_iterations",
    "model_name_or_path": "policy.model_path",
    "num_generations": "generations_per_prompt",
    "num_train_epochs": "num_epochs",
    "output_dir": "base_exp_dir",
    "per_device_train_batch_size": "prompts_per_iteration",
    "report_to": "tracking.wandb",
    "reward_funcs": "rewards",
    "reward_weights": "final_reward.weights",
    "save_steps": "checkpoint.save_every_n_iterations",
    "scale_rewards": "algorithm.advantage_scale",
    "steps_per_generation": "optimizer.updates_per_iteration",
    "vllm_enable_sleep_mode": "engine.residency",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
    "warmup_steps": "optimizer.warmup_iterations",
}
"""Names in TRL's GRPOConfig and ModelConfig -> the keys that decide the same here
(docs/coming-from.md says what differs)."""


def key_named(model: type[BaseModel], name: str, at: str = "") -> str:
    """The dotted key that has this name in `model` or in TRL; '' if none has."""
    keys = [f"{key}.{name}" for key, other in sections(model, at) if name in other.model_fields]
    return [*keys, TRL_NAMES.get(name, "")][0].removeprefix(".")


def _nearest_key(model: type[BaseModel], loc: Sequence[str], at: str) -> str:
    """Suggests a section that has this very key, else TRL's name for one, else the nearest key of
    the same section, and its keys whose values are passed on as they are."""
    name = loc[-1][:MAX_SHOWN]
    if name in TRL_NAMES:
        return f"TRL's {name} is {TRL_NAMES[name]!r} here (docs/coming-from.md)"
    keys = [key for key, other in sections(model, at) if name in other.model_fields]
    if keys:
        return f"did you mean '{keys[0]}.{name}'?" if keys[0] else f"{name!r} is a top-level key"
    section = _section_of(_field_at(model, loc[:-1])) if loc[1:] else model
    fields = section.model_fields if section else {}
    open_keys = [key for key, field in fields.items() if field.annotation == dict[str, Any]]
    hints = [nearest(name, list(fields)), *(".".join([at, *loc[:-1], k, name]) for k in open_keys)]
    return "; to pass it on as it is, set ".join(hints)


def _section_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """The section class that a field holds (`Section | None` too), or None."""
    kinds = (field.annotation, *typing.get_args(field.annotation)) if field else ()
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _field_at(model: type[BaseModel], loc: Sequence[str]) -> FieldInfo | None:
    """The innermost declared field on the way to `loc` (it ends at a list index or dict key)."""
    field = model.model_fields.get(loc[0]) if loc else None
    is_dict = field is not None and typing.get_origin(field.annotation) is dict
    inside = loc[2 if is_dict else 1 :]  # behind the dict's own key
    section = _section_of(field) if inside else None
    return _field_at(section, inside) if section else field


# ---- printing ------------------------------------------------------------------------------------
# Escapes text from outside the process, so that it is safe to print on a terminal.


def escaped(text: str, max_chars: int) -> str:
    """`text` as one printable line of at most about `max_chars` characters.

    Line ends become spaces. Whatever a terminal interprets (control characters, ANSI sequences,
    changes of direction, invisible characters) is replaced by a backslash escape.
    """
    # Enough even if three in four are white space, without splitting megabytes.
    line = " ".join(text[: 4 * max_chars].split())
    line = printable(line[: max_chars + 1])
    is_whole = len(text) <= 4 * max_chars and len(line) <= max_chars
    return line if is_whole else f"{line[:max_chars]}..."


def printable(text: str, keep: str = "") -> str:
    """`text` with all that a terminal interprets escaped, except the characters in `keep`."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


# ---- shipped -------------------------------------------------------------------------------------
# Finds the shipped configs, in a clone or a wheel, and resolves `pkg://` paths.

SCHEME = "pkg://"
_PACKAGE = Path(__file__).parents[1]


def configs_folder() -> Path:
    """`configs/` of a clone; a wheel carries it inside the package."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def shipped_configs() -> list[str]:
    """Names of the shipped configs, `configs/quickstart.jsonnet` ..., valid in any folder."""
    return [f"configs/{file.name}" for file in sorted(configs_folder().glob("*.jsonnet"))]


def find_config(path: str | Path) -> Path | None:
    """The file at `path`; if there is none, the shipped `configs/...` of that name; else None."""
    path = Path(path)
    if not not_a_file(path):
        return path
    shipped = configs_folder().joinpath(*path.parts[1:])
    names_shipped = path.parts[:1] == ("configs",) and ".." not in path.parts
    return shipped if names_shipped and not not_a_file(shipped) else None


def located(text: str) -> str:
    """`pkg://package/path/inside` as the path where that package is installed; else `text`.

    Raises ValueError if there is no such package.
    """
    if not text.startswith(SCHEME):
        return text
    package, _, inside = text.removeprefix(SCHEME).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{text!r} given, but no package {package!r} is installed here; write "
            f"{SCHEME}<package>/<path inside it>, or a path"
        )
    return str(Path(spec.submodule_search_locations[0], inside))


# ---- jsonnet -------------------------------------------------------------------------------------
# Evaluates a Jsonnet file with the command line's overrides; each error names file and line.

MAX_S = 10.0
"""Time limit for a config; usually it takes a fifth of a second."""
MAX_MISSING = 20
"""Limit of missing variables to report: a file could name endlessly many."""

_SET = """
local set(x, path, value, key) =
  if path == [] then value
  else if std.isObject(x) then
    x { [path[0]]: set(if path[0] in super then super[path[0]] else {}, path[1:], value, key) }
  else if std.isArray(x) then
    assert std.member([std.toString(i) for i in std.range(0, std.length(x) - 1)], path[0])
           : "override %s: no entry %s; the list's %d entries are counted from 0"
             % [key, path[0], std.length(x)];
    std.mapWithIndex(
      function(i, item)
        if path[0] == std.toString(i) then set(item, path[1:], value, key) else item,
      x
    )
  else error 'override %s: %s is in a plain value, not in a section' % [key, path[0]];
"""
"""Jsonnet that applies an override through `super`: the file's own `self` references see it."""
_BASE = re.compile(r"^\(import (['\"])(.+?)\1\)", re.MULTILINE)
"""What a file is built upon, as in `(import 'base.libsonnet') + { ... }`."""
_MISSING = re.compile(r"undefined external variable: (\w+)(.*)")
_WORD = re.compile(r"(?!(std|true|false|null)\b)[A-Za-z_/.][\w./:~-]*|\d+(-\d+)+", re.ASCII)
"""Names and paths, which Jsonnet refuses (`cuda`, `runs/mine`), and dates, which it subtracts."""
_PLAIN = re.compile(
    r"true|false|null|-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?(e-?[0-9]{1,2})?"
    r"""|(["'])[^"'\\\x00-\x1f]*\4"""
)
"""Jsonnet that is its own value, so that no interpreter is started for it."""


def evaluate(
    path: Path,
    overrides: Sequence[str],
    env: Mapping[str, str],
    kept: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any] | None, list[str]]:
    """(the file's values with the overrides, None if it cannot be evaluated; all problems).

    `kept`: the values to change, of a run; None: those of the file.
    A missing environment variable is a problem; its name replaces its value, so that the rest of
    the file is still checked. Imports that are not found beside the importing file come from the
    shipped configs (`base.libsonnet`).
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, path, overrides, env, kept))
    process.start()
    sender.close()
    what, text = f"{path} with its overrides", None
    problems = [
        f"{what}: took longer than {MAX_S:g} s: a recursion or list without end, or a huge import?"
    ]
    try:
        if receiver.poll(MAX_S):
            text, problems = receiver.recv()
    except EOFError:
        problems = [
            f"{what}: crashed Jsonnet: values nested too deeply, or too large for the memory?"
        ]
    finally:
        process.kill()
        process.join()
    values = None if text is None else json.loads(text)
    if values is None or isinstance(values, dict):
        return values, problems
    return None, [f"{path}: a config is an object {{ ... }}, not of type {type(values).__name__}"]


def _send(sender: Connection, *program: Any) -> None:
    """Send what `_evaluate` returns. In a process of its own, because Jsonnet, which is C++, cannot
    be interrupted and may crash."""
    limit_s = math.ceil(MAX_S)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))  # should the parent be killed
    sender.send(_evaluate(*program))


def base_of(path: Path, env: Mapping[str, str], values_of: Mapping[str, Any]) -> tuple[str, Any]:
    """(name, values) of the file upon which the one at `path` is built, `(import 'name') + { ... }`
    at the beginning of a line; ('', {}) without one. `values_of`: keys that are set in that file
    first."""
    found = _BASE.search(path.read_text(encoding="utf-8", errors="replace"))
    if found is None:
        return "", {}
    beside = path.resolve().parent / found[2]
    file = beside if beside.is_file() else configs_folder() / found[2]
    overrides = [f"{key}={json.dumps(value)}" for key, value in values_of.items()]
    return file.name, evaluate(file, overrides, env)[0] or {}


def _evaluate(
    path: Path, overrides: Sequence[str], env: Mapping[str, str], kept: Mapping[str, Any] | None
) -> tuple[str | None, list[str]]:
    """(JSON or None, problems)."""
    variables = {name: value for name, value in env.items() if name.startswith("APP__")}
    problems = []

    def run(text: str) -> str:
        return _jsonnet.evaluate_snippet(
            "", text, ext_vars=variables, jpathdir=str(configs_folder())
        )

    text = f"import {json.dumps(str(path.resolve()))}" if kept is None else json.dumps(kept)
    try:
        "".join(overrides).encode()  # raises UnicodeError for a lone surrogate
        for override in overrides:
            key, equals, value = override.partition("=")
            if not equals or not all(key.split(".")):
                problems.append(f"override {override!r:.200}: write key.sub=value")
                continue
            try:
                literal = _literal(value, run)
            except ValueError as error:
                problems.append(f"override {key}: {error}")
                continue
            text = f"set({text}, {json.dumps(key.split('.'))}, {literal}, {json.dumps(key)})"
        for _ in range(MAX_MISSING):  # Jsonnet reports one at a time
            try:
                return run(_SET + text), problems
            except RuntimeError as error:
                message = _message(str(error), path)
                missing = _MISSING.match(message)
                if missing is None or missing[1] in variables:
                    # The stand-in values may have caused this error.
                    return None, problems or [message]
                name, where = missing.groups()
                variables[name] = name
                problems.append(
                    f"set the environment variable {name}{where}"
                    + ("" if name.startswith("APP__") else "; only APP__... can be read")
                )
    except UnicodeError:
        problems.append(f"{path}: its path, an override or an APP__ variable is not UTF-8")
    return None, problems


def _literal(text: str, run: Callable[[str], str]) -> str:
    """An override's right-hand side as Jsonnet; text that is not valid Jsonnet becomes a string.

    Raises ValueError for text that is clearly meant as Jsonnet but cannot be evaluated.
    """
    if _WORD.fullmatch(text):
        return json.dumps(text)
    try:
        return text if _PLAIN.fullmatch(text) else run(text)
    except RuntimeError as error:
        if re.search(r"^[{\['\"]|std\.extVar|import *['\"]", text):
            why = str(error).partition("\n")[0]
            raise ValueError(f"{text} cannot be evaluated: {why}") from error
        return json.dumps(text)


def _message(error: str, path: Path) -> str:
    """Jsonnet's message without its stack frames, and file:line of the first that is in a file."""
    message = re.sub(r"^(RUNTIME|STATIC) ERROR: ", "", error.partition("\n\t")[0]).rstrip("\n")
    # A line of Jsonnet's trace: <tab>my.jsonnet:3:5-9<tab>object <anonymous>
    for file, line in re.findall(r"(?:^\t|: )([^\t\n:]+):\(?(\d+):", error, re.MULTILINE):
        if Path(file).is_file():
            return message if file in message else f"{message} (at {file}:{line})"
    return message if str(path) in message else f"{path}: {message}"


# ---- formats -------------------------------------------------------------------------------------
# Format numbers of files. A number rises when the name or meaning of a key changes, not when a key
# with a default is added.

CONFIG_FORMAT = 3
"""The only format of configs and run folders that this version reads. A config has it as its key
`format` (missing: the current format), a run folder in its config.json (missing: 1)."""
CHECKPOINT_FORMAT = 1
"""`format` of state.json."""
ADAPTER_FORMAT = 2
"""`auto_mapping.format` of adapter_config.json; missing: 1."""
REMOVED_KEYS: Mapping[str, tuple[Any, str]] = {
    "algorithm.policy_failed_reward": (0.0, ""),
    "checkpoint.keep": ("all", "see checkpoint.keep_every_n_iterations"),
    "data.max_image_side_px": (8192, "downscale the pictures"),
    "engine.adapter": ("served", ""),
    "engine.kv_cache_memory_mb": (None, "use engine.gpu_memory_utilization"),
    "engine.share_base_weights": (False, ""),
    "engine.tensor_parallel_size": (1, ""),
    "evaluation.judge": (None, "give a reward a judge and `held_out_only: true`"),
    "*judge.attack_max_gain": (0.25, ""),
    "judge.audit_max_fallback": (None, ""),
    "*judge.audit_max_noise": (0.1, ""),
    "*judge.audit_max_ungraded": (0.05, ""),
    "judge.audit_min_accuracy": (None, "see judge.audit_min_auroc"),
    "*judge.backoff_s": (1.0, "a short judge.max_outage_s makes pauses shorter"),
    "*judge.breaker_failures": (20, ""),
    "*judge.breaker_pause_s": (15.0, "a short judge.max_outage_s makes pauses shorter"),
    "policy.thought.loss": ("all", ""),
    "policy.thought.max_tokens": (None, "see sampling.max_completion_tokens"),
    "policy.thought.states": ("words", ""),
    "policy.constrained": (True, ""),
    "policy.train_text_tokens_only": (False, "training text and image tokens in turns is gone"),
    "policy.train_vision_tokens_only": (False, "training text and image tokens in turns is gone"),
    "policy.text_only_cycle_steps": (10, "training text and image tokens in turns is gone"),
    "policy.text_only_steps": (10, "training text and image tokens in turns is gone"),
    "policy.vision_only_cycle_steps": (10, "training text and image tokens in turns is gone"),
    "policy.vision_only_steps": (10, "training text and image tokens in turns is gone"),
    "policy.text_encoder_subfolder": ("text_encoder", ""),
    "policy.max_kept_pictures": (64, ""),
    "policy.from_run": ("", "a new run sets policy.adapter_path, which takes a run folder"),
    "render_pool.batches_per_worker": (2, ""),
    "render_pool.first_batch_s": (900.0, ""),
    "render_pool.labels": ({}, "use render_pool.resources"),
    "render_pool.local": (False, ""),
    "render_pool.max_tries": (3, ""),
    "render_pool.max_wait_s": (1800.0, ""),
    "render_pool.name": ("", ""),
    "render_pool.num_cpus": (1.0, ""),
    "renderer.attention_backend": ("auto", ""),
    "renderer.cfg_in_one_forward": (True, ""),
    "renderer.compile_blocks": (False, ""),
    "renderer.scheduler_overrides.shift": (None, ""),
    "renderer.scheduler_overrides.use_dynamic_shifting": (None, ""),
    "renderer.sigmas": (None, "a few-step checkpoint states them in its model_index.json"),
    "rewards.*.answer_tag": ("answer", ""),
    "rewards.*.batch_size": (16, "clip scores pictures one by one"),
    "rewards.*.scores.*.group": ("", "combine 'sqrt_min' is what 'viescore' does"),
    "rewards.*.think_tag": ("think", ""),
    "tracking.show_group_every_n_iterations": (10, "the page and episodes/ have every group"),
    "tracking.thumbnails_mb": (200.0, "see tracking.keep_images_of_last_n_iterations"),
}
"""Pattern of a key that an older version knew -> (its only value now, what to use instead). A
config may still set that value, and a run's record may hold any. Plugins of the user's own, whose
`type` has a dot, may have a key of that name."""
CHANGED_OUTPUT = (
    "policy.thought.*",
    "policy.constrained",
    "policy.text_encoder_subfolder",
    "renderer.sigmas",
    "renderer.scheduler_overrides.*",
)
"""Those of `REMOVED_KEYS` that, at another value, changed what the policy wrote or the renderer
drew."""
CHANGED_TRAINING = (
    *CHANGED_OUTPUT,
    "policy.train_*",
    "rewards.*_tag",
    "rewards.*.scores.*.group",
    "algorithm.policy_failed_reward",
    "evaluation.judge",
)
"""Those that, at another value, changed training or its measurement."""


def refusal(label: str, number: Any, newest: int, oldest: int = 1) -> str:
    """Why `label`, which has format `number` (None: it has none), cannot be read; '' if it can."""
    if number is None or (type(number) is int and oldest <= number <= newest):
        return ""
    is_newer = type(number) is int and number > newest
    return f"{label} has the format {number!r}, and this version reads {oldest} to {newest}: " + (
        "a newer one wrote it; update vlm-edit-rl"
        if is_newer
        else "use the version of vlm-edit-rl that wrote it"
    )


def number_of(written: Mapping[str, Any]) -> Any:
    """The format number of a run's file; None for other files, such as a model's config."""
    return written.get("format", 1 if "run_name" in written else None)


def without_removed_keys(
    section: Mapping[str, Any], at: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the section at the key `at` without `REMOVED_KEYS`, those it had: dotted key -> value)."""
    kept: dict[str, Any] = {}
    removed: dict[str, Any] = {}
    is_own = "." in str(section.get("type"))
    for name, value in section.items():
        key = f"{at}.{name}" if at else name
        if not is_own and any(fnmatchcase(key, pattern) for pattern in REMOVED_KEYS):
            removed[key] = value
        elif isinstance(value, Mapping) and (not is_own or name == "judge"):
            # An empty section stays: `thought: {}` asks for a thought.
            kept[name], inner = without_removed_keys(value, key)
            removed |= inner
        else:
            kept[name] = value
    return kept, removed


def use_of_removed_keys(removed: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each of the keys of `without_removed_keys` that is set to another value than
    the one that it still may have."""
    for key, value in removed.items():
        only, instead = next(REMOVED_KEYS[p] for p in REMOVED_KEYS if fnmatchcase(key, p))
        if value != only:
            why = instead or f"it is always {json.dumps(only)}"
            yield f"{key}: this key was removed, delete it; {why}"


def stored(config: Mapping[str, Any], label: str, refused: Sequence[str] = ()) -> dict[str, Any]:
    """A run's stored config, without `REMOVED_KEYS`; `label` is its name in messages. `refused`:
    patterns of removed keys that must have the value that this version always uses.

    Raises ValueError if one of them has not, or if the config has another format.
    """
    if problem := refusal(label, number_of(config), CONFIG_FORMAT, oldest=CONFIG_FORMAT):
        raise ValueError(problem)
    kept, removed = without_removed_keys(config)
    lost = [
        f"{key}={json.dumps(value)}"
        for key, value in removed.items()
        if list(use_of_removed_keys({key: value})) and any(fnmatchcase(key, p) for p in refused)
    ]
    if lost:
        raise ValueError(
            f"{label} sets {', '.join(lost)}, which this version cannot compute; go on with the "
            "version of vlm-edit-rl that wrote it"
        )
    return kept


# ---- earl fields ---------------------------------------------------------------------------------
# Converts EARL's flat config fields to the nested schema, so that EARL files load unchanged.

Values = dict[str, Any]

LONGEST_PROMPT = 1280
"""Tokens: 1065 for a 256x256 picture, the rest for the instruction and the prefill."""

FIXED: Values = {
    "policy.type": "emu3",
    "policy.lora": None,
    "engine.type": "vllm",
    "renderer.type": "emu3_vq",
    "judge.max_tokens": 1400,
    "algorithm.advantage_eps": 1e-5,  # EARL uses 1e-4 with rewards from 0 to 10.
    "algorithm.loss": "dapo",
    "algorithm.zero_spread_groups": "keep",
    "algorithm.truncated_completions": "floor",
    "optimizer.backend": "deepspeed",
    "optimizer.zero_stage": 2,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.gradient_checkpointing": True,
    "optimizer.max_kept_tokens": 0,
    "evaluation.every_n_iterations": 100,
    "evaluation.temperature": 1.0,
    "evaluation.top_k": 2048,
    "tracking.wandb": "online",
}
"""Constants of EARL's code. EARL had no held-out evaluation; the one here uses its val set."""

MOVED: Mapping[str, str] = {
    "run_name": "run_name",
    "base_exp_dir": "base_exp_dir",
    "num_iterations": "num_iterations",
    "random_seed": "seed",
    "model_path": "policy.model_path",
    "model_revision": "policy.revision",
    "tokenizer_path": "policy.tokenizer_path",
    "assistant_prefill": "policy.assistant_prefill",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
    "emu3_use_logit_processor": "policy.constrained",
    "model_context_size": "engine.max_model_len",
    "learning_rate": "optimizer.learning_rate",
    "kl_coeff": "algorithm.kl_coeff",
    "generations_per_sample": "generations_per_prompt",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "train_text_tokens_only": "policy.train_text_tokens_only",
    "text_only_cycle_steps": "policy.text_only_cycle_steps",
    "text_only_steps": "policy.text_only_steps",
    "train_vision_tokens_only": "policy.train_vision_tokens_only",
    "vision_only_cycle_steps": "policy.vision_only_cycle_steps",
    "vision_only_steps": "policy.vision_only_steps",
    "reward_function_api_base": "judge.api_base",
    "reward_function_api_model_name": "judge.model",
    "log_episodes_every_n_iterations": "tracking.log_episodes_every_n_iterations",
    "keep_checkpoints_every_n_iterations": "checkpoint.keep_every_n_iterations",
    "save_checkpoints_every_n_iterations": "checkpoint.save_every_n_iterations",
    "push_to_hub_every_n_iterations": "checkpoint.push_to_hub_every_n_iterations",
    "push_to_hub_repo_id": "checkpoint.push_to_hub_repo_id",
}
"""EARL's name -> our key, for fields that differ only in name; null keeps the default."""

KEPT = frozenset(name for name, key in MOVED.items() if name == key and "." not in name)
"""EARL's fields of the same name and meaning."""

FINAL_REWARDS: Mapping[str, Values] = {
    "viescore": {"weights": {"viescore": 1}},
    "ground_score": {"weights": {"ground_score": 1}},
    "sqrt(viescore_pqxground_score)": {
        "op": "geometric_mean",
        "weights": {"viescore/pq_01": 1, "ground_score": 1},
    },
}

Count = Annotated[int, Field(ge=1)]


class Converted(BaseModel):
    """EarlFields whose values have to be converted, in EARL's units."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train_paths_file: list[str] = []
    coefficients: list[float] = []
    val_paths_file: list[str] = []
    val_coefficients: list[Annotated[float, Field(ge=1, le=1)]] = []  # only 1 is supported
    episodes_per_iteration: Count
    generations_per_sample: Count
    per_device_batch_size: Count | None = None
    model_context_size: Count
    max_response_tokens: Count
    max_completion_len: Count | None = None
    max_prompt_len: Count | None = None
    emu3_use_logit_processor: bool = True
    separate_language_and_vision_vocabs: Literal[True] = True
    reward_compute_viescore: bool = True
    reward_compute_ground_score: bool = True
    reward_final_reward: Literal["viescore", "ground_score", "sqrt(viescore_pqxground_score)"] = (
        "viescore"
    )


_OTHERS: Values = dict.fromkeys(set(MOVED) - set(Converted.model_fields), (Any, None))
EarlFields = create_model("EarlFields", __base__=Converted, **_OTHERS)
"""The fields of EARL."""


def is_earls(values: Mapping[str, Any], required: Sequence[str]) -> bool:
    """Whether a config is written in EARL's fields. `required`: the top-level keys that every
    config of the nested schema has."""
    nested_keys = (set(values) & set(required)) - KEPT
    return len(set(values) & (set(EarlFields.model_fields) - KEPT)) > len(nested_keys)


def from_earl(
    values: Mapping[str, Any], top_level_keys: Sequence[str], file_name: str
) -> tuple[Values, list[str]]:
    """(the same run in the nested schema, problems). `top_level_keys`: of the schema; `file_name`:
    the run's name if `values` has none. Keys of the schema override EARL's fields."""
    direct = {name: values[name] for name in values if name in top_level_keys and name not in KEPT}
    # EARL also read the word 'none', in upper or lower case, as null.
    flat = {n: v for n, v in values.items() if n not in direct and str(v).lower() != "none"}
    fields, problems = validate(EarlFields, flat)
    if fields is None:
        return {}, problems
    converted, problems = _converted(fields)
    # EARL reads the lengths of a cycle only if its switch is on.
    for kind in ("text", "vision"):
        if not flat.get(f"train_{kind}_tokens_only"):
            flat = {n: v for n, v in flat.items() if not n.startswith(f"{kind}_only_")}
    moved = {MOVED[name]: value for name, value in flat.items() if name in MOVED}
    run: Values = {}
    for key, value in (FIXED | {"run_name": file_name} | moved | converted).items():
        *parents, name = key.split(".")
        section = run
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    data = merge(run, direct)["data"]
    if isinstance(data, Mapping) and not data["validation"]:
        run["evaluation"]["every_n_iterations"] = 0
    return merge(run, direct), problems


def _converted(fields: Converted) -> tuple[Values, list[str]]:
    """(dotted key -> value, problems).

    These meanings differ from EARL: `coefficients` are exact shares of an endless mixture (EARL
    copies data sets or takes fixed subsets); a short context reduces `max_response_tokens`; a
    `per_device_batch_size` of n allows n completions with a prompt each, although a group's prompt
    is stored only once; rewards are 0 to 1, not 0 to 10 (the advantages are equal).
    """
    problems = []
    paths, coefficients = fields.train_paths_file, fields.coefficients
    if coefficients and len(coefficients) != len(paths):
        problems.append(
            f"coefficients: {len(coefficients)} for {len(paths)} train_paths_file; give one each, "
            "or [] for equal shares"
        )
    episodes, group = fields.episodes_per_iteration, fields.generations_per_sample
    if episodes % group:
        problems.append(
            f"episodes_per_iteration: {episodes} completions are not whole groups of {group} "
            f"(generations_per_sample); use a multiple of {group}"
        )
    # No coefficients: every set is upsampled to the largest, that is, all have equal shares.
    shares = [{"coefficient": c} for c in coefficients] or [{} for _ in paths]
    context, response = fields.model_context_size, fields.max_response_tokens
    prompt = fields.max_prompt_len or max(LONGEST_PROMPT, context - response)
    longest = min(response, context - prompt, fields.max_completion_len or response)
    if longest < 1:
        problems.append(
            f"model_context_size: {context} leaves no room beside a prompt of {prompt} tokens"
        )
    computed = {
        "viescore": fields.reward_compute_viescore,
        "ground_score": fields.reward_compute_ground_score,
    }
    values: Values = {
        "data.train": [
            {"type": "emu3_tokens", "path": path} | share
            for path, share in zip(paths, shares, strict=False)
        ],
        "data.validation": [{"type": "emu3_tokens", "path": p} for p in fields.val_paths_file],
        "policy.max_prompt_tokens": prompt,
        "sampling.max_completion_tokens": longest,
        "final_reward": FINAL_REWARDS[fields.reward_final_reward],
        "rewards": {name: {"type": name} for name, is_computed in computed.items() if is_computed},
        "prompts_per_iteration": episodes // group,
    }
    if fields.per_device_batch_size is not None:
        tokens = fields.per_device_batch_size * (prompt + longest)
        values["optimizer.max_tokens_per_micro_batch"] = tokens
    return values, problems


def merge(base: Values, over: Mapping[str, Any]) -> Values:
    """A copy of `base` updated with `over`, recursively."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged
