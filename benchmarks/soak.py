"""Does a server that is under load for long grow, and how steady are its steps meanwhile?

    python benchmarks/soak.py [--seconds 600] [--concurrency 8] [--every 5] [--mode inflight] [--engine KEY=VALUE]
        [--cancel-share 0.15] [--invalid-share 0.05] [--reconnect-share 0.1] [--seed 0] [--json FILE]

Starts the real tritonserver and a load in a process of its own: clients that each send one request after another, of
which some are left midway, some are invalid, and after some the client connects anew. Memory, open files, threads and
KV blocks are read as time goes by, and once more at rest; every step is timed by the engine's own recording. At first
allocators warm up, which looks like growth: of fewer than 100 answers none is told. Exits with 1 if a request failed
that should not, a process died, or something was still held at rest; with 130 after Ctrl-C.
"""

from __future__ import annotations

import sys

from soak.command import main

if __name__ == "__main__":
    sys.exit(main())
