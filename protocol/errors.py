"""The errors of this package. Each docstring says whether this process or the other side is the cause."""


class ProtocolError(Exception):
    """The base class of every error that this package raises."""


class DecodeError(ProtocolError):
    """The other side sent bytes that are not a message, a wrong field, or a number out of range."""


class VersionError(DecodeError):
    """The other side uses a different major version. The text of the error names both versions."""


class LimitError(DecodeError):
    """The other side sent more than this side may keep. All later messages from there are refused, too."""


class RingError(ProtocolError):
    """A ring or catalog file cannot be created, or is not a cbtop file."""


class EndpointError(ProtocolError):
    """An address cannot be used, or a runtime directory is not safe. The cause is on this side."""


class KeysError(ProtocolError):
    """A key or an allow-list is missing or cannot be used. The text never contains a secret."""


class RecordingError(ProtocolError):
    """A recording cannot be read or written."""


class RoofsError(ProtocolError):
    """The stored measurements of this machine, roofs or crossovers, cannot be read or written."""


class RequestError(ProtocolError):
    """A request cannot reach its process, or the answer is invalid."""
