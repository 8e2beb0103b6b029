"""Hugging Face checkpoints in and out, with transformers as the judge."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from models.llama.hub import HUB
from models.moe.hub import HUB as MOE_HUB
from tests.support.curricula import TWO_STAGES
from tests.support.deep import deep_rows
from tests.support.disks import recorded_syncs
from tests.support.hub_models import EXPERTS, FAMILIES, OURS, write_start
from tests.support.rank_pool import RankPool
from tests.support.runs import TINY, gradients_of, prepared, train, write_run
from torchtitan_cp.attention.local_shard import shard_slices
from torchtitan_cp.checkpoint import hub as hub_module
from torchtitan_cp.checkpoint.hub import INDEX_FILE, hub_names, read_shard
from torchtitan_cp.checkpoint.weights import open_saved_model
from torchtitan_cp.cli import export as export_program
from torchtitan_cp.cli.generate import KVCache, load_model
from torchtitan_cp.config import ConfigError
from torchtitan_cp.data.batches.micro_batches import read_step
from torchtitan_cp.training import export as export_module
from torchtitan_cp.training.export import export


def started(path: Path, *overrides: str) -> Any:
    """On a rank: the trainer with the hub's weights."""
    trainer = prepared(path, *overrides)
    trainer.resume()
    return trainer


def first_step(path: Path, *overrides: str) -> tuple[dict[str, Tensor], float, Tensor | None]:
    """On a rank: whole weights, loss of the first step, and on one rank the logits of its first sequence."""
    trainer = started(path, *overrides)
    shape = trainer.enter_stage(trainer.stages[0])
    weights = {n: p.full_tensor().detach() for part in trainer.model.parts for n, p in part.named_parameters()}
    batches = read_step(trainer.data_pipeline.samples, shape, 0)
    loss = gradients_of(trainer, batches)[0]
    if trainer.world.size > 1:
        return weights, loss, None
    return weights, loss, trainer.model.parts[0](batches[0].tokens, batches[0].positions, batches[0].plans).detach()


def sequences(path: Path) -> tuple[Tensor, Tensor]:
    """Tokens and labels of the first step, all four sequences."""
    trainer = prepared(path)
    trainer.enter_stage(trainer.stages[0])
    rows = [trainer.data_pipeline.samples.sequence(number) for number in range(4)]
    tokens, labels = (
        torch.stack([torch.from_numpy(getattr(row, part)) for row in rows]) for part in ("tokens", "labels")
    )
    return tokens, labels


def in_transformers(
    folder: Path, tokens: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], Tensor]:
    """Weights and logits."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain).eval()
    with torch.no_grad():
        return dict(model.named_parameters()), model(tokens).logits


def close(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).abs().max() <= 1e-5 * want.abs().max())


@deep_rows("family", FAMILIES, default=["llama", "qwen2, windows in the last layers", "qwen3"])
def test_a_model_of_transformers_has_its_logits_here_and_back_there_after_training(
    ranks: Callable[[int], RankPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    path = write_start(tmp_path, family, "100KB")
    assert (tmp_path / "hub" / INDEX_FILE).is_file()
    tokens, labels = ranks(1)(sequences, path)[0]
    their_weights, their_logits = in_transformers(tmp_path / "hub", tokens)
    weights, loss, logits = ranks(1)(first_step, path)[0]
    for name, weight in weights.items():
        assert torch.equal(weight, their_weights[hub_names(name, (), HUB.names)[0][0]]), name
    assert close(logits, their_logits[:1])
    their_loss = nn.functional.cross_entropy(their_logits.flatten(0, 1), labels.flatten())
    assert loss == pytest.approx(their_loss.item(), rel=1e-5)

    ranks(1)(train, path, "--curriculum.stages[0].steps=2")
    monkeypatch.setattr(hub_module, "MAX_FILE_BYTES", 100_000)
    export(tmp_path / "run", tmp_path / "out")
    saved = open_saved_model(tmp_path / "run")
    model = load_model(saved, torch.device("cpu"))
    with torch.no_grad():
        ours = torch.cat(
            [model(row, torch.arange(128), iter([KVCache() for _ in range(4)])) for row in tokens[:, None]]
        )
    exported, back = in_transformers(tmp_path / "out", tokens)
    assert close(back, ours)
    assert not close(back, their_logits), "it was trained"
    for name, weight in saved.read([name for name, _ in model.named_parameters()]).items():
        assert torch.equal(weight, exported[hub_names(name, (), HUB.names)[0][0]]), name


def write_experts(folder: Path) -> Path:
    """A small Qwen3-MoE, and a config of ours that starts from it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(EXPERTS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5, 0.2)
    model.save_pretrained(folder / "hub", max_shard_size="100KB")
    sizes = "qk_norm = true, norm_eps = 1e-6, head_dim = 16, n_experts = 6, experts_per_token = 2"
    experts = f'architecture = "moe"\nflavor = "debug"\nhub_checkpoint = "{folder}/hub"\n'
    text = TINY.replace('flavor = "debug"\n', experts.replace("{", "{{").replace("}", "}}"))
    start, _, end = text.partition("overrides")
    rest = end.partition("\n")[2]
    return write_run(folder, f"{start}overrides = {{{{{OURS}, tie_embeddings = false, {sizes}}}}}\n{rest}")


