"""The chunked loss with the vocabulary over ranks, against one process."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.logits import case, largest_tensor, sums_over_full_logits
from tests.support.rank_pool import RankPool
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.optim.loss import ChunkedCrossEntropy, VocabularyShard, wrong_answers

SPLITS = {"even": (0, 25, 50), "uneven": (0, 7, 50), "one empty": (0, 50, 50), "four": (0, 20, 20, 21, 50)}


def run_shard(bounds: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Loss and gradients of this rank's rows; the hidden gradient summed as its gatherer would."""
    torch.manual_seed(0)
    hidden, weight, labels = case(dtype)
    rank = dist.get_rank()
    rows = weight[bounds[rank] : bounds[rank + 1]].detach().requires_grad_()
    shard = VocabularyShard(dist.group.WORLD, bounds[rank])
    total, per_token = ChunkedCrossEntropy(8, z_loss=0.01)(hidden, rows, labels, vocabulary=shard)
    total.backward()
    with torch.no_grad():
        again, per_token_again = ChunkedCrossEntropy(8, z_loss=0.01)(hidden, rows, labels, vocabulary=shard)
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


def largest_of_a_shard(tokens: int) -> int:
    shard = VocabularyShard(dist.group.WORLD, 500 * dist.get_rank())
    return largest_tensor(tokens, torch.randn(500, 8, requires_grad=True), shard)


def test_a_rank_of_the_vocabulary_makes_the_logits_of_its_rows_alone(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2)(largest_of_a_shard, 512) == [16 * 500] * 2
