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


def test_one_small_copy_comes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large matrix 8 bytes a row and a column; of a small one all it has."""
    num_bytes: list[int] = []
    to_host = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        num_bytes.append(tensor.numel() * tensor.element_size())
        return to_host(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    large = torch.zeros(2049, 2048, dtype=torch.bfloat16)
    _adapters.fingerprint({"a": torch.zeros(8, 128), "b": large})
    assert num_bytes == [8 * 128 * 4 + 8 * (2049 + 2048)]
