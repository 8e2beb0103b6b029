"""The chunked loss against torch's cross-entropy over full logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.optimizer import IGNORED, chunked_cross_entropy


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(2, 37, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 16, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 50, (2, 37))
    labels[0, :5] = IGNORED
    labels[1, 20] = IGNORED
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [1, 7, 37, 74, 1000])
def test_loss_and_gradients_equal_full_logits_at_any_chunk(chunk: int) -> None:
    hidden, weight, labels = case(torch.float32)
    total, per_token = chunked_cross_entropy(hidden, weight, labels, chunk)
    (total / 60).backward()
    wide_hidden, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = wide_hidden @ wide_weight.t()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    (expected.sum() / 60).backward()
    # 50-term sums in fp32 against fp64.
    torch.testing.assert_close(per_token.double(), expected.view(2, 37), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total.double(), expected.sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad.double(), wide_hidden.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad.double(), wide_weight.grad, rtol=1e-5, atol=1e-6)


def test_a_shard_of_ignored_tokens_alone_gives_zero_loss_and_gradients() -> None:
    hidden, weight, labels = case(torch.float32)
    total, per_token = chunked_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED), 8)
    total.backward()
    assert total.item() == 0
    assert not per_token.any()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_without_gradients_the_loss_is_the_same() -> None:
    hidden, weight, labels = case(torch.float32)
    with torch.no_grad():
        total, per_token = chunked_cross_entropy(hidden, weight, labels, 8)
    expected, expected_per_token = chunked_cross_entropy(hidden, weight, labels, 8)
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(per_token, expected_per_token)


def test_bf16_gradients_come_in_bf16_and_close_to_fp64() -> None:
    hidden, weight, labels = case(torch.bfloat16)
    total, _ = chunked_cross_entropy(hidden, weight, labels, 8)
    (total / 68).backward()
    wide_hidden, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = wide_hidden @ wide_weight.t()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    (expected / 68).backward()
    for got, want in ((hidden.grad, wide_hidden.grad), (weight.grad, wide_weight.grad)):
        assert got.dtype == torch.bfloat16
        # bf16 keeps 8 bits: logits, their gradient and the product are each rounded once.
        assert ((got.double() - want).norm() / want.norm()).item() < 4 * 2**-8


def test_full_logits_never_exist() -> None:
    """The largest tensor made on the way holds one chunk's logits."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    largest = max(largest, leaf.numel())
            return result

    hidden = torch.randn(1, 512, 8, requires_grad=True)
    weight = torch.randn(1000, 8, requires_grad=True)
    with Watch():
        total, _ = chunked_cross_entropy(hidden, weight, torch.zeros(1, 512, dtype=torch.int64), 16)
        total.backward()
    assert largest <= 16 * 1000
