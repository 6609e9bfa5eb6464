"""A TCP wire between two processes that a test can make deaf: what one side says is lost, and neither notices."""

import contextlib
import select
import socket
import threading


class Wire:
    """Listens on `port`, passes bytes to and from 127.0.0.1:`towards`. While `deaf` is set, those back are lost."""

    def __init__(self, towards: int) -> None:
        self._towards = towards
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.deaf = threading.Event()  # what the far side says reaches nobody
        self._over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._over.is_set():
                near, _ = self._listener.accept()
                threading.Thread(target=self._pass, args=(near,), daemon=True).start()

    def _pass(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._towards), 5) as far:
            while not self._over.is_set():
                ready, _, _ = select.select([near, far], [], [], 0.2)
                for side, other in ((near, far), (far, near)):
                    if side not in ready:
                        continue
                    data = side.recv(65536)
                    if not data:
                        return
                    if side is near or not self.deaf.is_set():
                        other.sendall(data)
