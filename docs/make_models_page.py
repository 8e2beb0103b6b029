"""Prints `docs/models.md`, the table of sizes, with the `rope` of each published model."""

from collections.abc import Iterator, Mapping
from typing import Any

from models import ARCHITECTURES
from models.architecture import Architecture

HEAD = """# Models

`[model] architecture` and `flavor`; `overrides = {{n_layers = 2}}` replaces a size. Made by
`python docs/make_models_page.py > docs/models.md`.
{tables}"""

_LLAMA3 = {"theta": 500000.0, "kind": "llama3", "factor": 8.0}
_SCALED_8 = {**_LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_seq_len": 8192}
_THETAS = {"llama2": 10000.0, "mistral": 10000.0, "qwen2": 1e6, "qwen3": 1e6}
_FLAVORS = {architecture.name: architecture.flavors for architecture in ARCHITECTURES}

# A stage's `rope = {...}` that continues a model as published, by architecture and flavor; Llama 3 itself has theta 5e5
# alone. Source: the config.json of each released checkpoint.
PUBLISHED_ROPE: dict[str, dict[str, Mapping[str, Any]]] = {
    "llama": {
        **{name: {"theta": _THETAS[name.split("-")[0]]} for name in _FLAVORS["llama"] if "-" in name},
        **{name: {**_SCALED_8, "factor": 32.0} for name in ("1B", "3B")},
        **{name: _SCALED_8 for name in ("8B", "70B", "405B")},
        "mistral-7B-v0.3": {"theta": 1e6},
    },
    "moe": {name: {"theta": 1e6} for name in _FLAVORS["moe"] if name != "debug"},
    "qwen3_5": {name: {"theta": 1e7} for name in _FLAVORS["qwen3_5"] if name != "debug"},
}


def as_markdown() -> str:
    """The tables of all architectures."""
    return HEAD.format(tables="".join(_table(architecture) for architecture in ARCHITECTURES if architecture.flavors))


def _table(architecture: Architecture) -> str:
    head = "| flavor | E | layers | Hq | Hkv | D | MLP | V | besides | published with `rope =` |\n"
    rows = "\n".join(_rows(architecture))
    return f"\n## {architecture.name}\n\n{head}|{'---|' * 10}\n{rows}\n"


def _rows(architecture: Architecture) -> Iterator[str]:
    for name, args in architecture.flavors.items():
        sizes = [args.dim, args.n_layers, args.n_heads, args.n_kv_heads, args.head_dim, args.ffn_dim]
        options = [option for option in ("tie_embeddings", "qkv_bias", "qk_norm", "sinks") if getattr(args, option)]
        options += [f"windows = {list(args.windows)}"] if any(args.windows) else []
        if args.n_experts:
            options.append(f"{args.n_experts} experts, {args.experts_per_token} a token")
        if any(args.state_sizes):
            heads = f"{args.linear_key_heads} key and {args.linear_value_heads} value heads of {args.linear_key_dim}"
            options.append(f"gated delta nets of {heads}, attention in one layer of {args.attention_every}")
        published = PUBLISHED_ROPE.get(architecture.name, {}).get(name, {})
        rope = ", ".join(f"{key} = {_toml(value)}" for key, value in published.items())
        cells = [f"`{name}`", *map(str, sizes), str(args.vocab_size or "the tokenizer's"), ", ".join(options)]
        yield f"| {' | '.join(cells)} | {f'`{{{rope}}}`' if rope else ''} |"


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    print(as_markdown(), end="")
