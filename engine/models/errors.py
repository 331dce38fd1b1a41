"""Why a model cannot be served. Met at start, by an operator; never by a request."""

#: Of an error's text: what a file holds may be of any length.
_TEXT_CHARACTERS = 1000


class ModelLoadError(Exception):
    """Root of everything that keeps a model from being loaded. Its text is one line of bounded length."""

    def __init__(self, text: str) -> None:
        line = " ".join(text[: _TEXT_CHARACTERS + 1].splitlines())
        super().__init__(line if len(line) <= _TEXT_CHARACTERS else f"{line[:_TEXT_CHARACTERS]}...")


class ModelNotFound(ModelLoadError):
    """There is no model where one was named."""


class HubUnreachable(ModelLoadError):
    """A model on the hub was not downloaded before, or not all of it, and can't be now.

    Args:
        model: id, and revision where one was asked for.
        offline: the hub was not to be asked.
    """

    def __init__(self, model: str, *, offline: bool) -> None:
        why = "model.offline is true" if offline else "the hub does not answer"
        super().__init__(f"hub model {model} was not downloaded whole before, and {why}")
        self.model = model


class UnsupportedModel(ModelLoadError):
    """The model is well-formed, but of a kind this version cannot compute.

    Args:
        field: the field of its configuration or metadata that says so.
        supported: what is supported there.
        value: what it holds.
    """

    def __init__(self, field: str, supported: str, value: object) -> None:
        super().__init__(f"model {field} must be {supported} in this version, got {value!r}")
        self.field = field
        self.value = value


class InvalidCheckpoint(ModelLoadError):
    """A file of the model is missing, damaged, or does not match its configuration."""


class InvalidAdapter(ModelLoadError):
    """An adapter's file is missing, damaged, or does not match the model.

    Args:
        name: of the adapter.
        folder: where it was to be.
        cause: in words.
    """

    def __init__(self, name: str, folder: str, cause: str) -> None:
        super().__init__(f"model.adapters.{name} can't be used, from {folder}: {cause}")
        self.name = name


class UnsupportedAdapter(ModelLoadError):
    """An adapter is well-formed, but of a kind this version cannot compute, or not here.

    Args:
        name: of the adapter.
        field: what of its configuration, or of the server's, says so.
        supported: what is supported there.
        value: what it holds.
    """

    def __init__(self, name: str, field: str, supported: str, value: object) -> None:
        super().__init__(f"model.adapters.{name}: {field} must be {supported} in this version, got {value!r}")
        self.name, self.field, self.value = name, field, value


class CacheUnusable(ModelLoadError):
    """The folder for converted models cannot be written, or others may write it."""
