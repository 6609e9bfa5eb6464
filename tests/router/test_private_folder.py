"""Folders of routers that were killed are removed by the next one; those of living ones are not."""

import os
import stat
from pathlib import Path

from router.private_folder import PrivateFolder


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left, living, foreign = tmp_path / "springtide-router-left", PrivateFolder(tmp_path), tmp_path / "other"
    for folder in (left, foreign):
        folder.mkdir()
        (folder / "grpc").touch()
    young = tmp_path / "springtide-router-young"
    young.mkdir()
    for folder in (left, living.path, foreign):
        os.utime(folder, (1, 1))
    mine = PrivateFolder(tmp_path)
    assert not left.exists()
    assert all(folder.exists() for folder in (living.path, foreign, young, mine.path))
    assert stat.S_IMODE(mine.path.stat().st_mode) == 0o700
    for folder_ in (mine, living, mine):
        folder_.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "springtide-router-young"]


def test_a_long_place_is_not_used(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    folder = PrivateFolder(long)
    assert len(str(folder.path / "grpc")) < 100
    folder.close()
    assert not folder.path.exists()
