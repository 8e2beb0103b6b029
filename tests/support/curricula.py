"""Configs of several stages, and the losses they were trained to."""

import json
from pathlib import Path

from tests.support.runs import TINY, write_run

# Two sources of the same folder, told apart by their names; three stages of other lengths, degrees and packing.
STAGES = """
[[data.sources]]
name = "early"
source = "text"
path = "{folder}/corpus/[a-c]*.py"
validation_fraction = 0.25

[[data.sources]]
name = "late"
source = "text"
path = "{folder}/corpus/[d-z]*.py"
validation_fraction = 0.0
max_document = 700

[[curriculum.stages]]
seq_len = 128
steps = 4
global_batch_tokens = 512
cp = 1

[[curriculum.stages]]
seq_len = 256
steps = 3
global_batch_tokens = 1024
cp = -1
rope = {{theta = 50000.0}}
data = {{mixture = {{early = 3.0, late = 1.0}}, document_mask = true, packing = "best_fit", packing_window = 8}}

[[curriculum.stages]]
seq_len = 512
steps = 3
global_batch_tokens = 2048
cp = 1
optimizer_state = "reset"
lr = {{peak = 1e-3, shape = "constant"}}
data = {{document_mask = true, restart_positions = true, short_share = 0.5, short_seq_len = 128}}
"""
MIXED = (
    TINY[: TINY.index("[[curriculum.stages]]")]
    .replace('source = "text"\npath = "{folder}/corpus"\n', "")
    .replace("validation_fraction = 0.25\n", "")
    + STAGES
)


DIMENSIONS = (
    TINY[: TINY.index("[[curriculum.stages]]")]
    + """
[[curriculum.stages]]
seq_len = 64
steps = 3
global_batch_tokens = 256

[[curriculum.stages]]
seq_len = 128
steps = 3
global_batch_tokens = 256
tp = {tp}
activation = {{checkpoint = "attention_saved", mlp_tiles = 2}}

[[curriculum.stages]]
seq_len = 64
steps = 3
global_batch_tokens = 256
pp = {pp}
activation = {{checkpoint = "none"}}
"""
)


def dimensions(folder: Path, tp: int, pp: int) -> Path:
    folder.mkdir()
    return write_run(folder, DIMENSIONS.replace("tp = {tp}", f"tp = {tp}").replace("pp = {pp}", f"pp = {pp}"))


def losses_of(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


# 8 steps of 128 tokens in four sequences, as many as the largest world, then 6 of 256 with another cp degree and theta.
TWO_STAGES = (
    TINY.replace("steps = 20", "steps = 8\ncp = 1")
    + """
[[curriculum.stages]]
seq_len = 256
steps = 6
global_batch_tokens = 512
cp = -1
rope = {{theta = 50000.0}}

[checkpoint]
interval = 5
keep = 10
"""
)
