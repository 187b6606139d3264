"""Set before anything is imported: quiet, offline, and with a stand-in for the module that only Triton's stub has."""

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

from support import fake_pb_utils

sys.modules["triton_python_backend_utils"] = fake_pb_utils  # type: ignore[assignment]
