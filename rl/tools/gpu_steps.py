"""Steps that run models on the GPU: kernels and policies, engines, renderers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from rl import build
from rl.algorithm.attention_kernels import CPU, PLAIN, Kernel, choose_kernel
from rl.api.engine import EngineClaim
from rl.api.types import Completion, PackedGroup
from rl.config.schema import load_config
from rl.learner.backends import trainable_parameters
from rl.learner.learner import MAX_MEAN_DLOGP_NATS, Learner, SyncError, sync
from rl.policies.attention import Packing, attention
from rl.ranks.dist import Dist
from rl.renderers import qwen_image_21_loop, qwen_image_denoiser, qwen_image_loop
from rl.renderers.qwen_image_21_config import TOKENS_PER_SLOT
from rl.renderers.qwen_image_21_loop import PromptImage, Row
from rl.renderers.qwen_image_denoiser import Fp8Linear, build_table
from rl.rollout.episodes import first_samples
from rl.tools.gpu_checks import Line, Setup, result
from rl.train import sampling_params

# ---- gpu engines ---------------------------------------------------------------------------------
# Steps `vllm_*`: vLLM on the small policies: weight sync, seeds, the image grammar, sleep.

USE_TRANSFORMERS = {"engine.type": "transformers"}
USE_TRANSFORMERS_FIX = "set engine.type=transformers"
CLAIM = EngineClaim(cache_bytes=256 << 20, share=0.01)
"""With a stated cache size vLLM does not profile memory, which would count what the steps beside it
allocate."""


def resolved_for(setup: Setup, name: str, *more: str) -> build.Resolved:
    """The shipped small config `name` on this device, with the overrides `more`."""
    path, *overrides = setup.words(name, *more)
    return build.resolve(load_config(path, overrides))


class Opened:
    """The engine of a shipped small config beside its learner, as a run has them."""

    def __init__(self, setup: Setup, config_name: str, residency: str, stack: ExitStack) -> None:
        more = [] if setup.tiny else [f"engine.residency={residency}"]
        resolved = resolved_for(setup, config_name, *more, "engine.type=vllm")
        self.config, dist = resolved.config, Dist.from_env(setup.device)
        self.policy = build.build_policy(resolved, dist)
        stack.callback(self.policy.close)
        self.engine: Any = build.build_engine(resolved, self.policy, dist, claim=CLAIM)
        stack.callback(self.engine.close)
        samples = first_samples(build.build_data(resolved, resolved.train), 2)
        self.prompts = [self.policy.build_prompt(sample) for sample in samples]
        self.learner = Learner(self.policy, self.config, dist, num_iterations=1)

    def sample(self) -> list[Completion]:
        """Completions of both prompts, with the same seeds each time."""
        # As a sync does: drops the engine's cache of the prompts.
        self.engine.load_weights(self.learner.export_weights())
        params = sampling_params(self.config)
        groups = self.engine.generate(self.prompts, params, [7, 7000])
        return [completion for group in groups for completion in group]


def repeats(before: Sequence[Completion], after: Sequence[Completion]) -> tuple[bool, str]:
    """(whether all completions are equal, a note)."""
    same = sum(a.token_ids == b.token_ids for a, b in zip(before, after, strict=True))
    return same == len(before), f"{same} of {len(before)} completions repeat"


def engine(setup: Setup, name: str, config_name: str) -> Iterator[Line]:
    """Start, weight sync, seeds; pictures if the policy writes them."""
    what = f"vLLM, {name}: "
    with ExitStack() as stack:
        opened = Opened(setup, config_name, "resident", stack)
        graphs = "eager" if setup.tiny else "with CUDA graphs"
        yield result(f"{what}start", True, f"{setup.dtype}, {graphs}")
        yield weight_sync(f"{what}weight sync", opened, setup.dtype)
        before = opened.sample()
        fix = f"no resume is exact on this machine with vLLM; {USE_TRANSFORMERS_FIX}"
        yield result(f"{what}same seeds", *repeats(before, opened.sample()), fix, USE_TRANSFORMERS)
        if opened.policy.image_vocabulary is not None:
            whole = sum(c.finish == "stop" and any(c.forced or ()) for c in before)
            yield result(
                f"{what}pictures",
                whole == len(before),
                f"{whole} of {len(before)} are whole",
                USE_TRANSFORMERS_FIX,
                USE_TRANSFORMERS,
            )


def sleep(setup: Setup, config_name: str) -> Iterator[Line]:
    """Two sleeps, after which the same seeds must give the same completions."""
    with ExitStack() as stack:
        opened = Opened(setup, config_name, "sleep", stack)
        before, fix = opened.sample(), "set engine.residency=resident"
        try:
            for _ in range(2):
                opened.engine.sleep()
                opened.engine.wake()  # raises where a weight has changed
            good, note = repeats(before, opened.sample())
        except RuntimeError as error:
            good, note = False, str(error)
        yield result("vLLM: sleep, twice", good, note, fix, {"engine.residency": "resident"})


def move(module: torch.nn.Module, seed: int = 1) -> None:
    """Add noise of standard deviation 0.02 to the trainable weights, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable_parameters(module).values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.02 * noise.to(parameter))


