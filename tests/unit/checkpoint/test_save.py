"""What an interrupted save leaves."""

from pathlib import Path

from torchtitan_cp.checkpoint.save import delete_partial


def test_what_is_left_of_a_save_is_deleted_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "step-3.partial").mkdir()
    (tmp_path / "step-5.partial").touch()
    (tmp_path / "step-4").mkdir()
    delete_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
