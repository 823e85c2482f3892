"""Models of the Hugging Face hub: download into the hub's own cache."""

from __future__ import annotations

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from replicas.errors import ModelLoadError
from replicas.text.tokenizer_files import HUB_FILES, UNUSED_HUB_FILES


def download(hub_id: str) -> str:
    """Download a model with progress bars and return its directory; what is there already is not fetched again.

    Raises:
        ModelLoadError: there is no such model, or it cannot be downloaded.
    """
    try:
        return snapshot_download(hub_id, allow_patterns=HUB_FILES, ignore_patterns=UNUSED_HUB_FILES)
    except HFValidationError as error:
        raise ModelLoadError(f"{hub_id!r} is neither a directory nor a hub id: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(f"{hub_id!r} is no directory here, and the hub cannot be reached") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelLoadError(f"{hub_id!r} cannot be downloaded: {str(error).strip().splitlines()[0]}") from error
