"""The fingerprint of exported weights, where a large matrix is hashed by sums of its bits."""

from collections.abc import Callable

import pytest
import torch

from rl.policies import _adapters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda w: w[3, 5].copy_(w[3, 5] * 1.01), id="one value"),
        pytest.param(lambda w: w.copy_(w.roll(1, dims=0)), id="rows in other places"),
        pytest.param(lambda w: w.copy_(w.flip(1)), id="columns in other places"),
        pytest.param(lambda w: w[7].neg_(), id="signs alone"),
    ],
)
def test_a_large_matrix_has_another_fingerprint_exactly_when_it_changed(
    dtype: torch.dtype,
    change: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_adapters, "NUM_HASHED_WHOLE", 8)
    weights = {"w": torch.randn(9, 7, generator=torch.Generator().manual_seed(0)).to(dtype)}
    first = _adapters.fingerprint(weights)
    assert _adapters.fingerprint({"w": weights["w"].clone()}) == first
    change(weights["w"])
    assert _adapters.fingerprint(weights) != first


def test_an_adapter_is_hashed_whole_and_a_large_matrix_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_hashed: list[int] = []
    whole = _adapters._bytes

    def counted(tensor: torch.Tensor) -> bytes:
        num_hashed.append(tensor.numel())
        return whole(tensor)

    monkeypatch.setattr(_adapters, "_bytes", counted)
    large = torch.zeros(2049, 2048, dtype=torch.bfloat16)
    _adapters.fingerprint({"a": torch.zeros(64, 4096), "b": large})
    assert num_hashed == [64 * 4096, 2048, 2049]
