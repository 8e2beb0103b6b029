"""The table of shapes is as documented, and each published rotary embedding is one that a stage may have."""

import runpy
from pathlib import Path

import pytest

from models import ARCHITECTURES
from models.architecture import Architecture
from torchtitan_cp.config.load import build
from torchtitan_cp.config.rope import Rope, check_rope

DOCS = Path(__file__).parents[3] / "docs"
PAGE = runpy.run_path(str(DOCS / "make_models_page.py"))
PUBLISHED = [
    (architecture, name) for architecture in ARCHITECTURES for name in PAGE["PUBLISHED_ROPE"].get(architecture.name, {})
]


def test_the_page_of_models_is_the_table_that_is_printed() -> None:
    made = PAGE["as_markdown"]()
    assert (DOCS / "models.md").read_text(encoding="utf-8") == made, "run python docs/make_models_page.py"


@pytest.mark.parametrize(("architecture", "name"), PUBLISHED, ids=lambda value: getattr(value, "name", value))
def test_a_stage_takes_the_rope_that_a_flavor_was_published_with(architecture: Architecture, name: str) -> None:
    published = PAGE["PUBLISHED_ROPE"][architecture.name][name]
    check_rope(build(Rope, dict(published), where="rope", file="published"), 131072, "rope")
    assert architecture.flavors[name].problem() is None


# Billions of parameters as the checkpoints' pages give them; tied embeddings count once.
PAGES = {
    "llama2-7B": "6.74",
    "llama2-13B": "13.02",
    "mistral-7B": "7.24",
    "1B": "1.24",
    "3B": "3.21",
    "8B": "8.03",
    "70B": "70.6",
    "405B": "406",
    "qwen2-0.5B": "0.49",
    "qwen2-1.5B": "1.54",
    "qwen2-3B": "3.09",
    "qwen2-7B": "7.62",
    "qwen2-14B": "14.8",
    "qwen2-32B": "32.8",
    "qwen2-72B": "72.7",
    "qwen3-8B": "8.19",
    "qwen3-14B": "14.8",
    "qwen3-32B": "32.8",
}


@pytest.mark.parametrize("name", PAGES)
def test_a_flavor_has_the_published_number_of_parameters(name: str) -> None:
    shape = ARCHITECTURES[0].flavors[name]
    embedding = 0 if shape.tie_embeddings else shape.dim * shape.vocab_size
    bias = shape.n_layers * shape.head_dim * (shape.n_heads + 2 * shape.n_kv_heads) if shape.qkv_bias else 0
    billions = (shape.linear_parameters() + embedding + bias) / 1e9
    digits = len(PAGES[name].partition(".")[2])
    assert f"{billions:.{digits}f}" == PAGES[name]
