"""Prints `docs/models.md`, the table of sizes, with the `rope` of each published model."""

from collections.abc import Iterator

from models import ARCHITECTURES
from models.architecture import Architecture

HEAD = """# Models

`[model] architecture` and `flavor`; `overrides = {{n_layers = 2}}` replaces a size. Made by
`python docs/make_models_page.py > docs/models.md`.
{tables}"""


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
        rope = ", ".join(f"{key} = {_toml(value)}" for key, value in architecture.published_rope.get(name, {}).items())
        cells = [f"`{name}`", *map(str, sizes), str(args.vocab_size or "the tokenizer's"), ", ".join(options)]
        yield f"| {' | '.join(cells)} | {f'`{{{rope}}}`' if rope else ''} |"


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    print(as_markdown(), end="")
