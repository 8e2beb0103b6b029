"""The chunked loss against torch's cross-entropy over full logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.ranks import RankPool
from torchtitan_cp.optimizer import IGNORED, VocabularyShard, chunked_cross_entropy, wrong_answers


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


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor that any operator makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf.numel() for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *leaves, 0)
        return result


def largest_tensor(tokens: int, weight: Tensor, vocabulary: VocabularyShard | None = None) -> int:
    hidden = torch.randn(1, tokens, 8, requires_grad=True)
    with LargestTensor() as largest:
        labels = torch.zeros(1, tokens, dtype=torch.int64)
        chunked_cross_entropy(hidden, weight, labels, 16, vocabulary=vocabulary)[0].backward()
        with torch.no_grad():
            chunked_cross_entropy(hidden, weight, labels, 16, vocabulary=vocabulary)
    return largest.elements


@pytest.mark.parametrize("tokens", [256, 1024])
def test_the_largest_tensor_holds_one_chunks_logits_at_any_length(tokens: int) -> None:
    assert largest_tensor(tokens, torch.randn(1000, 8, requires_grad=True)) == 16 * 1000


def test_z_loss_is_in_the_sum_and_the_gradients_and_not_in_the_losses_of_tokens() -> None:
    hidden, weight, labels = case(torch.float32)
    total, per_token = chunked_cross_entropy(hidden, weight, labels, 8, z_loss=0.01)
    total.backward()
    wide_hidden, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    pure, z = sums_over_full_logits(wide_hidden, wide_weight, labels)
    (pure + 0.01 * z).backward()
    torch.testing.assert_close(per_token.sum().double(), pure, rtol=1e-6, atol=0)
    torch.testing.assert_close(total.double(), pure + 0.01 * z, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad.double(), wide_hidden.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), wide_weight.grad, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy(hidden, weight, labels, 8, z_loss=0.01)[0], total.detach())


def sums_over_full_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and squared logsumexp, summed over the tokens that count."""
    logits = hidden @ weight.t()
    pure = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return pure, logits.logsumexp(-1).square()[labels != IGNORED].sum()


def test_ignored_tokens_of_any_size_give_no_nan() -> None:
    hidden, weight, labels = case(torch.float32)
    total, _ = chunked_cross_entropy(hidden * 1e4, weight, torch.full_like(labels, IGNORED), 8, z_loss=0.1)
    total.backward()
    assert total.item() == 0
    assert not hidden.grad.any()


def test_a_label_that_is_no_row_of_the_vocabulary_makes_the_loss_infinite() -> None:
    hidden, weight, labels = case(torch.float32)
    labels[0, 7] = 50
    assert chunked_cross_entropy(hidden, weight, labels, 8)[0].item() == torch.inf


@pytest.mark.parametrize("grad", [True, False])
def test_the_largest_logit_is_that_of_all_chunks_and_calls(grad: bool) -> None:
    hidden, weight, labels = case(torch.float32)
    largest = torch.tensor(-torch.inf)
    with torch.set_grad_enabled(grad):
        for scale in (3.0, 1.0):
            chunked_cross_entropy(hidden * scale, weight, labels, 8, largest_logit=largest)
        torch.testing.assert_close(largest, (3 * hidden @ weight.t()).max().detach())
        chunked_cross_entropy(hidden * torch.nan, weight, labels, 8, largest_logit=largest)
    assert largest.isnan()


SPLITS = {"even": (0, 25, 50), "uneven": (0, 7, 50), "one empty": (0, 50, 50), "four": (0, 20, 20, 21, 50)}


