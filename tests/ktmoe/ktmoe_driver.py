"""The stub driver's own functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Stub:
    """Streams and graphs of stub_driver.c, by their handles."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lib = ctypes.CDLL(str(path))
        for name in ("stub_stream", "stub_end_capture"):
            getattr(self.lib, name).restype = ctypes.c_void_p

    def stream(self) -> int:
        return int(self.lib.stub_stream())

    @staticmethod
    def host_function(body: Callable[[], object]) -> Any:
        """Return what `launch` takes, and what must live until its stream has passed it."""
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: body() and None)

    def launch(self, stream: int, function: Any) -> None:
        """Let a stream call a function."""
        self.lib.stub_launch(ctypes.c_void_p(stream), function)

    def synchronize(self, stream: int) -> None:
        assert self.lib.stub_synchronize(ctypes.c_void_p(stream)) == 0

    def begin_capture(self, stream: int) -> None:
        self.lib.stub_begin_capture(ctypes.c_void_p(stream))

    def end_capture(self, stream: int) -> int:
        return int(self.lib.stub_end_capture(ctypes.c_void_p(stream)))

    def replay(self, graph: int, stream: int) -> None:
        self.lib.stub_replay(ctypes.c_void_p(graph), ctypes.c_void_p(stream))

    def destroy(self, stream: int) -> None:
        self.lib.stub_destroy(ctypes.c_void_p(stream))

    def fail_next_launch(self) -> None:
        self.lib.stub_fail_next_launch()
