"""What the log says of rotary embeddings when a run starts from given weights."""

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models import ARCHITECTURES
from models.llama import Llama, LlamaArgs
from tests.support.hub_models import change_config, save_model
from torchtitan_cp.checkpoint.hub_rope import hub_rope
from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.config import Config
from torchtitan_cp.config.sections import Model, Tokenizer
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.resume import resume


def test_every_stage_that_changes_the_rotary_embedding_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model("llama", tmp_path)
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}  # what it leaves out is as we have it
    change_config(tmp_path, rope_parameters=yarn)
    own = hub_rope(json.loads((tmp_path / "config.json").read_text()))
    model = Llama(LlamaArgs(48, 4, 4, 2, 12, 96, 288, norm_eps=1e-6), lambda *_: torch.zeros(()))
    ropes = None, own, dataclasses.replace(own, theta=1e4), dataclasses.replace(own, truncate=False)
    trained: Any = SimpleNamespace(
        config=Config(model=Model(hub_checkpoint=str(tmp_path)), tokenizer=Tokenizer("bytes")),
        parts=[model],
        parameter_names=[name for name, _ in model.named_parameters()],
        args=SimpleNamespace(rotary_dim=12, mixers=[SimpleNamespace(window=0, n_heads=4)]),
        world=SimpleNamespace(rank=0),
    )
    stages: Any = [
        SimpleNamespace(rope=rope, index=index, seq_len=128, lr=None, steps=1, until={})
        for index, rope in enumerate(ropes)
    ]
    register(ARCHITECTURES)
    with caplog.at_level(logging.INFO, "torchtitan_cp.training"):
        assert resume(None, fresh := Progress(), stages, trained, None) is fresh  # type: ignore[arg-type]
    says = "changes the rotary embedding they were trained with:"
    assert [record.getMessage() for record in caplog.records[1:]] == [
        f"stage 3 {says} rope_theta 1000000.0 -> 10000.0",
        f"stage 4 {says} truncate True -> False",
        "stage 3 changes the RoPE of stage 2: theta 1e+06 -> 10000",
        "stage 4 changes the RoPE of stage 3: theta 10000 -> 1e+06, truncate True -> False",
    ]
