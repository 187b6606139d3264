"""The errors that Noria raises on purpose. What is not one of these is a bug.

Each carries a sentence for the person who can mend it: it names the field and what is valid there.
"""


class NoriaError(Exception):
    """Base class, so that a caller can tell a stated error from a bug."""


class ConfigError(NoriaError):
    """engine.json, the config's parameters, the model's files or the machine are not as they must be."""


class InvalidRequest(NoriaError):
    """One request is at fault (INVALID_ARG); the engine and its other requests are not."""


class Unsupported(InvalidRequest):
    """The request asks for something that this model or package does not do (UNSUPPORTED)."""


class Overloaded(NoriaError):
    """There is no room for this request now (UNAVAILABLE); later there may be."""


class DeadlineExceeded(NoriaError):
    """The request's own time limit passed before it was done (UNAVAILABLE)."""


class EngineFailure(NoriaError):
    """The engine could not go on with a request, or at all (INTERNAL)."""


class DeviceLost(EngineFailure):
    """The GPU computes nothing more for this process (a kernel's illegal access, say): only a new one helps."""
