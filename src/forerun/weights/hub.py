"""Models from the Hugging Face hub: only data files, and the config is checked before gigabytes are fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, first_line
from forerun.progress import Progress, Task
from forerun.weights.config import read_config
from forerun.weights.folder import weight_files

HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
ALL_FILES = [*SMALL_FILES, "*.safetensors"]
# Files in subfolders and the "consolidated" copy some repositories carry are the same weights in another layout.
SKIPPED_FILES = ["*/*", "consolidated*"]
BYTES_BAR = "huggingface_hub.snapshot_download"


def is_offline() -> bool:
    """Whether the user switched the network off for the hub."""
    return any(
        os.environ.get(name, "").strip().upper() in {"1", "ON", "YES", "TRUE"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def from_hub(model: str, progress: Progress) -> Path:
    """The local folder of `org/name` or `org/name@revision`; a complete copy in the hub cache needs no network."""
    match = HUB_ID.fullmatch(model)
    assert match is not None, "the caller checks the form"
    hub_id, revision = match["id"], match["revision"]
    cached = _cached(hub_id, revision)
    if cached is not None:
        return cached
    if is_offline():
        raise ForerunError(
            f"{model}: no such folder, and the hub cache has no complete copy; "
            "offline mode (HF_HUB_OFFLINE) keeps it from being downloaded"
        )
    # One commit for both steps, even when the repository changes in between.
    folder = Path(_explained(hub_id, revision, SMALL_FILES))
    commit = folder.name
    read_config(folder)
    planned = _explained(hub_id, commit, ALL_FILES, dry_run=True)
    needed = sum(file.file_size for file in planned if file.will_download) or None
    with progress.task(f"downloading {model}", total=needed) as task:
        folder = Path(_explained(hub_id, commit, ALL_FILES, tqdm_class=_bars(task)))
    weight_files(folder)
    return folder


def _cached(hub_id: str, revision: str | None) -> Path | None:
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(_snapshot(hub_id, revision, ALL_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    if not (folder / "config.json").is_file():
        return None
    read_config(folder)  # a model that cannot be read is refused, not downloaded again
    try:
        weight_files(folder)
    except ForerunError:
        return None  # the download was interrupted
    return folder


def _snapshot(hub_id: str, revision: str | None, files: list[str], **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    options.setdefault("tqdm_class", _bars(None))
    return snapshot_download(hub_id, revision=revision, allow_patterns=files, ignore_patterns=SKIPPED_FILES, **options)


def _explained(hub_id: str, *request: Any, **options: Any) -> Any:
    """As `_snapshot`, whose many ways to fail become one line."""
    from huggingface_hub import errors

    try:
        return _snapshot(hub_id, *request, **options)
    except errors.GatedRepoError as error:
        advice = f"accept its terms on https://huggingface.co/{hub_id} and set HF_TOKEN"
        raise ForerunError(f"{hub_id} is open only to people who accepted its terms: {advice}") from error
    except errors.RepositoryNotFoundError as error:
        raise ForerunError(
            f"{hub_id}: no such folder, and no such model on the hub (set HF_TOKEN if it is private)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ForerunError(f"{hub_id} has no such revision on the hub") from error
    except errors.LocalEntryNotFoundError as error:
        raise ForerunError(
            f"{hub_id}: no such folder, not in the hub cache, and the hub cannot be reached; "
            "check the network or give a local folder"
        ) from error
    except Exception as error:  # the hub's HTTP library changes its exceptions between releases
        raise ForerunError(f"{hub_id}: the download failed ({first_line(error)}); try again") from error


def _bars(task: Task | None) -> type:
    """A progress bar class for the hub that draws nothing and passes the bytes on to `task`."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("name") == BYTES_BAR
            super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if task is not None and self.counts_bytes and n:
                task.advance(int(n))

    return Bar
