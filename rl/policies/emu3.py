"""Policy plugin: Emu3, which reads a picture as tokens and writes words and a picture."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from rl.api.data import RowCheck
from rl.api.plugin import ModelFiles
from rl.api.policy import LoraSection, PolicySetup
from rl.api.types import (
    Action,
    ImageVocabulary,
    Prompt,
    PromptTemplate,
    Row,
    Sample,
    TokenBatch,
    TokenOutputs,
    UnusableSampleError,
)
from rl.config.schema import MAX_TOKENS, RunConfig
from rl.policies import prompting
from rl.policies.policy_base import (
    TEXT_FILES,
    TrainedPolicy,
    TrainedPolicyConfig,
    folder_here,
    link_files,
    local_folder,
)
from rl.progress import weights_counted

if TYPE_CHECKING:
    import numpy as np

# ---- emu3 prompts --------------------------------------------------------------------------------
# Converts Emu3's prompts and completions to and from token ids, without weights.

BOS, EOS = "<|extra_203|>", "<|extra_204|>"
END_OF_ROW, END_OF_FRAME = "<|extra_200|>", "<|extra_201|>"
IMAGE, IMAGE_START, IMAGE_END = "<|image token|>", "<|image start|>", "<|image end|>"
VISUAL = "<|visual token {:06d}|>"
_SIZE_AT_END = re.compile(r"\d+\*\d+$")


def find_vocabulary(tokenizer: Any) -> ImageVocabulary:
    """Find the ids by the tokens' texts.

    Raises ValueError when a token is missing, or when the visual tokens are not the last ids, in
    the order of their codes.
    """
    id_of: dict[str, int] = tokenizer.get_vocab()
    names = (BOS, EOS, END_OF_ROW, END_OF_FRAME, IMAGE, IMAGE_START, IMAGE_END, VISUAL.format(0))
    missing = [name for name in names if name not in id_of]
    if missing:
        raise ValueError(
            f"policy.tokenizer_path: not an Emu3 tokenizer, it lacks {', '.join(missing)}; use "
            "that of BAAI/Emu3-Stage1 or BAAI/Emu3-Gen"
        )
    start, end = id_of[VISUAL.format(0)], max(id_of.values()) + 1
    for code, token_id in enumerate(range(start, end)):
        if id_of.get(VISUAL.format(code)) != token_id:
            raise ValueError(
                f"policy.tokenizer_path: id {token_id} should be {VISUAL.format(code)!r}: the "
                "visual tokens must be the vocabulary's last ids, one after the other"
            )
    return ImageVocabulary(
        image=id_of[IMAGE],
        end_of_row=id_of[END_OF_ROW],
        end_of_frame=id_of[END_OF_FRAME],
        end_of_image=id_of[IMAGE_END],
        end_of_sequence=id_of[EOS],
        visual_start=start,
        visual_end=end,
    )


class Emu3Prompts:
    """A prompt is: beginning token, the source picture's tokens, instruction, prefill."""

    def __init__(self, tokenizer: Any, prefill: str, max_prompt_tokens: int) -> None:
        """`prefill`: the prompt's last text, which every completion continues. `{height}` and
        `{width}` become the source's rows and columns of codes; special tokens stay special."""
        self.tokenizer = tokenizer
        self.vocabulary = find_vocabulary(tokenizer)
        self._prefill = prefill
        self._max_prompt_tokens = max_prompt_tokens

    def prompt(self, sample: Sample, max_completion_tokens: float = math.inf) -> Prompt:
        """Raises UnusableSampleError naming the sample when its codes are missing or have no
        tokens, when there are several pictures, when the prompt is too long, or when a picture of
        the source's grid needs more tokens than a completion may have."""
        prompting.sources_of(sample, 1)
        if sample.source_codes is None:
            raise UnusableSampleError(
                f"sample {sample.id!r} has no source_codes, and Emu3 reads its picture as codes: "
                "tokenise the data with rl prepare"
            )
        codes = sample.source_codes
        try:
            picture = self.picture_ids(codes)
        except ValueError as error:
            raise UnusableSampleError(
                f"the source picture of sample {sample.id!r}: {error}"
            ) from error
        height, width = codes.shape
        prefill = self._filled_prefill(height, width)
        template = PromptTemplate("{instruction}" + prefill)
        text_ids = prompting.tokenize(self.tokenizer, template, sample.instruction)
        ids = (*prompting.ids_of(self.tokenizer, BOS), *picture, *text_ids)
        if len(ids) > self._max_prompt_tokens:
            raise UnusableSampleError(
                f"the prompt of sample {sample.id!r} has {len(ids)} tokens ({len(picture)} of them "
                f"for pictures), more than policy.max_prompt_tokens = {self._max_prompt_tokens}: "
                "raise it, or drop the sample"
            )
        shortest = len(self.picture_completion(codes))
        if shortest > max_completion_tokens:
            raise UnusableSampleError(
                f"a picture of {height} x {width} codes, as sample {sample.id!r} asks for, takes "
                f"{shortest} tokens, more than sampling.max_completion_tokens = "
                f"{max_completion_tokens}: raise it, or drop the sample"
            )
        return Prompt(sample=sample, token_ids=ids, grid=(height, width))

    def _filled_prefill(self, height: int, width: int) -> str:
        return self._prefill.replace("{height}", str(height)).replace("{width}", str(width))

    def picture_ids(self, codes: np.ndarray) -> list[int]:
        """Ids of the picture `codes` [h, w]: image start, 'h*w', image token, h rows of w visual
        tokens that each end with end-of-row, end-of-frame, image end; 32 x 32 codes are 1,065
        tokens. Raises ValueError if a code has no token."""
        vocabulary = self.vocabulary
        num_codes = vocabulary.visual_end - vocabulary.visual_start
        if codes.ndim != 2 or codes.size == 0 or codes.min() < 0 or codes.max() >= num_codes:
            spread = f"{codes.min()}..{codes.max()}" if codes.size else "none"
            raise ValueError(
                f"codes must be [h, w] from 0 to {num_codes - 1}, the tokenizer's visual tokens; "
                f"given shape {codes.shape}, codes {spread}"
            )
        height, width = codes.shape
        ids = prompting.ids_of(self.tokenizer, f"{IMAGE_START}{height}*{width}{IMAGE}")
        for row in (codes.astype("int64") + vocabulary.visual_start).tolist():
            ids += [*row, vocabulary.end_of_row]
        return [*ids, vocabulary.end_of_frame, vocabulary.end_of_image]

    def completion_ids(self, text: str) -> tuple[int, ...]:
        """Ids of `text` and the stop token."""
        return (*prompting.plain_ids(self.tokenizer, text), self.vocabulary.end_of_sequence)

    def picture_completion(self, codes: np.ndarray, thought: str = "") -> tuple[int, ...]:
        """Ids of `thought`, the picture and the stop token, as the policy would write them:
        without the part of the picture that the prefill already contains."""
        height, width = codes.shape
        picture = self.picture_ids(codes)
        prefill_ids = prompting.ids_of(self.tokenizer, self._filled_prefill(height, width))
        lengths = range(min(len(prefill_ids), len(picture)), 0, -1)
        num_shared = next((n for n in lengths if prefill_ids[-n:] == picture[:n]), 0)
        thought_ids = prompting.plain_ids(self.tokenizer, thought) if thought else []
        return (*thought_ids, *picture[num_shared:], self.vocabulary.end_of_sequence)

    def action(self, prompt: Prompt, token_ids: Sequence[int]) -> Action:
        """The completion's picture as [h, w] int32 codes, or why there is none."""
        assert prompt.sample.source_codes is not None, "the prompt was built from them"
        height, width = prompt.sample.source_codes.shape
        ids, picture, ids_after = read_picture(token_ids, (height, width), self.vocabulary)
        before, after = self._text(ids), self._text(ids_after)
        if isinstance(picture, str):
            return Action(" ".join(filter(None, (before, after))), None, picture)
        before = _SIZE_AT_END.sub("", before).rstrip()
        thought = f"{before} " if before else ""
        drawn = " ".join(filter(None, (f"[image {height}x{width}]", after)))
        return Action(thought + drawn, picture, None, thought, len(ids) if before else 0)

    def _text(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text.strip()


def read_picture(
    token_ids: Sequence[int], grid: tuple[int, int], vocabulary: ImageVocabulary
) -> tuple[list[int], np.ndarray | str, list[int]]:
    """(ids before the image token, all ids if there is none; the first picture as [h, w] int32
    codes, or why it does not fit `grid` (rows, columns), which starts with a stable word; ids after
    the picture)."""
    import numpy as np

    ids = list(token_ids)
    if not ids or ids == [vocabulary.end_of_sequence]:
        return ids, "empty: the completion holds no tokens", []
    if vocabulary.image not in ids:
        return ids, "no image token: the completion holds words alone", []
    height, width = grid
    start = ids.index(vocabulary.image) + 1
    end = start + height * (width + 1)
    before, drawn, after = ids[: start - 1], ids[start:end], ids[end:]
    if len(drawn) < end - start - 1:  # the last end of a row may be missing
        row = min(drawn.count(vocabulary.end_of_row) + 1, height)
        return before, f"cut off: the completion ends in row {row} of {height}", after
    drawn = [*drawn, vocabulary.end_of_row][: end - start]
    rows = np.array(drawn, dtype=np.int32).reshape(height, width + 1)
    codes = rows[:, :-1] - np.int32(vocabulary.visual_start)
    num_codes = vocabulary.visual_end - vocabulary.visual_start
    are_codes = (codes >= 0).all() and (codes < num_codes).all()
    if are_codes and (rows[:, -1] == vocabulary.end_of_row).all():
        return before, codes, after
    return before, f"grid: not {height} rows of {width} visual tokens and an end of row", after


# ---- emu3 loading --------------------------------------------------------------------------------
# The keys of `policy: { type: 'emu3' }`; loads an Emu3 in transformers' or in BAAI's format.

TEXT_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{i}|>" for i in range(205)),
)
"""Special tokens whose ids are between the byte pairs' and those of `VISION_FILE`."""
TIKTOKEN_FILE, VISION_FILE = "emu3.tiktoken", "emu3_vision_tokens.txt"
TOKENIZER_FILES = (("tokenizer.json", TIKTOKEN_FILE),)
TEXT_MODEL, PUBLISHED_MODEL = "emu3_text_model", "Emu3"
"""`model_type` of transformers' and of BAAI's configs."""