@deep_rows(("size", "overrides"), [(1, []), (4, ["--parallel.cp=2"])], default=[(1, [])])
def test_experts_of_transformers_have_their_logits_here_and_back_there_after_training(
    ranks: Callable[[int], RankPool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    overrides: list[str],
) -> None:
    path = write_experts(tmp_path)
    tokens, labels = ranks(1)(sequences, path)[0]
    _, their_logits = in_transformers(tmp_path / "hub", tokens)
    their_loss = nn.functional.cross_entropy(their_logits.flatten(0, 1), labels.flatten())
    weights, loss, logits = ranks(size)(first_step, path, *overrides)[0]
    assert loss == pytest.approx(their_loss.item(), rel=1e-5)
    assert logits is None or close(logits, their_logits[:1])
    files = [load_file(file) for file in (tmp_path / "hub").glob("*.safetensors")]
    theirs = {name: tensor for file in files for name, tensor in file.items()}
    for name, weight in weights.items():
        for other, entry in hub_names(name, weight.shape, MOE_HUB.names):
            assert torch.equal(weight if entry is None else weight[entry], theirs.pop(other)), other
    assert not theirs

    ranks(size)(train, path, "--curriculum.stages[0].steps=2", *overrides)
    monkeypatch.setattr(hub_module, "MAX_FILE_BYTES", 100_000)
    export(tmp_path / "run", tmp_path / "out")
    # In fp32 rounding may choose between two experts that a token is as good as torn between.
    back = in_transformers(tmp_path / "out", tokens[:1], torch.float64)[1]
    assert close(back, logits_here(tmp_path / "run", tokens[:1], torch.float64))
    assert not close(back, their_logits[:1]), "it was trained"


WIDE = {
    "FSDP 2 x CP 2 x TP 2": ("qwen3", 8, ["--parallel.cp=2", "--parallel.tp=2"]),
    "CP 2 x TP 2": ("qwen2, windows in the last layers", 4, ["--parallel.cp=2", "--parallel.tp=2"]),
    "PP 2 x FSDP 2": ("llama", 4, ["--parallel.pp=2"]),
}


@deep_rows("layout", WIDE, default=["CP 2 x TP 2"])
def test_the_weights_arrive_bit_for_bit_on_ranks_and_give_the_same_loss(
    ranks: Callable[[int], RankPool], tmp_path: Path, layout: str
) -> None:
    family, size, overrides = WIDE[layout]
    path = write_start(tmp_path, family, "100KB")
    tokens, labels = ranks(1)(sequences, path)[0]
    their_weights, their_logits = in_transformers(tmp_path / "hub", tokens)
    their_loss = nn.functional.cross_entropy(their_logits.flatten(0, 1), labels.flatten()).item()
    found: set[str] = set()
    for weights, loss, _ in ranks(size)(first_step, path, *overrides):
        assert loss == pytest.approx(their_loss, rel=1e-5)
        found |= weights.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, their_weights[hub_names(name, (), HUB.names)[0][0]]), name
    assert {hub_names(name, (), HUB.names)[0][0] for name in found} == their_weights.keys()


def read_rows(rows: int) -> tuple[int, int, int]:
    """(first row, last row, rows held) of a tensor cut twice along the rows, as a rank reads it."""
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(rows * 2.0).view(rows, 2)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    (first, stop) = (shard_slices(sharded)[0].start, shard_slices(sharded)[0].stop)
    assert torch.equal(whole[shard_slices(sharded)], sharded.to_local())
    return first, stop, len(sharded.to_local())


