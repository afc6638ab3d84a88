"""Sources that are named `hf://ORGANISATION/MODEL[@REVISION]`: fetched, or found in the cache, by `huggingface_hub`."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_rl.weights import WeightsError

_NAME = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
"""No pickled weights, which would be refused."""


def local_path(source: str) -> Path:
    """`source` itself, or the directory in which the model that it names lies now.

    Raises:
        WeightsError: not such a name; no network and not in the cache; or the hub refuses it.
    """
    if not source.startswith("hf:"):
        return Path(source)
    match = _NAME.fullmatch(source)
    if match is None:
        raise WeightsError(f"{source}: not a name of a model; write hf://ORGANISATION/MODEL or .../MODEL@REVISION")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(match[1], revision=match[2], allow_patterns=_WANTED))
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise WeightsError(
            f"{source}: the hub has no such model or revision, or it is not public; check the name, or log in with "
            "`hf auth login`"
        ) from error
    except LocalEntryNotFoundError as error:
        raise WeightsError(
            f"{source}: not in the cache of huggingface_hub, and the hub cannot be reached from this machine; on one "
            f"with a network run `hf download {match[1]}`, with the same HF_HOME, or give the directory of a copy"
        ) from error
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"{source}: cannot be fetched ({error}); make room, or give the directory of a copy"
        ) from error