class Config(TrainedPolicyConfig):
    """The policy section."""

    model_path: str
    """Folder or hub id of the weights: BAAI/Emu3-Gen, BAAI/Emu3-Stage1, or tuned from them."""
    tokenizer_path: str = ""
    """Folder or hub id of the tokenizer; '' = model_path."""
    assistant_prefill: str = "<|image start|>"
    """Text before every completion. '<|image start|>': a picture at once. " Let's think step by
    step. <|start thinking|>": words first. '': the model decides. Special tokens written here are
    special; `{height}` and `{width}` stand for the source's rows and columns of codes."""
    lora: LoraSection | None = None
    """The LoRA adapter that is trained; null = full fine-tuning."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 1536
    """Longest prompt, picture included (32 x 32 codes are 1,065 tokens); a longer one is a bad row
    (`data.on_bad_row`)."""

    @property
    def tokenizer(self) -> tuple[str, str | None]:
        """(its folder or hub id, its revision)."""
        if self.tokenizer_path:
            return self.tokenizer_path, None
        return self.model_path, self.revision


def load_tokenizer(config: Config) -> Any:
    """Load `tokenizer.json` or BAAI's tiktoken vocabulary. Raises ValueError without either."""
    from transformers import PreTrainedTokenizerFast

    path, revision = config.tokenizer
    folder = local_folder(path, revision, TEXT_FILES)
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder)  # nosec B615 # a local folder
    if (folder / TIKTOKEN_FILE).is_file() and (folder / VISION_FILE).is_file():
        return PreTrainedTokenizerFast(
            tokenizer_object=_read_tiktoken(folder),
            bos_token="<|extra_203|>",
            eos_token="<|extra_204|>",
            pad_token="<|endoftext|>",
            clean_up_tokenization_spaces=False,
        )
    raise ValueError(
        f"policy.tokenizer_path: {path!r} holds neither tokenizer.json nor {TIKTOKEN_FILE} with "
        f"{VISION_FILE}; name the repository the model was trained with (BAAI/Emu3-Stage1)"
    )


