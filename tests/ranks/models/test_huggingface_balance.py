"""The balance loss of transformers' mixtures: shares counted over all ranks of a sequence, as on one process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.support.compiled import counting_backend
from tests.support.huggingface_families import FAMILIES, eager_model
from tests.support.huggingface_parity import copy_weights, write_family
from tests.support.rank_pool import RankPool
from tests.support.runs import gradients_of, prepared
from torchtitan_cp.data.batches.micro_batches import read_step

COEFFICIENT = 0.5
FAMILY = "Qwen3-MoE"


def step_with_balance(path: Path, *overrides: str) -> tuple[float, float, float] | None:
    """Cross-entropy here and of one process; largest relative error of gradients, with transformers' balance loss."""
    trainer = prepared(path, "--checkpoint.enable=false", *overrides)
    model = eager_model(FAMILIES[FAMILY])
    copy_weights(model, trainer.model.parts[0])
    layout = trainer.enter_stage(trainer.stages[0])
    samples = trainer.data_pipeline.samples
    loss, gradients = gradients_of(trainer, read_step(samples, layout, 0))
    if trainer.world.rank:
        return None
    total, alone = torch.zeros(()), 0.0
    for number in range(layout.sequences):
        row = samples.sequence(number)
        tokens, labels = torch.from_numpy(row.tokens), torch.from_numpy(row.labels)
        out = model(input_ids=tokens[None], use_cache=False, output_router_logits=True)
        experts, chosen = model.config.num_experts, model.config.num_experts_per_tok
        balance = load_balancing_loss_func(out.router_logits, experts, chosen)
        cross_entropy = F.cross_entropy(out.logits[0].float(), labels, reduction="mean")
        alone += cross_entropy.item() / layout.sequences
        total = total + (cross_entropy + COEFFICIENT * balance) / layout.sequences
    model.zero_grad()
    total.backward()
    errors = [
        ((gradients[name] - p.grad).norm() / p.grad.norm()).item()
        for name, p in model.named_parameters()
        if p.grad is not None and p.grad.norm()
    ]
    return loss, alone, max(errors)


def compiled_step(path: Path, *overrides: str) -> tuple[float, float, float] | None:
    with counting_backend("aot_eager"):
        return step_with_balance(path, "--compile.enable=true", *overrides)


@pytest.mark.parametrize("step", [step_with_balance, pytest.param(compiled_step, marks=pytest.mark.deep)])
def test_the_balance_loss_and_its_gradients_are_those_of_one_process(
    ranks: Callable[[int], RankPool], tmp_path: Path, step: Callable[..., tuple[float, float, float] | None]
) -> None:
    path = write_family(tmp_path, FAMILY)
    config = {**FAMILIES[FAMILY], "output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loss, alone, error = ranks(2)(step, path, "--parallel.cp=2", "--parallel.ep=2", "--activation.checkpoint=full")[0]
    assert abs(loss - alone) <= 5e-6 * alone, (loss, alone)
    assert error <= 5e-5
