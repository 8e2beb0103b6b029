"""A model that the trainer has never heard of, added as docs/new_model.md says, trains on ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.architecture import Architecture, Attend, Head, LanguageModel
from models.llama.flavors import LlamaArgs
from tests.support.rank_pool import RankPool
from tests.support.runs import TINY, losses, train, write_run
from torchtitan_cp.training.registry import register


@dataclass(frozen=True)
class LinearShape(LlamaArgs):
    """Blocks of attention without RoPE, norm or bias beside a linear map."""

    slope: float = 0.1

    @property
    def last_products(self) -> tuple[str, ...]:
        return tuple(f"layers.{number}.down" for number in range(self.n_layers))

    def linear_parameters(self) -> int:
        return self.n_layers * (4 * self.dim**2 + self.dim * self.ffn_dim * 2) + self.dim * self.vocab_size


class LinearBlock(nn.Module):
    def __init__(self, shape: LinearShape, attend: Attend) -> None:
        super().__init__()
        self.shape, self.attend = shape, attend
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, hidden: Tensor, plans: object) -> Tensor:
        q, k, v = self.qkv(hidden).unflatten(-1, (3, self.shape.n_heads, -1)).unbind(-3)
        return self.mlp(hidden + self.attend(q, k, v, plans, 0).flatten(-2))

    def mlp(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.leaky_relu(self.up(hidden), self.shape.slope))


class LinearModel(LanguageModel):
    def __init__(self, shape: LinearShape, attend: Attend) -> None:
        super().__init__()
        self.is_first = self.is_last = True
        self.tok_embeddings = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleDict({str(n): LinearBlock(shape, attend) for n in range(shape.n_layers)})
        self.output = nn.Linear(shape.dim, shape.vocab_size, bias=False)

    def keep_layers(self, first: int, stop: int) -> None:
        assert (first, stop) == (0, len(self.layers)), "lacks says that it is never cut"

    def set_rope(self, inverse_frequencies: Sequence[float], attention_factor: float, device: torch.device) -> None:
        """It has no positions."""

    def init_std(self, parameter: str) -> float | None:
        return 0.05

    def forward(self, tokens: Tensor, positions: Tensor, plans: object, head: Head | None = None) -> Any:
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, plans)
        return head(hidden, self.output) if head else self.output(hidden)


SHAPE = LinearShape(48, 2, 4, 4, 12, 96)
LACKS = {"parallel.tp": "it has no plan for it", "parallel.pp": "it cannot be cut"}
ARCHITECTURE = Architecture("linear", {"tiny": SHAPE}, LinearModel, {}, lacks=LACKS)
CONFIG = TINY.replace('flavor = "debug"', 'architecture = "linear"\nflavor = "tiny"')
CONFIG = "\n".join(line for line in CONFIG.splitlines() if not line.startswith("overrides"))


def train_new(path: Path, *overrides: str) -> list[float]:
    register([ARCHITECTURE])
    return losses(train(path, "--checkpoint.enable=false", *overrides))


@pytest.mark.deep
def test_a_model_that_the_trainer_does_not_know_trains_alike_on_one_rank_and_on_more(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_run(tmp_path, CONFIG)
    alone = ranks(1)(train_new, path, f"--job.dump_folder={tmp_path}/one")[0]
    assert alone[-1] < alone[0] - 1
    for cp in (1, 2):
        options = (f"--parallel.cp={cp}", "--model.overrides.slope=0.1", "--activation.mlp_tiles=2")
        split = ranks(2)(train_new, path, *options, f"--job.dump_folder={tmp_path}/cp{cp}")[0]
        assert split == pytest.approx(alone, rel=1e-4)