def _read_tiktoken(folder: Path) -> Any:
    """A `tokenizers` tokenizer: byte-level BPE with Qwen's split pattern. Ids are in the order byte
    pairs, `TEXT_SPECIALS`, vision tokens."""
    from tokenizers import normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    class Converter(TikTokenConverter):
        """tiktoken's own reader caches by path, and would miss that a file has changed."""

        @staticmethod
        def load_tiktoken_bpe(path: str) -> dict[bytes, int]:
            lines = (line.split() for line in Path(path).read_bytes().split(b"\n"))
            return {base64.b64decode(token): int(rank) for token, rank in filter(None, lines)}

    vision = (folder / VISION_FILE).read_bytes().decode().split("\n")
    tokenizer = Converter(
        vocab_file=str(folder / TIKTOKEN_FILE),
        pattern=PRETOKENIZE_REGEX,
        extra_special_tokens=[*TEXT_SPECIALS, *(line.strip() for line in vision if line.strip())],
    ).converted()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def read_model_config(folder: Path) -> Any:
    """`Emu3TextConfig` of a model folder in either format, with dropout 0, because sampling runs
    without dropout."""
    from transformers import Emu3TextConfig

    stored = json.loads((folder / "config.json").read_text())
    names = {"rope_scaling", "rope_theta", *(field.name for field in fields(Emu3TextConfig))}
    config = Emu3TextConfig.from_dict({k: v for k, v in stored.items() if k in names})
    config.architectures = ["Emu3ForCausalLM"]
    config.attention_dropout = 0.0
    return config


