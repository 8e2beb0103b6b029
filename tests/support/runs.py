"""Small real runs of the Trainer for tests: a tiny Llama on real text, on the ranks of a pool."""

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models import ARCHITECTURES
from torchtitan_cp.attention.local_shard import local_tensor, shard_slices
from torchtitan_cp.config import Config, load_config
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.data.batches.micro_batches import MicroBatch, Samples, read_step
from torchtitan_cp.data.batches.packed_stream import PackedSequence
from torchtitan_cp.parallel.nf4 import SHARDS_BYTES
from torchtitan_cp.runtime.device import start_ranks
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.trainer import Trainer

TINY = """
[job]
dump_folder = "{folder}/run"

[model]
flavor = "debug"
overrides = {{dim = 48, n_layers = 2, n_heads = 4, n_kv_heads = 2, head_dim = 16, ffn_dim = 96}}

[tokenizer]
kind = "bytes"

[data]
source = "text"
path = "{folder}/corpus"
cache_folder = "{folder}/cache"
validation_fraction = 0.25

[training]
compute_dtype = "float32"
loss_chunk_tokens = 40

[optimizer]
lr = 3e-3

[metrics]
tensorboard = false
peak_tflops = 1.0

[evaluation]
tokens = 512
at_start = false
interval = 0

[[curriculum.stages]]
seq_len = 128
steps = 20
global_batch_tokens = 512
"""


needs_bytes = pytest.mark.skipif(not SHARDS_BYTES, reason="FSDP shards bytes from torch 2.13 on")
# Most weights of these sizes are whole groups of NF4.
IN_NF4 = (
    *(f"--model.overrides.{size}" for size in ("dim=128", "head_dim=32", "ffn_dim=128")),
    *("--lora.rank=4", "--lora.base=nf4"),
)


def write_run(folder: Path, text: str = TINY) -> Path:
    """A corpus of this interpreter's own files, and a config that trains on it. Returns the config."""
    corpus = folder / "corpus"
    corpus.mkdir()
    library = Path(json.__file__).parents[1]
    for name in (
        "argparse",
        "ast",
        "bisect",
        "calendar",
        "copy",
        "csv",
        "dis",
        "heapq",
        "hmac",
        "queue",
        "shlex",
        "uuid",
    ):
        (corpus / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    path = folder / "run.toml"
    path.write_text(text.format(folder=folder))
    return path


CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}"
)


def write_conversations(folder: Path) -> Path:
    """Conversations of one to six turns, and a config that trains on them. Returns the config."""
    rows = [
        [
            {"role": role, "content": f"{text} {number} {turn} " + word * (number * (turn + 1) % 7)}
            for turn in range(1 + number % 6)
            for role, text, word in (("user", "question", "why "), ("assistant", "answer", "so "))
        ]
        for number in range(300)
    ]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in rows))
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    keys = 'source = "jsonl"\nmessages_field = "messages"\nchat_template = "{folder}/chat.jinja"\n'
    text = TINY.replace('source = "text"\n', keys).replace("{folder}/corpus", "{folder}/chats.jsonl")
    text = text.replace("[training]\n", '[training]\nloss_normalization = "conversation"\n')
    path = folder / "run.toml"
    path.write_text(text.format(folder=folder))
    return path


def prepared(path: Path, *overrides: str) -> Trainer:
    """On a rank: the Trainer of a config."""
    register(ARCHITECTURES)
    config: Config = load_config(path, overrides)
    return Trainer(config, start_ranks(60.0))


def train(path: Path, *overrides: str) -> list[dict[str, Any]]:
    """On a rank: run to the end; the lines of metrics.jsonl."""
    return run_to_end(prepared(path, *overrides))


def run_to_end(trainer: Trainer) -> list[dict[str, Any]]:
    """On a rank: train; the lines of metrics.jsonl, when rank 0 has written them."""
    trainer.run()
    dist.barrier()
    return [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]


def train_and_first_gradients(path: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """On a rank: run to the end without checkpoints; its lines, and the full gradients its first step took."""
    trainer = prepared(path, "--checkpoint.enable=false", *overrides)
    fill_adapters(trainer)
    forward_backward, first = trainer.forward_backward, dict[str, torch.Tensor]()

    def remembered(batches: tuple[MicroBatch, ...]) -> Any:
        report = forward_backward(batches)
        if not first:
            first.update(full_gradients(trainer))
        return report

    trainer.forward_backward = remembered  # type: ignore[method-assign]
    return run_to_end(trainer), first


@torch.no_grad()
def fill_adapters(trainer: Trainer) -> None:
    """On a rank: give the second matrices of adapters values that depend on their names alone, in place of zeros."""
    for name, parameter in trainer.model.parts.named_parameters():
        if name.endswith("lora_b"):
            seed = zlib.crc32(name.partition(".")[2].encode())
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            local_tensor(parameter).copy_(0.05 * values[shard_slices(parameter)])


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


def first_gradients(path: Path, *overrides: str) -> tuple[float, dict[str, torch.Tensor]]:
    """On a rank: loss of the first step, and the full gradient of every parameter by name."""
    trainer = prepared(path, *overrides)
    shape = trainer.enter_stage(trainer.stages[0])
    return gradients_of(trainer, read_step(trainer.data_pipeline.samples, shape, 0))


class Packed:
    """Samples whose sequences are cut into documents of these lengths."""

    def __init__(self, samples: Samples, lengths: tuple[int, ...]) -> None:
        self.samples, self.lengths = samples, lengths

    def sequence(self, number: int) -> PackedSequence:
        return replace(self.samples.sequence(number), document_lengths=self.lengths)

    def document_lengths(self, number: int) -> tuple[int, ...]:
        return self.lengths


def packed_gradients(path: Path, *overrides: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The same where each sequence is packed documents, and has other numbers of tokens that count; one has none."""
    trainer = prepared(path, *overrides)
    shape = trainer.enter_stage(trainer.stages[0])
    batches = []
    for batch in read_step(Packed(trainer.data_pipeline.samples, (5, 70, 1, shape.seq_len - 76)), shape, 0):
        counted = [number * 37 % shape.seq_len for number in batch.numbers]
        kept = batch.positions < torch.tensor(counted).unsqueeze(1)
        batches.append(replace(batch, labels=torch.where(kept, batch.labels, IGNORED)))
    return gradients_of(trainer, tuple(batches))


def gradients_of(trainer: Trainer, batches: tuple[MicroBatch, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    report = trainer.forward_backward(batches)
    assert not report.findings
    return report.loss, full_gradients(trainer)


def full_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """On a rank: the full gradient of every parameter of every pipeline stage that has one, by name."""
    own = {
        n: p.grad.full_tensor()
        for part in trainer.model.parts
        for n, p in part.named_parameters()
        if p.grad is not None
    }
    stages: list[Any] = [None] * trainer.meshes.pp.size()
    dist.all_gather_object(stages, own, group=trainer.meshes.pp.get_group())
    return {name: gradient for stage in stages for name, gradient in stage.items()}


EXPERTS = TINY.replace('flavor = "debug"', 'architecture = "moe"\nflavor = "debug"').replace(
    "ffn_dim = 96", "ffn_dim = 40, qk_norm = true, n_experts = 6, experts_per_token = 2, balance = 0.5"
)


def config_of_lines(folder: Path, *lines: str) -> Config:
    """A config of these lines and one step of 64 tokens."""
    path = folder / "run.toml"
    path.write_text(
        "\n".join([*lines, "[[curriculum.stages]]", "seq_len = 64", "steps = 1", "global_batch_tokens = 64"])
    )
    return load_config(path)