def weight_sync(what: str, opened: Opened, dtype: str) -> Line:
    """Two syncs, all trained weights moved before each; `sync` reads back and compares."""
    report: Any = None
    both = opened.engine, opened.learner, opened.prompts[0]
    try:
        for seed in (1, 2):
            move(opened.policy.module, seed)
            report = sync(*both, dtype, opened.config.sampling.temperature, report)
    except SyncError as error:
        return result(what, False, str(error), USE_TRANSFORMERS_FIX, USE_TRANSFORMERS)
    note = (
        f"log-probs differ by {report.mean_dlogp_nats:.0e} nats, limit "
        f"{MAX_MEAN_DLOGP_NATS[dtype]:g}; read back: {'yes' if report.read_back else 'no'}"
    )
    return result(what, True, note)


# ---- gpu kernels ---------------------------------------------------------------------------------
# Step `kernels`: the policies' packed attention against float64, and a policy against float32.
#
# Axes: `_S` tokens of a packed row, `_H` heads, `_D` their width.

LARGEST_ERROR = {"bfloat16": 0.02, "float32": 1e-5}
"""Limit of the relative error; a bfloat16 kernel rounds attention weights to 8 bits of mantissa.
One key too many or too few in the short segments below causes an error ten times as large."""
LARGEST_BIAS = {"bfloat16": 2e-3, "float32": 1e-5}
"""Limit of the error in scale: rounding errors average out, a wrong scale does not."""
WORSE_BY = 1.5
"""Limit of the chosen kernel's error in a whole policy, divided by the plain kernel's."""
LAYOUTS: dict[str, list[tuple[int, tuple[int, ...]]]] = {
    "a group": [(65, (33, 1, 17, 8, 2, 30, 5, 9))],
    "groups of all kinds": [(40, (7,)), (3, (12, 0, 5)), (129, (64, 64))],
    "prompts alone": [(21, (0,)), (50, (0, 0))],
}
"""(prompt tokens, tokens of each completion) of every group in a row."""
HEADS = {"Qwen2.5-VL": (28, 4, 128), "Qwen3-VL and Emu3": (32, 8, 128)}
TINY_HEADS = {"Qwen2.5-VL": (4, 2, 16), "Qwen3-VL and Emu3": (4, 2, 32)}
"""(query heads, key heads, width)."""


def relative_error(actual: torch.Tensor, true: torch.Tensor) -> float:
    """|actual - true| / |true|, Euclidean."""
    true = true.detach().double()
    return float((actual.detach().to(true) - true).norm() / true.norm())


