"""Where tests lie: a file of tests/unit is named for the module it tests, or for what several modules do together."""

import ast
from pathlib import Path

from tests.support.pages import REPOSITORY

UNIT = REPOSITORY / "tests" / "unit"
FILES = sorted(path.relative_to(UNIT) for path in UNIT.rglob("test_*.py"))
# The code of a folder of tests/unit, where that is not the folder of this name in torchtitan_cp.
CODE = {"models": "models", "benchmarks": "benchmarks", "support": "tests/support"}
# Beside files called test_*_run.py, these test what no single module does.
OF_SEVERAL = {
    "test_layout.py",
    "test_train.py",  # train.py, which is in no folder
    "config/test_keys.py",
    "config/test_train_configs.py",
    "data/batches/test_masked_labels.py",
    "docs/test_docs.py",
    "docs/test_how_to_add.py",
    "docs/test_results.py",
    "models/test_flavors.py",
}


def is_of_a_module(file: Path) -> bool:
    """Whether a module, or a package whose __init__.py has code, has the place and name of a test file."""
    room, *folders = file.parent.parts or ("",)
    folder = REPOSITORY.joinpath(CODE.get(room, f"torchtitan_cp/{room}"), *folders)
    name = file.stem.removeprefix("test_")
    return any((folder / path).is_file() for path in (f"{name}.py", f"__{name}__.py", f"{name}/__init__.py"))


def test_a_unit_test_has_the_place_and_name_of_its_module() -> None:
    names = {file.as_posix() for file in FILES if not file.stem.endswith("_run") and not is_of_a_module(file)}
    assert names == OF_SEVERAL, "name a file for the module that it tests, or test_*_run.py"


def test_no_test_file_imports_another() -> None:
    for path in UNIT.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
                assert node.module.startswith("tests.support"), f"{path}: move what is shared to tests/support"
