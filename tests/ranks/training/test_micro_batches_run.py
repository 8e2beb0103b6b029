"""What FSDP moves in a step of several micro-batches: weights that stay, gradients that add up where they are."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.rank_pool import RankPool
from tests.support.runs import prepared, write_run
from torchtitan_cp.attention.local_shard import local_tensor
from torchtitan_cp.data.batches.micro_batches import read_step
from torchtitan_cp.training.model import ParallelModel

WEIGHTS = ("--model.overrides={dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, head_dim = 16, ffn_dim = 512}",)
BATCH = ("--curriculum.stages[0].seq_len=16", "--training.loss_chunk_tokens=16", "--training.compute_dtype=bfloat16")
MOVES = ("copy", "chunk_cat", "add_")  # parts of the names of operators that copy, cast and add up


class Moved(TorchDispatchMode):
    """Bytes that operators read and write to copy, cast and add up, by name; those of weights outweigh the others."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__
        if any(part in name for part in MOVES) and not (name.startswith("copy_") and args[0] is args[1]):
            written = tree_leaves((result, (kwargs or {}).get("out"))) if "copy_" not in name else tree_leaves(args[0])
            read = tree_leaves(args[1:]) if name.startswith(("copy_", "_foreach_copy_")) else tree_leaves(args)
            self.by_name[name] += sum(x.nbytes for x in (*read, *written) if isinstance(x, Tensor))
        return result


def step(path: Path, micro_batches: int, *overrides: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    """On a rank: a step's gradients, and the bytes a parameter that each operator moved."""
    batch = f"--curriculum.stages[0].global_batch_tokens={16 * micro_batches * dist.get_world_size()}"
    trainer = prepared(path, *WEIGHTS, *BATCH, batch, *overrides)
    layout = trainer.enter_stage(trainer.stages[0])
    batches = read_step(trainer.data_pipeline.samples, layout, 0)
    assert len(batches) == micro_batches
    with Moved() as moved:
        trainer.model.forward_backward(batches)
    parameters = dict(trainer.model.parts[0].named_parameters())
    gradients = {name: local_tensor(parameter.grad).clone() for name, parameter in parameters.items()}
    return gradients, {name: count / trainer.model.parameter_count for name, count in moved.by_name.items()}


def compare(path: Path, micro_batches: int, *overrides: str) -> tuple[bool, float, float]:
    """On a rank: whether a step has the bits that it has if FSDP does everything in each micro-batch; bytes of both."""
    with patch.object(ParallelModel, "_prepare_fsdp", lambda self, is_last: None):
        want, before = step(path, micro_batches, *overrides)
    got, after = step(path, micro_batches, *overrides)
    same = all(torch.equal(got[name], want[name]) for name in want)
    return same and len(got) == len(want), sum(before.values()), sum(after.values())


@pytest.mark.parametrize(
    ("number", "options", "most", "less"),
    [
        (1, (), 3 * 20 + 6 + 10 + 10 + 8, 8),
        (1, ("--parallel.fsdp_reshard=never",), 10 + 6 + 10 + 10 + 8, 28),
        (1, ("--training.reduce_dtype=bfloat16",), 3 * 20 + 10 + 22 + 22, 0),  # sums in bf16 would lose digits
        (2, ("--parallel.fsdp_reshard=never",), 56, 22),
    ],
    ids=["one rank", "one rank, weights stay", "one rank, bf16", "two ranks, weights stay"],
)
def test_a_step_of_three_micro_batches_has_the_same_bits_and_moves_fewer_bytes(
    ranks: Callable[[int], RankPool], tmp_path: Path, number: int, options: tuple[str, ...], most: float, less: float
) -> None:
    """In bytes a parameter.

    A gather on one rank casts and copies, 10; on two it goes through a buffer, 11 as counted here. On one rank
    gradients are cast to fp32 shards, 6; in each micro-batch but the first they are added there, 12. Sums that wait
    take 6 in the first, 10 in each other, and at the end 8.
    """
    for same, before, after in ranks(number)(compare, write_run(tmp_path), 3, *options):
        assert same
        assert after < most + 6  # of activations and the loss
        assert before - after == pytest.approx(less, abs=0.5)
