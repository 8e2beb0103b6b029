"""Adapters beside PEFT's own on models of transformers: the loss and the gradients."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchao.quantization import to_nf4

from tests.support.adapters import adapted_model, peft_model, tensors_by_peft_name
from tests.support.hub_models import write_groups_start
from tests.support.huggingface_families import FAMILIES, eager_model
from torchtitan_cp.config.training import Lora
from torchtitan_cp.parallel.lora import NF4LoRALinear
from torchtitan_cp.parallel.nf4 import GROUP

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


@pytest.mark.parametrize("architecture", ["llama", "huggingface"])
def test_beside_weights_in_nf4_loss_and_gradients_are_those_beside_torchaos_dequantized_weights(
    architecture: str, tmp_path: Path
) -> None:
    write_groups_start(tmp_path)
    lora = Lora(rank=5, alpha=7.0, train=("norm",))
    quantized = adapted_model(architecture, tmp_path / "hub", dataclasses.replace(lora, base="nf4"))
    layers = [module for module in quantized.modules() if isinstance(module, NF4LoRALinear)]
    assert len(layers) == 2 * 5, "of both blocks all but keys and values"
    file = tmp_path / "hub" / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if weight.ndim == 2 and "layers" in name and weight.numel() % GROUP == 0:
            weights[name] = to_nf4(weight).get_original_weight()
    save_file(weights, file, metadata={"format": "pt"})
    replaced = adapted_model(architecture, tmp_path / "hub", lora)
    tokens = torch.randint(0, 200, (2, 40), generator=torch.Generator().manual_seed(0))
    losses = []
    for model in (quantized, replaced):
        logits = model(tokens, torch.arange(40).expand(2, 40), torch.zeros_like(tokens))
        losses.append(loss_of(logits, tokens))
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    wanted = {name: parameter.grad for name, parameter in replaced.named_parameters() if parameter.requires_grad}
    got = {name: parameter.grad for name, parameter in quantized.named_parameters() if parameter.requires_grad}
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.norm() > 0, name
        assert (got[name] - gradient).norm() < 1e-5 * gradient.norm(), name
