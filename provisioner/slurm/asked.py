"""What a killed provisioner leaves for the next one: that it had begun an sbatch."""

import os
from pathlib import Path


class AskedFiles:
    """When an sbatch was begun whose answer has not come: one small file each, so that a new process knows too."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._at = {path.name: path.stat().st_mtime for path in folder.iterdir()}

    def put(self, node_id: str, now: float) -> None:
        self._at[node_id] = now
        path = self._folder / node_id
        path.touch()
        os.utime(path, (now, now))

    def remove(self, node_id: str) -> None:
        if self._at.pop(node_id, None) is not None:
            (self._folder / node_id).unlink(missing_ok=True)

    def at(self, node_id: str) -> float | None:
        return self._at.get(node_id)
