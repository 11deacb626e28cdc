"""Models that Hugging Face's or ModelScope's own tools have downloaded: from an id to the directory on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mega_rl.models.files import CONFIG_FILE

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def local_directory(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """``name`` itself if it is a directory; else the directory of the id in the local caches; else ``name``.

    Args:
        name: a directory, or an id such as ``Qwen/Qwen3-8B``.
        environment: where the caches are: ``HF_HUB_CACHE``, ``HF_HOME``, ``MODELSCOPE_CACHE``, ``XDG_CACHE_HOME``.
    """
    if os.path.exists(name) or not _ID.fullmatch(name):
        return name
    places = (*_huggingface(name, environment), *_modelscope(name, environment))
    return next((str(place) for place in places if (place / CONFIG_FILE).is_file()), name)


def _cache(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _huggingface(name: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """Snapshots: the one that ``main`` names, then the newest."""
    home = Path(environment.get("HF_HOME") or _cache(environment) / "huggingface")
    model = Path(environment.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    snapshots = model / "snapshots"
    main = model / "refs" / "main"
    if main.is_file():
        yield snapshots / main.read_text(encoding="utf-8", errors="replace").strip()
    if snapshots.is_dir():
        yield from sorted(snapshots.iterdir(), key=lambda snapshot: -snapshot.stat().st_mtime)


def _modelscope(name: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """Its directories, in which a dot of a name is three underscores."""
    cache = Path(environment.get("MODELSCOPE_CACHE") or _cache(environment) / "modelscope")
    for spelling in (name, name.replace(".", "___")):
        yield from (cache / folder / spelling for folder in ("hub/models", "models", "hub"))