def load_model(config: Config) -> Any:
    """`Emu3ForCausalLM` on the CPU, in the configured dtype, without an adapter. Both formats have
    the same weight names.

    Raises ValueError when the files lack weights.
    """
    import torch
    from transformers import Emu3ForCausalLM

    from rl.policies.attention import register

    folder = model_folder(config)
    with weights_counted():
        model, report = Emu3ForCausalLM.from_pretrained(  # nosec B615 # a local folder
            folder,
            config=read_model_config(folder),
            dtype=getattr(torch, config.dtype),
            attn_implementation=register(),
            use_safetensors=True,
            output_loading_info=True,
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(
            f"policy.model_path: {config.model_path!r} lacks {len(missing)} weights of an Emu3 "
            f"({missing[0]}, ...)"
        )
    return model


def model_folder(config: Config) -> Path:
    """The folder of weights and text files, downloaded if needed."""
    return local_folder(config.model_path, config.revision, [*TEXT_FILES, "*.safetensors"])


# ---- emu3 ----------------------------------------------------------------------------------------
# Policy plugin: Emu3, which reads a picture as tokens and writes words and a picture.


class Emu3(TrainedPolicy[Config]):
    """Emu3: reads a source picture as codebook indices and writes the edited one as [h, w] int32
    indices, after words if `assistant_prefill` asks for them."""

    model_types = frozenset({TEXT_MODEL, PUBLISHED_MODEL})
    model_classes = frozenset({"Emu3ForCausalLM"})
    emits = frozenset({"image_tokens"})
    needs = frozenset({"source_codes"})
    starts_as_stock = True
    loading = sys.modules[__name__]
    embedding = "model.embed_tokens.weight"

    prompts: Emu3Prompts

    def __init__(self, config: Config, setup: PolicySetup) -> None:
        from rl.policies.trained_module import SlicedHead, TrainedModule

        super().__init__(config, setup)
        self.prompts = self._prompts_of(config)
        vocabulary = self.prompts.vocabulary
        self.image_vocabulary = vocabulary
        self.stop_token_ids = (vocabulary.end_of_sequence,)
        model = load_model(config)
        self.state_dim = model.config.hidden_size
        vocab_size, num_tokens = model.config.vocab_size, vocabulary.visual_end
        if vocab_size < num_tokens:
            raise ValueError(
                f"policy.tokenizer_path: the tokenizer has {num_tokens} tokens, the model "
                f"{vocab_size}: they do not belong together"
            )
        model.lm_head = SlicedHead(model.lm_head.weight)
        self.vocabulary_slices = (0, vocabulary.visual_start, num_tokens)
        # Adapts layers only: an adapted head could not be projected slice by slice.
        self.module = TrainedModule(self._prepared(model, within=r".*\.layers\..*"), self)

    @staticmethod
    def _prompts_of(config: Config) -> Emu3Prompts:
        return Emu3Prompts(
            load_tokenizer(config), config.assistant_prefill, config.max_prompt_tokens
        )

    @classmethod
    def row_check(
        cls, config: Config, template: PromptTemplate | None, max_completion_tokens: int
    ) -> RowCheck:
        """Builds each prompt, if the tokenizer's files are here."""

        @cache
        def prompts() -> Emu3Prompts | None:
            folder = folder_here(*config.tokenizer, TOKENIZER_FILES)
            here = config.model_copy(update={"tokenizer_path": str(folder)})
            return None if folder is None else cls._prompts_of(here)

        def check(identity: str, instruction: str, sizes: object, codes: np.ndarray | None) -> bool:
            if (builder := prompts()) is None:
                return False
            sample = Sample(identity, instruction, source_codes=codes)
            builder.prompt(sample, max_completion_tokens)
            return True

        return check

    @classmethod
    def models(cls, config: Config) -> Sequence[ModelFiles]:
        weights = ModelFiles(
            "model_path", config.model_path, cls.model_types, revision=config.revision
        )
        if not config.tokenizer_path:
            return [replace(weights, files=TOKENIZER_FILES)]
        tokenizer = ModelFiles(
            "tokenizer_path",
            config.tokenizer_path,
            config_required=False,
            weights=(),
            files=TOKENIZER_FILES,
        )
        return [weights, tokenizer]

    @classmethod
    def problems(cls, config: Config, run: RunConfig) -> Iterator[str]:
        yield from super().problems(config, run)
        if "<|image token|>" in config.assistant_prefill:
            yield (
                "assistant_prefill: contains '<|image token|>', which starts the picture's rows "
                "before sampling is constrained; end the prefill before it"
            )

    def engine_folder(self) -> str:
        """A folder of links to the weights, with config and tokenizer files in transformers'
        format: an engine loads it without remote code."""
        overlay = Path(self._overlay.name)
        if not (overlay / "config.json").exists():
            folder = model_folder(self.config)
            read_model_config(folder).to_json_file(overlay / "config.json")
            self.prompts.tokenizer.save_pretrained(overlay)
            link_files(folder, overlay, skip=(".py", ".bin", "token"))
        return str(overlay)

    def build_prompt(self, sample: Sample) -> Prompt:
        return self.prompts.prompt(sample, self.setup.max_completion_tokens)

    def _model_inputs(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> Mapping[str, Any]:
        """`forced` [B, C] bool on the CPU, True for tokens without a choice."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        from rl.api.image_grammar import forced_tokens

        vocabulary = self.prompts.vocabulary
        forced_B = [
            torch.tensor(forced_tokens(ids, prompt.grid, vocabulary), dtype=torch.bool)
            for prompt, ids in rows
            if prompt.grid is not None
        ]
        return {"forced": pad_sequence(forced_B, batch_first=True)}

    def decode_actions(
        self, rows: Sequence[Row], batch: TokenBatch | None, outputs: TokenOutputs | None
    ) -> list[Action]:
        return [self.prompts.action(prompt, token_ids) for prompt, token_ids in rows]
