"""Adapters beside PEFT's own on models of transformers: the loss and the gradients."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.adapters import adapted_model, peft_model, tensors_by_peft_name
from tests.support.huggingface_families import FAMILIES, eager_model
from torchtitan_cp.config.training import Lora

# Family of transformers -> our architecture, and settings.
CASES = {
    "Llama": ("llama", Lora(rank=5, alpha=7.0, train=("norm",))),
    "Qwen3": ("llama", Lora(rank=3, alpha=6.0, rslora=True, targets=("w[qkv]$", "feed_forward.w2"))),
    "Gemma 3": ("huggingface", Lora(rank=4, targets=("q_proj", "down_proj"))),
    "gpt-oss": ("huggingface", Lora(rank=4)),
}


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("family", CASES)
def test_loss_and_gradients_are_those_of_peft(family: str, tmp_path: Path) -> None:
    architecture, lora = CASES[family]
    theirs = eager_model(FAMILIES[family])
    for parameter in theirs.parameters():  # as frozen weights are stored
        parameter.data = parameter.data.to(torch.bfloat16).float()
    theirs.save_pretrained(tmp_path)
    ours = adapted_model(architecture, tmp_path, lora)
    weights = tensors_by_peft_name(ours, architecture)
    adapted = peft_model(theirs, lora, weights)
    tokens = torch.randint(0, 200, (2, 40), generator=torch.Generator().manual_seed(0))
    logits = ours(tokens, torch.arange(40).expand(2, 40), torch.zeros_like(tokens))
    loss, want = loss_of(logits, tokens), loss_of(adapted(input_ids=tokens, use_cache=False).logits, tokens)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    loss.backward()
    want.backward()
    wanted = {
        name.replace(".default", "").replace("modules_to_save.", ""): parameter.grad
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad
    }
    assert weights.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.norm() > 0, name
        assert (weights[name].grad - gradient).norm() < 1e-5 * gradient.norm(), name
    assert all(parameter.grad is None for parameter in ours.parameters() if not parameter.requires_grad)
