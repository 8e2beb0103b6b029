"""The digest of a base model: of its tensors, however they are stored."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.hub_models import save_model
from torchtitan_cp.checkpoint.base import digest_weights


def test_a_digest_is_of_the_tensors_and_not_of_the_files(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "one")
    save_model("llama", tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    digest = digest_weights(tmp_path / "one")
    assert digest == digest_weights(tmp_path / "many")
    file = tmp_path / "one" / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        changed = weight.clone()
        changed[-1] += 1
        for other in (changed, weight.to(torch.bfloat16)):
            save_file({**weights, name: other}, file)
            assert digest_weights(tmp_path / "one") != digest, name
