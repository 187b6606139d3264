"""Ends this process when the tritonserver that started it is gone.

A stub whose server was killed stays behind with the model in memory: Triton's own loop does not notice.
"""

from __future__ import annotations

import os
import threading
import time

CHECK_S = 1.0


def watch_parent() -> None:
    """Start a daemon thread that looks now and then whether the parent process is still the same."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(CHECK_S)
        # not sys.exit: other threads may be waiting for an answer of the dead server
        os._exit(1)

    threading.Thread(target=watch, name="noria-parent-watch", daemon=True).start()
