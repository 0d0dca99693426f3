"""The errors of the wire, and which side caused them."""


class ProtocolError(Exception):
    """The root of every error this package raises."""


class DecodeError(ProtocolError):
    """The other side's fault: bytes that are not a message, a field out of place, a number out of range."""


class VersionError(DecodeError):
    """The other side speaks a different major version; the message names both."""


class LimitError(DecodeError):
    """The other side's fault: it sent more than is kept. Everything after that is refused too."""


class RingError(ProtocolError):
    """A ring or catalog file that cannot be made, or is not one of ours."""


class EndpointError(ProtocolError):
    """Our side's fault: an address that cannot be used, or a runtime directory that is not safe."""


class KeysError(ProtocolError):
    """A key or an allow-list that cannot be used, or is missing; the message never holds a secret."""


class RecordingError(ProtocolError):
    """A recording that cannot be read or written."""


class RoofsError(ProtocolError):
    """Measurements of this machine, roofs or crossovers, that cannot be read or kept."""


class RequestError(ProtocolError):
    """A request that cannot reach its process, or an answer that makes no sense."""
