"""Messages to workers: what arrives equals what was sent, and holds no class of the project."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tiny_pictures import make_picture

from rl.api.types import HiddenStates, RenderFailure, RenderJob, Sample
from rl.pool import pool_worker


def modules_in(pickled: bytes) -> set[str]:
    """Modules whose classes or functions a pickle names."""

    class Seen(pickle.Unpickler):
        found: set[str] = set()

        def find_class(self, module: str, name: str) -> Any:
            self.found.add(module.partition(".")[0])
            return super().find_class(module, name)

    seen = Seen(io.BytesIO(pickled))
    seen.load()
    return seen.found


def job_of(dtype: torch.dtype, negative: torch.Tensor | None) -> RenderJob:
    sample = Sample("a", "paint it", sources=(make_picture(0),), target=make_picture(1))
    embeds = torch.randn(5, 4, generator=torch.Generator().manual_seed(3)).to(dtype)
    return RenderJob(sample, HiddenStates(embeds, negative, (range(1, 3),)), 77)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_job_arrives_bit_for_bit(dtype: torch.dtype) -> None:
    negative = torch.ones(3, 4, dtype=dtype)
    job = job_of(dtype, negative)
    [found] = pool_worker.unpacked_jobs(pickle.loads(pickle.dumps(pool_worker.packed_jobs([job]))))
    assert torch.equal(found.payload.embeds, job.payload.embeds)
    assert torch.equal(found.payload.negative_embeds, negative)
    assert found.payload.embeds.dtype == dtype
    assert (found.payload.pictures, found.noise_seed) == ((range(1, 3),), 77)
    assert (found.sample.id, found.sample.instruction) == ("a", "paint it")
    assert found.sample.sources[0].tobytes() == job.sample.sources[0].tobytes()
    assert found.sample.target is None, "only rewards read it"


def test_codes_and_text_arrive_and_samples_keep_their_pictures() -> None:
    codes = np.arange(6, dtype=np.int32).reshape(2, 3)
    sample = Sample("b", "x", target=make_picture(2), source_codes=codes, category="c")
    jobs = [RenderJob(sample, "words", 1), RenderJob(sample, codes, 2)]
    text, grid = pool_worker.unpacked_jobs(pool_worker.packed_jobs(jobs))
    assert text.payload == "words" and np.array_equal(grid.payload, codes)
    [found] = pool_worker.unpacked_samples(pool_worker.packed_samples([sample]))
    assert found.target is not None and found.category == "c"
    assert found.target.tobytes() == make_picture(2).tobytes()
    assert np.array_equal(found.source_codes, codes)  # type: ignore[arg-type]


def test_what_a_group_shares_is_sent_once() -> None:
    negative = torch.ones(3, 4)
    group = [job_of(torch.float32, negative) for _ in range(8)]
    arrays = pool_worker.packed_jobs(group)["arrays"]
    assert len(arrays) == 8 + 1 + 1, "states of each, one source, one negative"


def test_a_message_names_no_class_of_the_project() -> None:
    message = pool_worker.packed_jobs([job_of(torch.bfloat16, None)])
    assert modules_in(pickle.dumps(message, protocol=5)) <= {"numpy", "_codecs"}
    outcomes = pool_worker.packed_outcomes(
        [make_picture(0), RenderFailure("too_long", "policy"), None]
    )
    assert modules_in(pickle.dumps(outcomes, protocol=5)) <= {"numpy", "_codecs"}
    picture, failure, nothing = map(pool_worker.unpacked_outcome, outcomes)
    assert picture.tobytes() == make_picture(0).tobytes()
    assert (failure, nothing) == (RenderFailure("too_long", "policy"), None)


def test_a_message_is_limited_and_other_payloads_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TypeError, match="payload of type dict"):
        pool_worker.packed_jobs([RenderJob(Sample("a", "x"), {}, 0)])
    monkeypatch.setattr(pool_worker, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match=r"lower renderer\.batch_size"):
        pool_worker.packed_jobs([job_of(torch.float32, None)])
