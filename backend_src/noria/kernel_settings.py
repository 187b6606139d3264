"""Which kernels can do what a configuration asks for, as far as its settings alone tell.

Three families: `cpu`, the compiled kernels of an x86-64 CPU; `triton`, for an NVIDIA GPU; `torch`, torch's operators,
which run everywhere. What the machine and the model allow is found out where they are opened (`runtime.kernel_choice`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from noria.errors import ConfigError

# the first that can is taken
FAMILIES = ("cpu", "triton", "torch")
_WEIGHTS = {"cpu": ("none", "int8", "int4"), "triton": ("none", "int8", "fp8"), "torch": ("none",)}
_DTYPES = {"cpu": ("float32",), "triton": ("float32", "bfloat16", "float16")}
# beside that of the other numbers
_KV_DTYPES = {"cpu": ("bfloat16", "int8"), "triton": ("int8", "fp8"), "torch": ()}


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """The fields of EngineConfig that kernels differ in. kv_dtype: the name of a number type, `auto` resolved."""

    kernels: str
    dtype: str
    weight_quantization: str
    kv_dtype: str
    deterministic: bool

    def obstacle(self, family: str) -> str | None:
        """What the family cannot do of all this, in words."""
        if self.kernels not in ("auto", family):
            return f"kernels is {self.kernels}"
        if self.dtype not in _DTYPES.get(family, (self.dtype,)):
            return f"dtype must be {_any_of(_DTYPES[family])}, not {self.dtype}"
        if self.weight_quantization not in _WEIGHTS[family]:
            return f"weight_quantization must be {_any_of(_WEIGHTS[family])}, not {self.weight_quantization}"
        kv_dtypes = (self.dtype, *_KV_DTYPES[family])
        if self.kv_dtype not in kv_dtypes:
            return f"kv_cache_dtype must be {_any_of(kv_dtypes)}, not {self.kv_dtype}"
        if family == "triton" and self.kv_dtype != self.dtype == "float32":
            # numbers of one byte become operands of matrix instructions of 16 bits
            return f"kv_cache_dtype {self.kv_dtype} needs dtype bfloat16 or float16, not float32"
        if self.deterministic and family == "torch":
            return "deterministic must be false"
        return None

    @property
    def demands(self) -> str:
        """The settings that not all families have, in words."""
        named = [f"kernels: {self.kernels}"] if self.kernels != "auto" else []
        if self.weight_quantization != "none":
            named.append(f"weight_quantization: {self.weight_quantization}")
        if self.kv_dtype != self.dtype:
            named.append(f"kv_cache_dtype: {self.kv_dtype} beside dtype: {self.dtype}")
        if self.deterministic:
            named.append("deterministic: true")
        return ", ".join(named)

    def check(self) -> None:
        """Raises ConfigError where no family can, whatever the machine."""
        obstacles = {family: self.obstacle(family) for family in FAMILIES}
        if all(obstacles.values()):
            raise self.no_kernels({family: reason or "" for family, reason in obstacles.items()})

    def no_kernels(self, obstacles: Mapping[str, str]) -> ConfigError:
        """obstacles: by family."""
        asked = {family: reason for family, reason in obstacles.items() if self.kernels in ("auto", family)}
        reasons = "; ".join(f"the {family} kernels: {reason}" for family, reason in asked.items())
        return ConfigError(f"no kernels can do {self.demands} here. {reasons}")


def _any_of(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
