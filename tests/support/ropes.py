"""Rotary embeddings: two published kinds, any drawn at random, and a curriculum with one."""

import math
import random
from typing import Any

from torchtitan_cp.config import Config
from torchtitan_cp.config.rope import KEYS_BY_KIND, Rope
from torchtitan_cp.config.sections import Curriculum, Stage


def draw(kind: str, generator: random.Random, head_dim: int = 0) -> tuple[Rope, int, int]:
    """A scaling with keys drawn at random, a head_dim (0: drawn too) and a length."""
    drawn, original = generator.choice([16, 64, 80, 96, 128, 256]), generator.choice([2048, 4096, 8192, 32768])
    head_dim = head_dim or drawn
    keys: dict[str, Any] = {"factor": generator.choice([2.0, 3.5, 8.0, 40.0])}
    if kind == "none":
        keys.clear()
    if "original_seq_len" in KEYS_BY_KIND[kind]:
        keys["original_seq_len"] = original
    if kind == "llama3":
        keys["low_freq_factor"], keys["high_freq_factor"] = generator.uniform(0.5, 2), generator.uniform(4, 8)
    if kind == "yarn":
        keys["truncate"] = generator.random() < 0.5
        keys["beta_fast"], keys["beta_slow"] = generator.uniform(8, 64), generator.uniform(0.5, 4)
    if kind == "longrope":
        keys["long_factor"] = tuple(generator.uniform(1, 64) for _ in range(head_dim // 2))
        keys["short_factor"] = tuple(generator.uniform(1, 2) for _ in range(generator.choice([0, head_dim // 2])))
    attention = generator.choice(["published", "given", "deepseek"]) if "attention_factor" in KEYS_BY_KIND[kind] else ""
    if attention == "given":
        keys["attention_factor"] = generator.uniform(0.5, 2)
    if attention == "deepseek" and kind == "yarn":
        keys["mscale"], keys["mscale_all_dim"] = generator.uniform(0.5, 1.5), generator.uniform(0.5, 1.5)
    rope = Rope(math.exp(generator.uniform(math.log(1e3), math.log(1e8))), kind, **keys)
    return rope, head_dim, original * generator.choice([1, 2, 16])


YARN = Rope(kind="yarn", factor=16.0, original_seq_len=4096)
LONGROPE = Rope(kind="longrope", factor=4.0, original_seq_len=4096, long_factor=(2.0, 3.0, 4.0, 5.0))


def config_of(rope: Rope) -> Config:
    stages = (
        Stage(seq_len=4096, steps=1, global_batch_tokens=4096),
        Stage(seq_len=16384, steps=1, global_batch_tokens=16384, rope=rope),
    )
    return Config(curriculum=Curriculum(stages))