def test_a_rank_reads_its_own_rows_and_none_where_it_has_none(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(4)(read_rows, 6) == [(0, 2, 2), (2, 4, 2), (4, 6, 2), (6, 6, 0)]


def test_a_rank_reads_no_more_of_a_file_than_it_holds(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    save_file({"w": torch.arange(64.0).view(8, 8)}, tmp_path / "one.safetensors")
    assert ranks(2)(rows_read, tmp_path / "one.safetensors") == [
        [(slice(0, 4), slice(0, 8))],
        [(slice(4, 8), slice(0, 8))],
    ]


def rows_read(path: Path) -> list[Any]:
    """What a rank asks a file for."""
    asked: list[Any] = []
    parameter = distribute_tensor(torch.zeros(8, 8), init_device_mesh("cpu", (2,)), [Shard(0)])
    with safe_open(path, framework="pt") as file:
        piece = file.get_slice("w")

        class Watched:
            def get_shape(self) -> list[int]:
                return piece.get_shape()

            def __getitem__(self, where: Any) -> Tensor:
                asked.append(where)
                return piece[where]

        read_shard(Watched(), [0, 0], parameter)
    assert torch.equal(parameter.full_tensor(), torch.arange(64.0).view(8, 8))
    return asked


def test_the_trained_length_theta_and_scaling_are_in_the_config_and_other_files_come_along(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_start(tmp_path, "llama")
    (tmp_path / "hub" / "generation_config.json").write_text('{"eos_token_id": 7}')
    ranks(1)(train, path, "--curriculum.stages[0].steps=1", "--curriculum.stages[0].rope.theta=1e6")
    with recorded_syncs() as is_flushed:
        assert export_program.main([str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    written = (tmp_path, tmp_path / "out", *(tmp_path / "out").iterdir())
    assert [path.name for path in written if not is_flushed(path)] == [], "a power cut would take them"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 128
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 1e6
    assert config["rope_scaling"]["factor"] == 8.0
    assert config["bos_token_id"] == 1, "what the run does not change stays as it was"
    # Of the checkpoint, and of the tokenizer, with which documents ended.
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": [7, 256]}
    assert {x.dtype for x in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert export_program.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 2


def test_fresh_weights_leave_what_belongs_to_a_checkpoints_weights_out_of_the_export(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path, hub = write_start(tmp_path, "llama"), tmp_path / "hub"
    (hub / "generation_config.json").write_text('{"eos_token_id": 7}')
    start = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps(start | {"quantization_config": {"quant_method": "fp8"}}))
    smaller = ("--model.load_weights=false", "--model.overrides.n_layers=2", "--curriculum.stages[0].steps=1")
    ranks(1)(train, path, *smaller)
    export(tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["num_hidden_layers"] == 2
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": [config["eos_token_id"]]
    }
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_run_of_its_own_exports_with_its_tokenizer(
    ranks: Callable[[int], RankPool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, TINY.replace('kind = "bytes"', 'kind = "sentencepiece"\nvocab_size = 400'))
    ranks(1)(train, path, "--curriculum.stages[0].steps=1")
    export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").stat().st_size > 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": [1]}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.tie_word_embeddings
    own = (tmp_path / "out" / "tokenizer.model").read_bytes()
    # What would be trained now is another; and then there is nothing to train one on.
    (tmp_path / "corpus" / "new.py").write_text("zebra quagga\n" * 2000)
    export(tmp_path / "run", tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.model").read_bytes() == own
    shutil.rmtree(tmp_path / "corpus")
    shutil.rmtree(tmp_path / "cache")
    export(tmp_path / "run", tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "tokenizer.model").read_bytes() == own
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert export_program.main([str(tmp_path / "run"), str(tmp_path / "other")]) == 2
    assert "is not a checkpoint and contains none" in capsys.readouterr().err


def logits_here(checkpoint: Path, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    model = load_model(open_saved_model(checkpoint), torch.device("cpu")).to(dtype)
    with torch.no_grad():
        return model(tokens, torch.arange(tokens.shape[1]), iter([KVCache() for _ in model.layers]))  # type: ignore[union-attr]


def test_each_stage_end_is_written_for_transformers_beside_training_and_what_is_missing_at_the_next_start(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_run(tmp_path, TWO_STAGES.replace("steps = 8", "steps = 2").replace("steps = 6", "steps = 2"))
    lines = ranks(2)(train, path, "--checkpoint.export=float32")[0]
    assert lines == ranks(2)(train, path, "--checkpoint.export=float32")[0], "a finished run has nothing to do"
    hub, checkpoints = tmp_path / "run" / "hub", tmp_path / "run" / "checkpoints"
    for name, seq_len, theta in (("step-2", 128, 10000.0), ("step-4", 256, 50000.0)):
        config = json.loads((hub / name / "config.json").read_text())
        assert (config["max_position_embeddings"], config["rope_theta"]) == (seq_len, theta)
        tokens = torch.randint(256, (1, seq_len))
        assert close(in_transformers(hub / name, tokens)[1], logits_here(checkpoints / name, tokens))
    assert {path.name for path in hub.iterdir()} == {"step-2", "step-4"}

    shutil.rmtree(hub / "step-2")
    (hub / "step-2.partial").mkdir()
    ranks(2)(train, path, "--checkpoint.export=bfloat16")
    assert json.loads((hub / "step-2" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {path.name for path in hub.iterdir()} == {"step-2", "step-4"}


def test_a_stage_that_is_trained_again_is_written_again(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    path, keys = write_run(tmp_path, TINY), ("--checkpoint.export=float32", "--checkpoint.interval=1")
    ranks(1)(train, path, *keys, "--curriculum.stages[0].steps=2")
    hub, checkpoints = tmp_path / "run" / "hub", tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step-2")
    ranks(1)(train, path, *keys, "--curriculum.stages[0].steps=2", "--optimizer.lr=0.1")
    tokens = torch.randint(256, (1, 128))
    assert close(in_transformers(hub / "step-2", tokens)[1], logits_here(checkpoints / "step-2", tokens))
    assert {path.name for path in hub.iterdir()} == {"step-2"}


def train_and_listen(path: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    export_module.logger.addHandler(handler)
    try:
        return train(path, *overrides), lines
    finally:
        export_module.logger.removeHandler(handler)


def test_a_stage_end_that_cannot_be_written_is_told_and_harms_nothing(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_run(tmp_path, TINY)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hub").write_text("no folder")
    steps, told = ranks(1)(train_and_listen, path, "--checkpoint.export=float32", "--curriculum.stages[0].steps=2")[0]
    assert len(steps) == 2
    assert [line for line in told if "step-2: [Errno 20] Not a directory" in line and line.startswith("NO EXPORT of")]


def test_an_export_that_fails_leaves_nothing_and_says_why(
    ranks: Callable[[int], RankPool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_run(tmp_path, TINY)
    ranks(1)(train, path, "--curriculum.stages[0].steps=1")

    def full(file: dict[str, Tensor], path: Path, **_: Any) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(hub_module, "save_file", full)
        assert export_program.main([str(tmp_path / "run"), str(tmp_path / "out" / "a")]) == 2
    assert f"error: {tmp_path}/out/a cannot be written: No space left" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())

    saved = open_saved_model(tmp_path / "run")
    for file in saved.path.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        assert export_program.main([str(tmp_path / "run"), str(tmp_path / "out" / "c")]) == 2
        assert f"{file.name} has another checksum than when it was written" in capsys.readouterr().err
        file.unlink()
    with pytest.raises(ConfigError, match=r"step-1 cannot be loaded: .*FileNotFoundError"):
        saved.read(["norm.weight"])
    assert export_program.main([str(tmp_path / "run"), str(tmp_path / "out" / "b")]) == 2
    assert "cannot be read (No such file or directory)" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def change_of_rope(path: Path) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchtitan_cp.training.resume")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        started(path)
        started(path, "--curriculum.stages[0].rope.theta=2e6")
    finally:
        logger.removeHandler(handler)
    return [message for message in messages if "trained with:" in message]


def test_another_rotary_embedding_than_the_checkpoint_s_is_said(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    (message,) = ranks(1)(change_of_rope, write_start(tmp_path, "llama"))[0]
    assert message.endswith(
        "stage 1 changes the rotary embedding they were trained with: rope_theta 500000.0 -> 2000000.0"
    )


def test_a_checkpoint_that_names_no_theta_has_that_of_its_family(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """As the published config.json of Llama 2."""
    path = write_start(tmp_path, "llama")
    file = tmp_path / "hub" / "config.json"
    config = json.loads(file.read_text())
    for key in ("rope_parameters", "rope_theta"):
        config.pop(key, None)
    file.write_text(json.dumps(config | {"rope_scaling": None}))
    messages = ranks(1)(change_of_rope, path)[0]
    assert len(messages) == 2
    assert "rope_theta 10000.0 -> 500000.0" in messages[0]
    assert "rope_theta 10000.0 -> 2000000.0" in messages[1]
