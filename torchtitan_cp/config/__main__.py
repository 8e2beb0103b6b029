"""`python -m torchtitan_cp.config` prints the reference of the TOML file as Markdown."""

from torchtitan_cp.config.reference import as_markdown

if __name__ == "__main__":
    print(as_markdown(), end="")
