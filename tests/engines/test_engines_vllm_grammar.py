"""The two logits processors of the image grammar, called step by step without an engine."""

import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_image_writer import allowed_ids

from rl.api.types import ImageVocabulary
from rl.engines import vllm
from rl.engines import vllm as vllm_engine
from rl.engines.vllm_process import GRID, VOCABULARY

for name, value in vllm_engine.ENVIRONMENT.items():
    os.environ.setdefault(name, value)  # as the engine does, before the first import of vLLM

from vllm import SamplingParams  # noqa: E402
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState  # noqa: E402

from rl.engines.vllm_requests import V1Grammar, V2Grammar  # noqa: E402

EOL, EOF, EOI, EOS, IMAGE, START, END = 3, 4, 5, 6, 7, 10, 14
NUM_IDS = 15
FIELDS = {
    "image": IMAGE,
    "end_of_row": EOL,
    "end_of_frame": EOF,
    "end_of_image": EOI,
    "end_of_sequence": EOS,
    "visual_start": START,
    "visual_end": END,
}
CONFIG = SimpleNamespace(additional_config={VOCABULARY: FIELDS})
CPU = torch.device("cpu")
ALL = set(range(NUM_IDS))


def allowed_next(grid: tuple[int, int] | None, ids: list[int]) -> set[int]:
    """The ids that may come next, computed from the whole sequence as a list."""
    if grid is None:
        return ALL
    return set(allowed_ids([*ids, START], grid, ImageVocabulary(**FIELDS))[-1])


def open_ids(logits: torch.Tensor) -> list[set[int]]:
    return [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in logits]


def request_params(grid: tuple[int, int] | None) -> SamplingParams:
    return SamplingParams(extra_args=None if grid is None else {GRID: grid})


class Batch:
    """vLLM's persistent batch as its V1 runner keeps it: rows, and changes since the last step."""

    def __init__(self) -> None:
        self.processor = V1Grammar(CONFIG, CPU, False)
        self.rows: list[tuple[tuple[int, int] | None, list[int]]] = []

    def step(self, removed=(), added=(), moved=()) -> None:
        """Tells the processor what changed and checks its mask against `allowed_next`."""
        update = BatchUpdate(len(self.rows), removed, added, moved)
        self.processor.update_state(update if removed or added or moved else None)
        if self.rows:
            logits = self.processor.apply(torch.zeros(len(self.rows), NUM_IDS))
            assert open_ids(logits) == [allowed_next(*row) for row in self.rows]

    def write(self, *tokens: int) -> None:
        """Appends one sampled token per row to the list that the processor holds."""
        for (_, ids), token in zip(self.rows, tokens, strict=True):
            ids.append(token)

    def add(self, grid, ids=()) -> tuple:
        self.rows.append((grid, list(ids)))
        return (len(self.rows) - 1, request_params(grid), [1, 2], self.rows[-1][1])


def test_v1_masks_two_grids_and_an_unconstrained_row():
    batch = Batch()
    batch.step(added=[batch.add((1, 2)), batch.add(None), batch.add((2, 1))])
    for tokens in [
        (IMAGE, IMAGE, 1),
        (10, 12, 2),
        (11, EOS, IMAGE),
        (EOL, 0, 13),
        (EOF, 1, EOL),
        (EOI, 2, 10),
        (EOS, 3, EOL),
        (EOS, IMAGE, EOF),
    ]:
        batch.write(*tokens)
        batch.step()


def test_v1_follows_rows_that_leave_move_swap_and_return():
    batch = Batch()
    batch.step(added=[batch.add((1, 2)), batch.add((3, 1)), batch.add(None), batch.add((2, 2))])
    batch.write(IMAGE, 1, 2, IMAGE)
    batch.step()
    batch.write(10, IMAGE, IMAGE, 11)
    # Row 1 is preempted, the last row takes its place, then two rows swap.
    preempted = batch.rows[1]
    batch.rows = [batch.rows[2], batch.rows[3], batch.rows[0]]
    batch.step(
        removed=[1],
        moved=[(3, 1, MoveDirectionality.UNIDIRECTIONAL), (0, 2, MoveDirectionality.SWAP)],
    )
    batch.write(1, 12, 11)
    batch.step()
    # The request comes back with the tokens it had written, in a new list.
    batch.step(added=[batch.add(*preempted)])
    batch.write(3, EOL, EOL, 13)
    batch.step()
    # Unfinished prompts append nothing; asynchronous scheduling first appends a placeholder.
    batch.rows[2][1].append(-1)
    batch.processor.update_state(None)
    batch.rows[2][1][-1] = EOF
    batch.step()
    # An unconstrained request takes the row of a constrained one.
    batch.rows = []
    batch.step(removed=[1, 2, 3], added=[batch.add(None)])
    batch.write(IMAGE)
    batch.step()


