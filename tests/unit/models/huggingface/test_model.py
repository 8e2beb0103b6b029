"""Each family on one rank gives the loss and gradients of transformers' own attention, on packed documents."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

from models.huggingface.args import HuggingFaceArgs, args_from_config
from models.huggingface.model import HuggingFaceModel
from tests.support.deep import deep_rows
from tests.support.huggingface_families import FAMILIES, LACKING, as_markdown, eager_model
from tests.support.huggingface_parity import Row, compare, copy_weights
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.config.training import Activation, Compile
from torchtitan_cp.data.batches.micro_batches import BatchLayout
from torchtitan_cp.optim.loss import ChunkedCrossEntropy
from torchtitan_cp.parallel.blocks import wrap_blocks
from torchtitan_cp.training.model import LayerAttention

SEQ_LEN = 96
# Two documents are shorter than a convolution.
LENGTHS = ((SEQ_LEN,), (7, 1, 57, 2, 29))
# Of fewer than 4 tokens it would take other factors.
LENGTHS_OF = {"Phi-3, longrope": ((SEQ_LEN,), (7, 60, 29))}


HYBRIDS = (
    *("Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE", "OLMo-Hybrid", "Kimi Linear", "Ling 2.5", "Lara Mini", "Nemotron-H"),
    *("Falcon-H1", "Granite 4 hybrid", "Bamba", "Zamba2", "LFM2", "LFM2-MoE", "LFM3"),
)


def windows_of(args: HuggingFaceArgs) -> tuple[int, ...]:
    return tuple(sorted({0, *(mixer.window for mixer in args.mixers)}))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@deep_rows(
    ("family", "checkpoint"),
    itertools.product(FAMILIES, ("none", "selective")),
    default=[
        *(("Gemma 3", "none"), ("gpt-oss", "none"), ("DeepSeek-V3", "none")),
        *((family, "none") for family in HYBRIDS if family in FAMILIES),
        # These two write to products in place.
        *(("Qwen3", "selective"), ("gpt-oss", "selective"), ("Gemma 3n", "selective")),
    ],
)
def test_one_rank_gives_the_loss_and_gradients_of_eager_attention(family: str, checkpoint: str, device: str) -> None:
    args, documents = args_from_config(FAMILIES[family], {}), LENGTHS_OF.get(family, LENGTHS)
    eager = eager_model(FAMILIES[family])
    model = HuggingFaceModel(args, LayerAttention())
    copy_weights(eager, model)
    theirs = dict(eager.named_buffers())
    for name, bias in model.named_buffers():
        if any(bias is own for own in model.router_biases.values()):
            theirs[name].copy_(bias.normal_(0.0, 0.2))
    wrap_blocks(model, Activation(checkpoint=checkpoint), Compile(), device)
    model.to(device).reset_rope(SEQ_LEN, torch.device(device))
    tokens, labels = torch.randint(args.probe.vocab_size, (2, 2, SEQ_LEN))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])
    layout = BatchLayout(SEQ_LEN, 1, 2, 1, 0, partial(make_plan), dict.fromkeys(windows_of(args), "ring"))
    loss_of = ChunkedCrossEntropy(40, 0.0, args.logit_scale, args.logit_softcap)
    total = model(
        tokens.to(device),
        positions.to(device),
        layout.plans(AttentionMask(document_lengths=documents)),
        lambda hidden, output: loss_of(hidden, output.weight, labels.to(device), None)[0],
    )
    loss = total / labels.numel()
    loss.backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    rows = [Row(*pair, lengths) for *pair, lengths in zip(tokens, labels, documents, strict=True)]
    compare(eager, rows, loss.item(), gradients).check()


@pytest.mark.parametrize("family", ["Gemma 2", "Granite"])
def test_a_head_that_calls_the_output_layer_gets_the_models_logits(family: str) -> None:
    """With their soft cap (Gemma 2) and scale (Granite)."""
    args = args_from_config(FAMILIES[family], {})
    model = HuggingFaceModel(args, LayerAttention())
    copy_weights(eager_model(FAMILIES[family]), model)
    model.reset_rope(16, torch.device("cpu"))
    layout = BatchLayout(16, 1, 1, 1, 0, partial(make_plan), dict.fromkeys(windows_of(args), "ring"))
    given = torch.randint(args.vocab_size, (1, 16)), torch.arange(16), layout.plans(AttentionMask())
    want = model(*given)
    assert torch.allclose(model(*given, lambda hidden, output: output(hidden)), want, atol=1e-6)


@pytest.mark.parametrize("family", ["Llama", "Gemma 3", "DeepSeek-V3"])
def test_angles_at_a_million_tokens_are_those_of_fp64(family: str) -> None:
    """In fp32 they are off by up to 0.06 radians."""
    model = HuggingFaceModel(args_from_config(FAMILIES[family], {}), LayerAttention())
    model.reset_rope(16, torch.device("cpu"))
    rotary, layer_type = next(iter(model._rotaries()))
    positions = torch.tensor([[0, 1, 999_983, 1_048_575]])
    waves = rotary(torch.zeros(1, 4, 8), positions, *[layer_type] * (layer_type is not None))
    frequencies = getattr(rotary, f"{layer_type}_inv_freq" if layer_type else "inv_freq").double()
    angles = positions.double()[..., None] * frequencies
    found = waves if isinstance(waves, torch.Tensor) else torch.complex(waves[0], waves[1])[..., : frequencies.numel()]
    assert (found - torch.polar(torch.ones_like(angles), angles)).abs().max() < 1e-6


@pytest.mark.deep
def test_the_page_has_the_table_of_these_families() -> None:
    page = (Path(__file__).parents[4] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    lacking = tuple(f"| {name} |" for name in LACKING)
    rows = [line for line in page.splitlines(keepends=True) if not line.startswith(lacking)]
    assert as_markdown() in "".join(rows), "python -m tests.support.huggingface_families prints it"


@pytest.mark.parametrize(
    ("family", "layers"), [("DeepSeek-V3", [1]), ("GLM-4.5", [1]), ("Qwen3-MoE", []), ("ERNIE 4.5 MoE", [])]
)
def test_biases_of_transformers_are_found_by_their_layer(family: str, layers: list[int]) -> None:
    model = HuggingFaceModel(args_from_config(FAMILIES[family], {}), LayerAttention())
    assert list(model.router_biases) == layers
    for number, bias in model.router_biases.items():
        assert bias.shape == (model.args.probe.layers[number].n_experts,)
        assert bias.dtype == torch.float32
        assert any(bias is own for own in model.buffers())
