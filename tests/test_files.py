"""Files that are replaced whole or not at all."""

from pathlib import Path

import pytest

from deepinfer_jax.files import replacing


def test_the_file_appears_whole_and_readable_by_everyone(tmp_path: Path):
    path = tmp_path / "a.json"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == tmp_path
        assert not path.exists()
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_rename_that_fails_leaves_no_temporary_file(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError), replacing(tmp_path / "folder") as temporary:
        temporary.write_text("a folder cannot be replaced by a file")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_missing_folder_is_the_writers_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "no" / "a.json"):
        pass
