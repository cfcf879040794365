"""Models by name, as commands take them: `names` finds them, `blobs` checks what was downloaded."""

from ktk.hub.blobs import Blob, blobs_of
from ktk.hub.names import Found, cache_folder, cached_models, find_model, models_in, own_folders

__all__ = [
    "Blob",
    "Found",
    "blobs_of",
    "cache_folder",
    "cached_models",
    "find_model",
    "models_in",
    "own_folders",
]
