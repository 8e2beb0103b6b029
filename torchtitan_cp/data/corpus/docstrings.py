"""Conversations about Python code, made from its docstrings: for runs without a network or a data set."""

import ast
import warnings
from collections.abc import Iterator


def docstring_conversations(text: str) -> Iterator[list[dict[str, str]]]:
    """What each function and class of a file does: asked with the file, answered by its docstring's first line.

    The file is given without the docstring that answers. Text that is no Python yields nothing.

    Yields:
        the messages.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the text
            definitions = list(_definitions(ast.parse(text), ""))
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.split("\n")
    for node, name in definitions:
        answer, docstring = (ast.get_docstring(node) or "").partition("\n")[0].strip(), node.body[0]
        if answer:
            rest = "\n".join(lines[: docstring.lineno - 1] + lines[docstring.end_lineno :])
            question = f"{rest}\n\nWhat does {name} do?"
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef | ast.ClassDef, str]]:
    """Functions and classes in the order of the file, each with its dotted name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield child, prefix + child.name
            yield from _definitions(child, f"{prefix}{child.name}.")