def run_shard(bounds: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Loss and gradients of this rank's rows; the hidden gradient summed as its gatherer would."""
    torch.manual_seed(0)
    hidden, weight, labels = case(dtype)
    rank = dist.get_rank()
    rows = weight[bounds[rank] : bounds[rank + 1]].detach().requires_grad_()
    shard = VocabularyShard(dist.group.WORLD, bounds[rank])
    total, per_token = chunked_cross_entropy(hidden, rows, labels, 8, vocabulary=shard, z_loss=0.01)
    total.backward()
    with torch.no_grad():
        again, per_token_again = chunked_cross_entropy(hidden, rows, labels, 8, vocabulary=shard, z_loss=0.01)
    torch.testing.assert_close(again, total.detach())
    assert torch.equal(per_token, per_token_again)
    part = hidden.grad.float()
    dist.all_reduce(part)
    return total.detach(), per_token, part, rows.grad


@pytest.mark.parametrize("bounds", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vocabulary_parallel_equals_one_process(
    ranks: Callable[[int], RankPool], bounds: tuple[int, ...], dtype: torch.dtype
) -> None:
    results = ranks(len(bounds) - 1)(run_shard, bounds, dtype)
    hidden, weight, labels = (x.detach() for x in case(dtype))
    wide_hidden, wide_weight = (x.double().requires_grad_() for x in (hidden, weight))
    pure, z = sums_over_full_logits(wide_hidden, wide_weight, labels)
    (pure + 0.01 * z).backward()
    exact = dtype == torch.float32
    for total, per_token, d_hidden, _ in results:
        assert torch.equal(total, results[0][0])
        assert torch.equal(per_token, results[0][1])
        assert total.item() == pytest.approx((pure + 0.01 * z).item(), rel=1e-6 if exact else 2**-8)
        assert per_token.sum().item() == pytest.approx(pure.item(), rel=1e-6 if exact else 2**-8)
        # bf16 rounds the logits, their gradient and each rank's part: 8 bits each.
        assert ((d_hidden.double() - wide_hidden.grad).norm() / wide_hidden.grad.norm()) < (
            1e-6 if exact else 4 * 2**-8
        )
    d_weight = torch.cat([result[3] for result in results])
    assert d_weight.dtype == dtype
    assert ((d_weight.double() - wide_weight.grad).norm() / wide_weight.grad.norm()) < (1e-6 if exact else 4 * 2**-8)


def asked() -> tuple[Tensor, Tensor, Tensor]:
    """Labels of which the likeliest token is some, in the first row none but those that are ignored."""
    hidden, weight, labels = (x.detach() for x in case(torch.float32))
    likeliest = (hidden.double() @ weight.double().t()).argmax(-1)
    labels = torch.where(torch.arange(37) % 3 == 0, likeliest, labels)
    labels[0] = torch.where(torch.arange(37) % 2 == 0, IGNORED, likeliest[0])
    return hidden, weight, labels


def wrong_in_a_shard(bounds: tuple[int, ...]) -> Tensor:
    torch.manual_seed(0)
    hidden, weight, labels = asked()
    rank = dist.get_rank()
    shard = VocabularyShard(dist.group.WORLD, bounds[rank])
    return wrong_answers(hidden, weight[bounds[rank] : bounds[rank + 1]], labels, shard)


@pytest.mark.parametrize("bounds", SPLITS.values(), ids=SPLITS)
def test_wrong_answers_are_counted_by_row_whoever_holds_the_likeliest_token(
    ranks: Callable[[int], RankPool], bounds: tuple[int, ...]
) -> None:
    hidden, weight, labels = asked()
    expected = ((hidden.double() @ weight.double().t()).argmax(-1) != labels) & (labels != IGNORED)
    assert expected[0].sum() == 0 < expected[1].sum()
    assert torch.equal(wrong_answers(hidden, weight, labels), expected.sum(1))
    for found in ranks(len(bounds) - 1)(wrong_in_a_shard, bounds):
        assert torch.equal(found, expected.sum(1))


def test_where_nothing_is_asked_nothing_is_wrong() -> None:
    hidden, weight, labels = case(torch.float32)
    assert wrong_answers(hidden, weight, torch.full_like(labels, IGNORED)).tolist() == [0, 0]


def largest_of_a_shard(tokens: int) -> int:
    shard = VocabularyShard(dist.group.WORLD, 500 * dist.get_rank())
    return largest_tensor(tokens, torch.randn(500, 8, requires_grad=True), shard)


def test_a_rank_of_the_vocabulary_makes_the_logits_of_its_rows_alone(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2)(largest_of_a_shard, 512) == [16 * 500] * 2
