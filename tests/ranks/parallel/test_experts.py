"""Experts shared by ranks give what one process gives: outputs, gradients and counts, whoever gets no token."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.moe import MoeArgs
from models.moe.model import Experts
from tests.support.rank_pool import RankPool
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.parallel.experts import ExpertDispatch, RoutingSums, shard_experts
from torchtitan_cp.parallel.mesh import Meshes

X, K, E, TOKENS = 8, 2, 16, 12
ARGS = MoeArgs(E, 1, 2, 1, 8, 24, 97, n_experts=X, experts_per_token=K)

# What the tokens of a rank choose; the ranks are numbered.
CHOICES: dict[str, Callable[[int], Tensor]] = {
    "any": lambda rank: torch.rand(TOKENS, X).argsort(1)[:, :K],
    "two experts get all": lambda rank: torch.tensor([[5, 2]]).expand(TOKENS, K),
    "one rank gets all": lambda rank: torch.rand(TOKENS, 2).argsort(1),
    "the first rank has no tokens": lambda rank: torch.rand(TOKENS * (rank > 0), X).argsort(1)[:, :K],
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_layer = Experts(ARGS)

    @property
    def experts(self) -> dict[int, nn.Module]:
        return {0: self.of_layer}


def filled() -> Model:
    model = Model()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.double()


def run(choice: str, seed: int, chunks: int) -> tuple[Tensor, ...]:
    """On a rank: largest differences of outputs and gradients to the plain experts; and the counts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 * seed + rank)
    chosen, plain, shared = CHOICES[choice](rank), filled(), filled()
    hidden = torch.randn(len(chosen), E, dtype=torch.float64)
    shares = torch.rand(len(chosen), K, dtype=torch.float64)
    weights = torch.randn(len(chosen), E, dtype=torch.float64)
    mesh = Meshes("cpu", Degrees(1, 1, ranks, 1, 1, ep=ranks)).experts
    assert mesh
    shard_experts(shared, mesh[0])
    sums = RoutingSums(1, X, torch.device("cpu"))
    dispatch = ExpertDispatch(0, shared.of_layer, sums, mesh[0].get_group(), trains=True)
    dispatch.chunks = chunks
    own, theirs = (tuple(x.clone().requires_grad_() for x in (hidden, shares)) for _ in range(2))
    out = dispatch(own[0], chosen, own[1])
    (out * weights).sum().backward()
    want = plain.of_layer(theirs[0], chosen, theirs[1])
    (want * weights).sum().backward()
    errors = [(out - want).detach()]
    errors += [a.grad - b.grad for a, b in zip(own, theirs, strict=True) if a.grad is not None and b.grad is not None]
    for ours, parameter in zip(shared.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert ours.grad is not None
        dist.all_reduce(parameter.grad)
        errors.append(ours.grad.full_tensor() - parameter.grad)  # type: ignore[attr-defined]
    routing = sums.take()
    assert sums.take().counts.sum() == 0
    return (torch.stack([x.abs().amax() if x.numel() else torch.zeros(()) for x in errors]), *routing, chosen, shares)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("n_ranks", "chunks"), [(2, 1), (4, 3)])
def test_ranks_that_share_experts_give_what_one_gives(
    ranks: Callable[[int], RankPool], choice: str, n_ranks: int, chunks: int
) -> None:
    seed = int(torch.randint(1000, ()))
    found = ranks(n_ranks)(run, choice, seed, chunks)
    chosen, shares = (torch.cat([rank[place] for rank in found]) for place in (3, 4))
    normalized = shares / shares.sum(1, keepdim=True)
    for errors, counts, entropy, *_ in found:
        assert errors.max() < 1e-12, f"seed {seed}: {errors}"
        assert counts[0].tolist() == chosen.flatten().bincount(minlength=X).tolist()
        assert entropy[0] == pytest.approx(-(normalized * normalized.log()).sum().item())
