"""A Qwen3.5 of transformers, alone or below a vision tower, through a run on two ranks and back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

from tests.support.rank_pool import RankPool
from tests.support.runs import TINY, gradients_of, prepared, run_to_end, write_run
from torchtitan_cp.config.sections import Model
from torchtitan_cp.data.batches.micro_batches import read_step
from torchtitan_cp.training.export import export
from torchtitan_cp.training.registry import model_args_of

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "vocab_size": 288,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5},
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}


def write_start(folder: Path, pictures: bool, tied: bool) -> Path:
    """A saved model, none of whose weights is zero or one, and a config of ours that starts from it."""
    torch.manual_seed(0)
    sizes = SIZES | {"tie_word_embeddings": tied, "eos_token_id": 5}
    model: Any
    if pictures:
        rope = SIZES["rope_parameters"] | {"mrope_section": [2, 1, 1]}  # type: ignore[operator]
        # The whole's tie_word_embeddings is the one that counts.
        text = sizes | {"rope_parameters": rope, "tie_word_embeddings": not tied}
        whole = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
        model = Qwen3_5ForConditionalGeneration(whole)
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "linear_attn.norm" in name else 0.0, 0.2)
    model.save_pretrained(folder / "hub")
    start = f'architecture = "qwen3_5"\nhub_checkpoint = "{folder}/hub"'
    lines = [line for line in TINY.splitlines() if not line.startswith("overrides")]
    return write_run(folder, "\n".join(lines).replace('flavor = "debug"', start))


def train_and_compute(path: Path, *overrides: str) -> tuple[float, Tensor, Tensor, Tensor]:
    """On a rank: the first step's loss before it, and its tokens and labels with the logits of the trained model."""
    trainer = prepared(path, *overrides)
    trainer.resume()
    shape = trainer.enter_stage(trainer.stages[0])
    batches = read_step(trainer.data_pipeline.samples, shape, 0)
    loss = gradients_of(trainer, batches)[0]
    run_to_end(trainer)
    trainer.enter_stage(trainer.stages[0])
    found = []
    for batch in batches:
        with torch.no_grad():
            logits = trainer.model.parts[0](batch.tokens, batch.positions, batch.plans)
        found.append([batch.plans[0].unshard(x) for x in (batch.tokens, batch.labels, logits)])
    tokens, labels, logits = (torch.cat(x) for x in zip(*found, strict=True))
    return loss, tokens, labels, logits


def distance(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize(
    ("pictures", "tied"),
    [
        pytest.param(False, True, id="text, tied", marks=pytest.mark.deep),
        pytest.param(True, False, id="with pictures, untied"),
    ],
)
def test_a_qwen3_5_of_transformers_trains_on_two_ranks_and_goes_back_as_a_text_model(
    ranks: Callable[[int], RankPool], tmp_path: Path, pictures: bool, tied: bool
) -> None:
    path = write_start(tmp_path, pictures, tied)
    answers = ranks(2)(train_and_compute, path, "--parallel.cp=2", "--curriculum.stages[0].steps=2")
    export(tmp_path / "run", tmp_path / "out")
    before = Qwen3_5ForConditionalGeneration if pictures else Qwen3_5ForCausalLM
    start = before.from_pretrained(tmp_path / "hub", dtype=torch.float32).eval()
    back, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert type(back) is Qwen3_5ForCausalLM
    assert not any(report.values()), report
    loss, tokens, labels, logits = answers[0]
    with torch.no_grad():
        theirs, trained = start(tokens).logits, back.eval()(tokens).logits
    their_loss = F.cross_entropy(theirs.flatten(0, 1), labels.flatten())
    assert loss == pytest.approx(their_loss.item(), rel=1e-5)
    assert distance(trained, logits) < 1e-5 < 1e-2 < distance(theirs, logits), "it was trained"

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Qwen3_5ForCausalLM"], "qwen3_5_text")
    assert (config["tie_word_embeddings"], config["eos_token_id"], config["max_position_embeddings"]) == (tied, 5, 512)
    assert not {"text_config", "vision_config", "image_token_id"} & config.keys()
    again, first = (
        model_args_of(Model(architecture="qwen3_5", hub_checkpoint=str(tmp_path / part))) for part in ("out", "hub")
    )
    assert again == first