def groups_of(layout: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[PackedGroup, ...]:
    """The groups of a packed row, one after the other."""
    groups, start = [], 0
    for prompt_len, completion_lens in layout:
        groups.append(PackedGroup(start, prompt_len, completion_lens))
        start += prompt_len + sum(completion_lens)
    return tuple(groups)


def visible(groups: Sequence[PackedGroup]) -> torch.Tensor:
    """[S, S] bool: whether token i sees token j, by definition: itself, earlier tokens of its own
    segment (prompt or completion), and its group's prompt."""
    segments = [
        (number, g)
        for number, group in enumerate(groups)
        for g, length in enumerate([group.prompt_len, *group.completion_lens])
        for _ in range(length)
    ]
    group_S, segment_S = torch.tensor(segments).unbind(1)
    together = group_S[:, None] == group_S
    earlier = torch.ones(len(segments), len(segments), dtype=torch.bool).tril()
    own_or_prompt = (segment_S[:, None] == segment_S) | (segment_S == 0)
    return together & earlier & own_or_prompt


def attention_errors(
    kernel: Kernel,
    groups: tuple[PackedGroup, ...],
    heads: tuple[int, int, int],
    device: str,
    dtype: str,
) -> tuple[dict[str, float], list[str]]:
    """(relative errors of the result and the three gradients against float64 with a dense mask,
    a message per problem). `heads`: (of queries, of keys, width)."""
    num_heads, num_key_heads, width = heads
    generator = torch.Generator(device).manual_seed(0)
    mask_SS = visible(groups).to(device)

    def random_heads(num: int) -> torch.Tensor:
        tensor = torch.randn(1, num, len(mask_SS), width, generator=generator, device=device)
        return tensor.to(getattr(torch, dtype))

    inputs = [
        random_heads(num).requires_grad_() for num in (num_heads, num_key_heads, num_key_heads)
    ]
    grad_out = random_heads(num_heads).transpose(1, 2)
    query, key, value = inputs
    out, _ = attention(None, query, key, value, None, packing=Packing(groups, kernel))
    actual = [out, *torch.autograd.grad(out, inputs, grad_out)]

    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    # In float64 a GPU computes it by its definition: it has no fused kernel.
    query, key, value = doubles
    dense = scaled_dot_product_attention(query, key, value, mask_SS, enable_gqa=True)
    dense = dense.transpose(1, 2)
    true = [dense, *torch.autograd.grad(dense, doubles, grad_out.double())]
    names = ("result", "query's gradient", "key's gradient", "value's gradient")
    errors, problems = {}, []
    for name, a, b in zip(names, actual, true, strict=True):
        errors[name] = relative_error(a, b)
        b = b.detach()
        scale = float((a.detach().double() * b).sum() / (b * b).sum())
        if not (errors[name] <= LARGEST_ERROR[dtype] and abs(scale - 1) <= LARGEST_BIAS[dtype]):
            problems.append(f"{name} has a relative error of {errors[name]:.2g}, scale {scale:.4f}")
    return errors, problems


def kernels(setup: Setup) -> Iterator[Line]:
    """Checks each kernel of `policy.attn_implementation` with the heads of each policy, then that a
    whole policy computes with it."""
    key = "policy.attn_implementation"
    layouts = LAYOUTS | {"a long group": [(400, (64,) * 8)]}
    auto = choose_kernel("auto", setup.device, getattr(torch, setup.dtype))
    for name, kernel in (("auto", auto), ("sdpa", PLAIN)):
        for policy, heads in (TINY_HEADS if setup.tiny else HEADS).items():
            worst, wrong = 0.0, []
            for row, layout in layouts.items():
                groups = groups_of(layout)
                errors, faults = attention_errors(kernel, groups, heads, setup.device, setup.dtype)
                worst = max(worst, *errors.values())
                wrong += [f"in {row} the {fault}" for fault in faults]
            other = "sdpa" if name == "auto" else "auto"
            note = (wrong or [f"error {worst:.0e}, limit {LARGEST_ERROR[setup.dtype]:g}"])[0]
            what = f"packed attention ({name}) of {policy}"
            yield result(what, not wrong, note, f"set {key}={other}", {key: other})
    fast, plain, true = policy_outcomes(setup)
    for what in true:
        error, unavoidable = (relative_error(x[what], true[what]) for x in (fast, plain))
        good = error <= WORSE_BY * unavoidable + 1e-5
        note = f"error {error:.0e}, with plain attention {unavoidable:.0e}"
        yield result(f"a policy's {what}", good, note, f"set {key}=sdpa", {key: "sdpa"})


def policy_outcomes(setup: Setup) -> list[dict[str, torch.Tensor]]:
    """[with the chosen kernel, with the plain one, with that in float32]: what the quickstart's
    policy gives for two groups in a row, and the gradient of all its log-probs."""
    weights: dict[str, torch.Tensor] = {}
    outcomes = []
    for dtype, kernel in ((setup.dtype, "auto"), (setup.dtype, "sdpa"), ("float32", "sdpa")):
        words = [f"policy.dtype={dtype}", f"policy.attn_implementation={kernel}"]
        resolved = resolved_for(setup, "quickstart", *words, "engine.type=transformers")
        policy: Any = build.build_policy(resolved, Dist.from_env(setup.device))
        if not weights:
            move(policy.module)  # a new adapter's B is 0, and A then has no gradient
            weights = policy.module.state_dict()
        policy.module.load_state_dict(weights)
        samples = first_samples(build.build_data(resolved, resolved.train), 2)
        rows = [
            (policy.build_prompt(sample), [20 + 7 * index + g + t for t in range(5 + g)])
            for index, sample in enumerate(samples)
            for g in range(4)
        ]
        outputs = policy.module(policy.collate(rows))
        trained = list(trainable_parameters(policy.module).values())
        grads = torch.autograd.grad(outputs.logprobs.sum(), trained)
        named = {"log-probs": outputs.logprobs, "states": outputs.hidden}
        outcomes.append({**named, "gradient": torch.cat([grad.flatten() for grad in grads])})
    return outcomes


# ---- gpu renderers -------------------------------------------------------------------------------
# Step `renderers`: the renderers' models against float64 on the CPU.

LARGEST_MODEL_ERROR = {"bfloat16": 0.05, "float32": 1e-4}
"""Relative, of a whole small model: rounding adds up over its layers."""
LARGEST_FP8_ERROR = 0.04
Forward = Callable[[], torch.Tensor]
"""One denoising step."""


def small_parts(setup: Setup, name: str) -> Any:
    """The renderer's models of the shipped small config, on the device."""
    renderer: Any = build.build_renderer(resolved_for(setup, name), Dist.from_env(setup.device))
    return renderer.loop.parts


def drawn(like: Any, *shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every device and in every dtype."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.bfloat16().to(like.device, like.dtype)


def edit_step(transformer: Any, side: int, text_lens: Sequence[int]) -> Forward:
    """A function that computes one step for rows of a drawn picture and a source, each side x side
    tokens."""
    config, denoiser = transformer.config, qwen_image_denoiser.Denoiser(transformer)
    states = [drawn(transformer, n, config.joint_attention_dim, seed=n) for n in text_lens]
    sources, latents = (
        drawn(transformer, len(text_lens), side**2, config.in_channels, seed=seed)
        for seed in (1, 2)
    )
    given = denoiser.prepare(states, sources, [(1, side, side)] * 2)
    modulation = build_table(transformer, torch.tensor([800.0]))[0].to(transformer.device)
    return lambda: denoiser.velocity(latents, given, modulation)


def step_21(
    transformer: Any, side: int, text_lens: Sequence[int], num_shown: tuple[int, int] = (2, 1)
) -> Forward:
    """As `edit_step`. All rows but the last are one group, which is drawn first. `num_shown`: its
    source pictures, and the last row's."""
    is_double = transformer.dtype == torch.float64
    device, config = str(transformer.device), transformer.config
    kernel = choose_kernel("auto", device, transformer.dtype)
    denoiser = qwen_image_21_loop.Denoiser(transformer, CPU if is_double else kernel)
    slots = max(1, side**2 // TOKENS_PER_SLOT)

    def row(length: int, num_sources: int) -> Row:
        # Three text tokens before the first picture, two before every other; the place as digest.
        pictures = [
            (range(at, at + slots), drawn(transformer, side**2, config.in_channels, seed=at))
            for at in range(3, 3 + num_sources * (slots + 2), slots + 2)
        ]
        shown = [
            PromptImage(place, x, (side, side), str(place[0]).encode()) for place, x in pictures
        ]
        start = drawn(transformer, pictures[-1][0].stop, config.context_in_dim, seed=num_sources)
        words = drawn(transformer, length, config.context_in_dim, seed=length)
        return Row(torch.cat([start, words]), tuple(shown))

    first, last = num_shown
    groups = [[row(length, first) for length in text_lens[:-1]], [row(text_lens[-1], last)]]
    given = [denoiser.prepare(group, (side, side)) for group in groups if group]
    latents = drawn(transformer, len(text_lens), side**2, config.in_channels)
    parts = latents.split([len(part.text_lens) for part in given])
    timestep = torch.tensor(800.0, device=device)
    return lambda: torch.cat(
        [denoiser.velocity(x, part, timestep) for x, part in zip(parts, given, strict=True)]
    )


@torch.no_grad()
def renderers(setup: Setup) -> Iterator[Line]:
    """Each model against float64 or diffusers' own, then the storage of weights in fp8."""
    limit = LARGEST_MODEL_ERROR[setup.dtype]
    parts = small_parts(setup, "quickstart")
    errors = {
        f"VAE {name}, 2-D against 3-D": e for name, e in _vae_errors(setup, parts.vae).items()
    }
    for name, transformer, step in (
        ("Edit", parts.transformer, edit_step),
        ("Qwen-Image-2.1", small_parts(setup, "tiny_qwen_image_21").transformer, step_21),
    ):
        true = step(copy.deepcopy(transformer).cpu().double(), 4, (9, 14, 14))()
        found = step(transformer, 4, (9, 14, 14))()
        errors[f"denoiser of {name}"] = relative_error(found.cpu(), true)
    for what, error in errors.items():
        fix = "install requirements.lock into a new .venv; if that does not help, report an issue"
        yield result(what, error <= limit, f"error {error:.0e}, limit {limit:g}", fix)
    # The device rounds to 8 bits as the CPU does, bit for bit.
    layer = torch.nn.Linear(256, 64, dtype=getattr(torch, setup.dtype))
    expected = Fp8Linear(copy.deepcopy(layer)).weight.view(torch.uint8)
    rounded = Fp8Linear(layer.to(setup.device))
    same = torch.equal(rounded.weight.cpu().view(torch.uint8), expected)
    tokens = drawn(layer.weight, 32, 256)
    error = relative_error(rounded(tokens), layer(tokens))
    bits = "bits as on the CPU" if same else "bits not as on the CPU"
    note = f"{bits}, error {error:.0e}, limit {LARGEST_FP8_ERROR:g}"
    good = same and error <= LARGEST_FP8_ERROR
    yield result("fp8 storage", good, note, "set renderer.fp8=off", {"renderer.fp8": "off"})


def _vae_errors(setup: Setup, vae: Any) -> dict[str, float]:
    """The quickstart's VAE against diffusers' own in float64 on the CPU."""
    origin = qwen_image_loop.origin_of(resolved_for(setup, "quickstart").renderer.config)
    dtype = getattr(torch, setup.dtype)
    loop: Any = qwen_image_loop  # its `stock`: diffusers, which it imports when used
    stock_class = loop.stock.AutoencoderKLQwenImage
    stock = stock_class.from_pretrained(subfolder="vae", torch_dtype=dtype, **origin)
    stock, mean, std = (x.cpu().double() for x in (stock, vae.mean, vae.std))
    pixels = drawn(vae.mean, 2, 3, 32, 48).clamp(-1, 1)
    latents = drawn(vae.mean, 2, mean.shape[1], 4, 6)
    mode = stock.encode(pixels.cpu().double().unsqueeze(2)).latent_dist.mode().squeeze(2)
    decoded = stock.decode((latents.cpu().double() * std + mean).unsqueeze(2)).sample.squeeze(2)
    return {
        "encoder": relative_error(vae.encode(pixels).cpu(), (mode - mean) / std),
        "decoder": relative_error(vae.decode(latents).cpu(), decoded.clamp(-1, 1)),
    }