class Slots:
    """The records of vLLM's V2 runner (token history, lengths) by slot; the runner needs Triton."""

    def __init__(self) -> None:
        self.prompt_len, self.prefill_len = torch.zeros(2, 6, dtype=torch.int32)
        self.ids = torch.full((6, 256), IMAGE, dtype=torch.int32)
        self.free = list(range(6))
        states = LogitsProcRequestState(
            device=CPU,
            max_num_reqs=6,
            vocab_size=NUM_IDS,
            all_token_ids=SimpleNamespace(gpu=self.ids),
            prompt_len=SimpleNamespace(gpu=self.prompt_len),
            prefill_len=SimpleNamespace(gpu=self.prefill_len),
            total_len=None,
        )
        self.processor = V2Grammar(CONFIG, states)
        self.requests: dict[int, tuple[tuple[int, int] | None, list[int], list[int]]] = {}

    def add(self, grid, prompt, written=()) -> None:
        """Adds a request to a slot that still holds another request's tokens."""
        slot = self.free.pop()
        tokens = [*prompt, *written]
        self.ids[slot, : len(tokens)] = torch.tensor(tokens)
        self.prompt_len[slot], self.prefill_len[slot] = len(prompt), len(tokens)
        assert self.processor.add_request(slot, request_params(grid)) == (grid is not None)
        self.requests[slot] = (grid, list(prompt), list(written))

    def step(self, order: list[int]) -> None:
        """One forward over the slots in `order`: checks its mask and draws a token for each."""
        self.processor.apply_staged_writes()
        sequences = [[*prompt, *written] for _, prompt, written in map(self.requests.get, order)]
        indices = torch.tensor(order, dtype=torch.int32)
        context = LogitsContext(
            expanded_idx_mapping=indices,
            idx_mapping=indices,
            idx_mapping_np=np.array(order, dtype=np.int64),
            expanded_local_pos=torch.zeros_like(indices),
            seq_lens_upper_bound_np=np.array([len(ids) for ids in sequences]),
            input_ids=torch.tensor([ids[-1] for ids in sequences], dtype=torch.int32),
            pos=torch.tensor([len(ids) - 1 for ids in sequences]),
        )
        logits = self.processor.apply(torch.zeros(len(order), NUM_IDS), context)
        for slot, allowed in zip(order, open_ids(logits), strict=True):
            grid, _, written = self.requests[slot]
            assert allowed == allowed_next(grid, written)
            likely = IMAGE in allowed and random.random() < 0.3
            written.append(IMAGE if likely else random.choice(sorted(allowed)))


def test_v2_follows_slots_that_are_reused_reordered_and_resumed():
    """Image tokens in the prompt (the source picture) do not start a grid."""
    random.seed(0)
    slots = Slots()
    prompt = [1, IMAGE, 10, EOL, 2]
    for round_ in range(40):
        while len(slots.requests) < 4:
            grid = random.choice([(1, 1), (2, 2), (1, 3), None])
            slots.add(grid, prompt[: 2 + round_ % 4])
        order = list(slots.requests)
        random.shuffle(order)
        for _ in range(random.randint(1, 4)):
            slots.step(order)
        slot = random.choice(order)
        slots.free.append(slot)
        request = slots.requests.pop(slot)
        if random.random() < 0.6:
            slots.add(*request)


@pytest.mark.parametrize(("uses_v2", "processor"), [(True, V2Grammar), (False, V1Grammar)])
def test_the_processor_fits_the_version_of_the_runner(uses_v2, processor, monkeypatch, tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    planned = SimpleNamespace(use_v2_model_runner=uses_v2)
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda *_: planned)
    vocabulary = ImageVocabulary(**FIELDS)
    arguments = vllm_engine.grammar_arguments(str(tmp_path), {"seed": 0}, vocabulary)
    assert arguments == {
        "logits_processors": [processor],
        "additional_config": {VOCABULARY: FIELDS},
    }


def test_a_model_that_vllm_does_not_know_is_named(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(architectures=["NobodyForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="NobodyForCausalLM"):
        vllm.register_in_process(str(tmp_path))


def test_emu3_is_registered_as_llama_and_llama_stays_what_it_was(tmp_path):
    from transformers import Emu3TextConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    Emu3TextConfig(architectures=["Emu3ForCausalLM"]).save_pretrained(tmp_path)
    before = ModelRegistry.models["LlamaForCausalLM"]
    vllm.register_in_process(str(tmp_path))
    vllm.register_in_process(str(tmp_path))
    assert ModelRegistry.models["Emu3ForCausalLM"].model_cls is LlamaForCausalLM
    assert ModelRegistry.models["LlamaForCausalLM"] is before
