"""Prints `docs/config.md`, every key of the TOML file as tables, from the sections' own docstrings."""

from torchtitan_cp.config.reference import first_keys, sections


def as_markdown() -> str:
    """Every key as tables."""
    made_by = "Made by `python docs/make_config_page.py > docs/config.md`."
    first = [f"- `{key.name}`: {key.help}" for key in first_keys()]
    lines = ["# Every key of the TOML file", "", made_by, "", "## What most people set", "", *first, ""]
    for header, about, keys in sections():
        rows = (
            f"| `{key.name}` | {key.type} | `{key.default}` | " + key.help.replace("|", "\\|") + " |" for key in keys
        )
        lines += [f"## `{header}`", "", about, "", "| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown(), end="")
