"""Linear layers in float8, sharded."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.support.float8_llama import TOKENS, make_model, run
from tests.support.rank_pool import RankPool
from tests.support.small_llama import config
from torchtitan_cp.parallel.apply import apply_fsdp


def run_sharded() -> list[Tensor]:
    model = make_model("rowwise")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    apply_fsdp(model, mesh, config(), on_host=False)
    run(model, TOKENS.chunk(2)[mesh.get_local_rank()])
    return [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]


def test_sharded_weights_give_the_same_gradients(ranks: Callable[[int], RankPool]) -> None:
    whole = make_model("rowwise")
    run(whole, TOKENS)
    for got, parameter in zip(ranks(2)(run_sharded)[0], whole.parameters(), strict=True):
        assert parameter.grad is not None
        # Scales of a row of the activations are the same on any rank; those of grad_output's columns are not.
        assert F.cosine_similarity(got.flatten(), parameter.grad.flatten(), 0) > 0.999
