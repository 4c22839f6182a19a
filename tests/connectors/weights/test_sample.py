"""Which elements of tensors a sample has, and that it has them whatever the tensors are like."""

from __future__ import annotations

import pytest
import torch

from tiercache.connectors.weights.sample import ELEMENTS, WeightSample, elements, lattice

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("shape", [(4096, 4096), (1000, 64), (64, 1000), (11008, 4096), (32000, 128), (7,), (5000,)])
def test_a_sample_is_spread_over_the_whole_of_a_tensor(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.tensor(shape).prod().item()).reshape(shape)
    places = elements(tensor)
    assert places is not None
    count, _ = lattice(shape)
    assert len(places.unique()) == count >= min(ELEMENTS, tensor.numel())
    assert count <= 4 * ELEMENTS
    for part in range(8):  # each eighth of the rows, and of the columns
        assert (places * 8 // tensor.numel() == part).sum().item() >= count // 16
        if len(shape) == 2:
            assert ((places % shape[1]) * 8 // shape[1] == part).sum().item() >= count // 24


def test_each_expert_is_in_a_sample() -> None:
    tensor = torch.arange(128 * 96 * 64).reshape(128, 96, 64)
    places = elements(tensor)
    assert places is not None
    assert torch.bincount(places // (96 * 64)).min() >= 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.complex128])
@pytest.mark.parametrize("keep_views", [False, True])
def test_what_is_written_changes_a_sample(dtype: torch.dtype, keep_views: bool) -> None:
    first = torch.ones(600, 50).to(dtype)
    turned, sliced = torch.ones(50, 600).to(dtype).t(), torch.ones(100, 60).to(dtype)[:, 3:40]
    tensors = [("first", first), ("turned", turned), ("sliced", sliced), ("empty", torch.ones(0).to(dtype))]
    sample = WeightSample(keep_views=keep_views)
    digests = [sample.take(tensors).digest()]
    assert sample.take(tensors).digest() == digests[0]
    for tensor in (first, turned, sliced):
        tensor.data.copy_(torch.zeros(tensor.shape).to(dtype))
        digests.append(sample.take(tensors).digest())
    first.data = torch.ones(600, 50).to(dtype)
    digests.append(sample.take(tensors).digest())
    assert len(set(digests)) == 5
    assert not sample.unread


@pytest.mark.parametrize("keep_views", [False, True])
def test_a_tensor_that_has_no_memory_of_that_kind_is_named(keep_views: bool) -> None:
    sample = WeightSample(keep_views=keep_views)
    sample.take([("sparse", torch.ones(3, 3).to_sparse()), ("dense", torch.ones(3))])
    assert sample.unread == ["sparse"]
