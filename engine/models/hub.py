"""Models by their id on the Hugging Face hub, downloaded once into that library's own cache.

Where the hub is, how to log in and where files are kept is the library's business
(``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``, ``HF_HUB_OFFLINE``).
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.models.errors import HubUnreachable, ModelNotFound

_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:/([\w./-]+\.gguf))?", re.ASCII)
#: What a tokenizer needs, and what a model needs beside it.
_TOKENIZER_FILES = ("*.json", "*.jinja")
_WEIGHT_FILES = ("*.safetensors",)
#: Subfolders hold other formats, and the second some publishers' own copy of all weights.
_OTHER_FILES = ("*/*", "consolidated*")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub.

    Attributes:
        repository: ``owner/name``.
        file: a GGUF file in it; None = safetensors with their ``config.json``.
    """

    repository: str
    file: str | None = None

    @classmethod
    def try_parse(cls, model: str) -> "HubModel | None":
        """Read ``owner/name`` or ``owner/name/file.gguf``; None where it is neither."""
        found = _ID.fullmatch(model)
        return None if found is None else cls(found[1], found[2])

    def fetched(
        self, revision: str | None = None, *, offline: bool = False, tokenizer_only: bool = False
    ) -> Path:
        """Folder or GGUF file with the model, downloading what is not there yet; bars on stderr.

        Args:
            revision: branch, tag or commit; None = the default branch.
            offline: use only what was downloaded before.
            tokenizer_only: leave the weights to somebody else.

        Raises:
            ModelNotFound: no such repository, revision or file, or no right to it.
            HubUnreachable: no answer, and not everything was downloaded before.
        """
        patterns: Sequence[str] = _TOKENIZER_FILES if tokenizer_only else _TOKENIZER_FILES + _WEIGHT_FILES
        if self.file is not None:
            folder = self._snapshot(revision, offline, (self.file,), ())
            if not (folder / self.file).is_file():
                raise ModelNotFound(f"hub model {self.repository} has no file {self.file}")
            return folder / self.file
        return self._snapshot(revision, offline, patterns, _OTHER_FILES)

    def _snapshot(
        self, revision: str | None, offline: bool, allow: Sequence[str], ignore: Sequence[str]
    ) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            IncompleteSnapshotError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        name = self.repository if revision is None else f"{self.repository} at revision {revision}"
        try:
            return Path(
                snapshot_download(
                    self.repository,
                    revision=revision,
                    allow_patterns=list(allow),
                    ignore_patterns=list(ignore),
                    local_files_only=offline,
                    endpoint=os.environ.get("HF_ENDPOINT"),
                )
            )
        except GatedRepoError as error:
            raise ModelNotFound(f"hub model {name} needs a token that its owner has accepted") from error
        except RepositoryNotFoundError as error:
            raise ModelNotFound(f"there is no model {name} on the hub, or it needs a token") from error
        except (RevisionNotFoundError, HFValidationError) as error:
            raise ModelNotFound(f"there is no hub model {name}") from error
        except (LocalEntryNotFoundError, IncompleteSnapshotError) as error:
            raise HubUnreachable(name, offline=offline) from error
        except Exception as error:  # whatever the library's transport raises
            raise HubUnreachable(name, offline=offline) from error
