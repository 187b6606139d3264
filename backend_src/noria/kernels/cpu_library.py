"""The compiled CPU kernels: where the library is, whether it runs here, and its C interface as ctypes structures.

Built from `kernels/cpu/*.cpp` when the package is installed, if there is a C++ compiler: once for AVX2 and once for
AVX-512, which compute the same numbers. `cpu/decoder.cpp` declares the same structures; the two must agree. Knows
nothing of models or torch: pointers are numbers.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)

# by what they were compiled for, the faster first
LIBRARY_NAMES = {"AVX-512 (F, BW, CD, DQ, VL, VNNI)": "cpu_kernels_avx512", "AVX2, FMA and F16C": "cpu_kernels_avx2"}
# of a packed weight, outputs side by side
PANEL = 16
# of a linear layer's weights
WEIGHT_FORMATS = {"float32": 0, "int8": 1, "int4": 2}
# inputs of an output that share a float16 scale, in int4 a minimum too
GROUP = 32
# of so many inputs, and PANEL outputs
PACKED_BYTES = {"int8": (2 * GROUP, PANEL * 2 * (GROUP + 2)), "int4": (GROUP, PANEL * (GROUP // 2 + 2 + 2))}
KV_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2}
# the parts of a step that `StepStruct.stage_seconds` tells apart, in order
STAGES = ("linear", "head", "attention", "pointwise")


class LinearStruct(Structure):
    """weight: panels, see cpu/linear.h. bias: 0 for none. format: of WEIGHT_FORMATS."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("num_inputs", c_int32),
        ("num_outputs", c_int32),
        ("format", c_int32),
    )


class LayerStruct(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qk_norm", c_void_p),
        ("qkv", LinearStruct),
        ("attention_output", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
    )


LAYER_FIELDS = tuple(field[0] for field in LayerStruct._fields_)


class ModelStruct(Structure):
    """The fields from kv_format to sliding_window are one structure in C; sliding_window 0 is none."""

    _fields_ = (
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("vocab_size", c_int32),
        ("kv_format", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("num_heads", c_int32),
        ("sliding_window", c_int32),
        ("rms_norm_eps", c_float),
        ("layers", POINTER(LayerStruct)),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", LinearStruct),
    )


class StepStruct(Structure):
    _fields_ = (
        ("num_tokens", c_int32),
        ("num_rows", c_int32),
        ("num_logits", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("logit_indices", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rows", c_void_p),
        ("cache", c_void_p),
        ("num_blocks", c_int64),
        ("logits", c_void_p),
        ("peaks", c_void_p),
        ("peak_ids", c_void_p),
        ("stage_seconds", POINTER(c_double)),
    )


# StepStruct.rows [num_rows]; block_table is the address of int32 block ids
ROW_FIELDS = ("query_start", "num_queries", "first_position", "context_len")
ROW_DTYPE = np.dtype([(name, np.int32) for name in ROW_FIELDS] + [("block_table", np.uint64)])


def find_libraries() -> dict[str, Path]:
    """Those beside this file, by LIBRARY_NAMES; empty where none was built."""
    found = {}
    for processor, name in LIBRARY_NAMES.items():
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            path = Path(__file__).with_name(name + suffix)
            if path.is_file():
                found[processor] = path
    return found


def load_library() -> ctypes.CDLL:
    """The fastest that runs here, with its functions' types. Raises RuntimeError, which says what is missing."""
    libraries = find_libraries()
    if not libraries:
        raise RuntimeError(
            "they were not built: install a C++ compiler (g++ 11 or later) and Noria again, on x86-64 Linux"
        )
    broken = None
    for path in libraries.values():
        try:
            library = load_from(path)
        except RuntimeError as error:
            log.warning("compiled CPU kernels: %s; looking for others", error)
            broken = error
            continue
        if library.noria_cpu_is_supported():
            return library
    raise broken or RuntimeError(f"this processor lacks {' or '.join(libraries)}")


def load_from(path: Path) -> ctypes.CDLL:
    """With its functions' types. Raises RuntimeError where the file is not to be loaded."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"{path.name} cannot be loaded: {error}") from None
    library.noria_instruction_set.restype = c_char_p
    library.noria_context_create.restype = c_void_p
    library.noria_context_create.argtypes = (c_int32,)
    library.noria_context_destroy.argtypes = (c_void_p,)
    library.noria_context_destroy.restype = None
    library.noria_forward.argtypes = (c_void_p, POINTER(ModelStruct), POINTER(StepStruct))
    for pack in (library.noria_pack_float32, library.noria_pack_int8, library.noria_pack_int4):
        pack.argtypes = (c_void_p, c_int32, c_int32, c_void_p)
        pack.restype = None
    library.noria_linear.argtypes = (POINTER(LinearStruct), c_void_p, c_int32, c_void_p)
    library.noria_linear.restype = None
    library.noria_largest.argtypes = (c_void_p, c_int32, c_int32, c_void_p, c_void_p)
    library.noria_largest.restype = None
    return library
