"""The chunked loss against torch's cross-entropy over full logits."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.logits import case, largest_tensor, sums_over_full_logits
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.optim.loss import ChunkedCrossEntropy, wrong_answers
from torchtitan_cp.planner.fake import FakeMode, StepTracker


@pytest.mark.parametrize("chunk", [1, 7, 37, 74, 1000])
def test_loss_and_gradients_equal_full_logits_at_any_chunk(chunk: int) -> None:
    hidden, weight, labels = case(torch.float32)
    total, per_token = ChunkedCrossEntropy(chunk)(hidden, weight, labels)
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


def test_a_frozen_output_matrix_has_no_gradient() -> None:
    hidden, weight, labels = case(torch.float32)
    ChunkedCrossEntropy(8)(hidden, weight, labels)[0].backward()
    frozen = hidden.detach().requires_grad_(), weight.detach()
    ChunkedCrossEntropy(8)(*frozen, labels)[0].backward()
    assert torch.equal(frozen[0].grad, hidden.grad)
    assert frozen[1].grad is None


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_weights_scale_the_loss_and_the_gradients_of_each_token_and_not_the_losses_given_back(z_loss: float) -> None:
    hidden, weight, labels = case(torch.float32)
    weights = torch.rand(labels.shape)
    loss = ChunkedCrossEntropy(8, z_loss)
    total, per_token = loss(hidden, weight, labels, token_weights=weights)
    total.backward()
    wide_hidden, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = wide_hidden @ wide_weight.t()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    squares = logits.logsumexp(-1).square() * (labels != IGNORED)
    expected = ((losses.view(2, 37) + z_loss * squares) * weights).sum()
    expected.backward()
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(per_token, loss(hidden, weight, labels)[1])
    torch.testing.assert_close(hidden.grad.double(), wide_hidden.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), wide_weight.grad, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(loss(hidden, weight, labels, token_weights=weights)[0], total)


def test_a_shard_of_ignored_tokens_alone_gives_zero_loss_and_gradients() -> None:
    hidden, weight, labels = case(torch.float32)
    total, per_token = ChunkedCrossEntropy(8)(hidden, weight, torch.full_like(labels, IGNORED))
    total.backward()
    assert total.item() == 0
    assert not per_token.any()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_without_gradients_the_loss_is_the_same() -> None:
    hidden, weight, labels = case(torch.float32)
    with torch.no_grad():
        total, per_token = ChunkedCrossEntropy(8)(hidden, weight, labels)
    expected, expected_per_token = ChunkedCrossEntropy(8)(hidden, weight, labels)
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(per_token, expected_per_token)


def test_bf16_gradients_come_in_bf16_and_close_to_fp64() -> None:
    hidden, weight, labels = case(torch.bfloat16)
    total, _ = ChunkedCrossEntropy(8)(hidden, weight, labels)
    (total / 68).backward()
    wide_hidden, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = wide_hidden @ wide_weight.t()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    (expected / 68).backward()
    for got, want in ((hidden.grad, wide_hidden.grad), (weight.grad, wide_weight.grad)):
        assert got.dtype == torch.bfloat16
        # bf16 keeps 8 bits: logits, their gradient and the product are each rounded once.
        assert ((got.double() - want).norm() / want.norm()).item() < 4 * 2**-8


@pytest.mark.parametrize("tokens", [256, 1024])
def test_the_largest_tensor_holds_one_chunks_logits_at_any_length(tokens: int) -> None:
    assert largest_tensor(tokens, torch.randn(1000, 8, requires_grad=True)) == 16 * 1000


@pytest.mark.parametrize(("dtype", "scale", "most_bytes"), [(torch.float32, 1.0, 8), (torch.bfloat16, 0.5, 12)])
def test_at_its_fullest_a_chunk_takes_so_many_bytes_a_logit(dtype: torch.dtype, scale: float, most_bytes: int) -> None:
    chunk, rows, width = 64, 10_000, 8
    with FakeMode(), StepTracker("cpu") as tracker:
        hidden = torch.randn(1, 4 * chunk, width, dtype=dtype, requires_grad=True)
        weight = torch.randn(rows, width, dtype=dtype, requires_grad=True)
        labels = torch.zeros(1, 4 * chunk, dtype=torch.int64)
        tracker.start_peak()
        held = tracker.now + 4 * rows * width  # the gradient of the output matrix
        ChunkedCrossEntropy(chunk, scale=scale)(hidden, weight, labels)
    assert tracker.peak - held == pytest.approx(most_bytes * chunk * rows, rel=0.05)


@pytest.mark.parametrize(
    ("dtype", "chunk", "scale", "softcap"),
    [(torch.bfloat16, 37, 1.0, 0.0), pytest.param(torch.float32, 30, 0.5, 3.0, marks=pytest.mark.deep)],
)
def test_compiled_it_gives_the_same(dtype: torch.dtype, chunk: int, scale: float, softcap: float) -> None:
    found = []
    torch._dynamo.utils.counters.clear()
    for compiled in (False, True):
        torch.manual_seed(0)
        hidden, weight, labels = case(dtype)
        loss = ChunkedCrossEntropy(chunk, 0.01, scale, softcap, compiled)
        loss.largest_logit = torch.tensor(-torch.inf)
        weights = torch.rand(labels.shape)
        total, per_token = loss(hidden, weight, labels, token_weights=weights)
        total.backward()
        found.append((total, per_token, hidden.grad, weight.grad, loss.largest_logit))
        assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == compiled
    for name, got, want in zip(("sum", "tokens", "hidden", "weight", "logit"), *reversed(found), strict=True):
        off = 2**-8 if got.dtype == torch.bfloat16 else 1e-6  # a value that lies between two may be rounded to either
        assert ((got - want).norm() / want.norm()).item() < off, name


def test_z_loss_is_in_the_sum_and_the_gradients_and_not_in_the_losses_of_tokens() -> None:
    hidden, weight, labels = case(torch.float32)
    total, per_token = ChunkedCrossEntropy(8, z_loss=0.01)(hidden, weight, labels)
    total.backward()
    wide_hidden, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    pure, z = sums_over_full_logits(wide_hidden, wide_weight, labels)
    (pure + 0.01 * z).backward()
    torch.testing.assert_close(per_token.sum().double(), pure, rtol=1e-6, atol=0)
    torch.testing.assert_close(total.double(), pure + 0.01 * z, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad.double(), wide_hidden.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), wide_weight.grad, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(ChunkedCrossEntropy(8, z_loss=0.01)(hidden, weight, labels)[0], total.detach())


def test_ignored_tokens_of_any_size_give_no_nan() -> None:
    hidden, weight, labels = case(torch.float32)
    total, _ = ChunkedCrossEntropy(8, z_loss=0.1)(hidden * 1e4, weight, torch.full_like(labels, IGNORED))
    total.backward()
    assert total.item() == 0
    assert not hidden.grad.any()


def test_a_label_that_is_no_row_of_the_vocabulary_makes_the_loss_infinite() -> None:
    hidden, weight, labels = case(torch.float32)
    labels[0, 7] = 50
    assert ChunkedCrossEntropy(8)(hidden, weight, labels)[0].item() == torch.inf


def test_the_largest_logit_is_that_of_all_chunks_and_calls_with_gradients() -> None:
    hidden, weight, labels = case(torch.float32)
    loss = ChunkedCrossEntropy(8)
    loss.largest_logit = largest = torch.tensor(-torch.inf)
    for scale in (3.0, 1.0):
        loss(hidden * scale, weight, labels)
    with torch.no_grad():
        loss(hidden * 5.0, weight, labels)
    torch.testing.assert_close(largest, (3 * hidden @ weight.t()).max().detach())
    loss(hidden * torch.nan, weight, labels)
    assert largest.isnan()


def test_where_nothing_is_asked_nothing_is_wrong() -> None:
    hidden, weight, labels = case(torch.float32)
    assert wrong_answers(hidden, weight, torch.full_like(labels, IGNORED)).tolist() == [0, 0]
