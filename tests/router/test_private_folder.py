"""Folders of routers that were killed are removed by the next one; those of living ones are not."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.private_folder import PrivateFolder


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a path so short that sockets can have names in it."""
    path = Path(tempfile.mkdtemp(prefix="stp-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def test_what_a_killed_process_left_is_removed(place: Path) -> None:
    left, living, foreign = place / "springtide-router-left", PrivateFolder(place), place / "other"
    for folder in (left, foreign):
        folder.mkdir()
        (folder / "grpc").touch()
    young = place / "springtide-router-young"
    young.mkdir()
    for folder in (left, living.path, foreign):
        os.utime(folder, (1, 1))
    mine = PrivateFolder(place)
    assert not left.exists()
    assert all(folder.exists() for folder in (living.path, foreign, young, mine.path))
    assert stat.S_IMODE(mine.path.stat().st_mode) == 0o700
    for folder_ in (mine, living, mine):
        folder_.close()
    assert sorted(path.name for path in place.iterdir()) == ["other", "springtide-router-young"]


def test_a_long_place_is_not_used(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    folder = PrivateFolder(long)
    assert len(str(folder.path / "grpc")) < 100
    folder.close()
    assert not folder.path.exists()
