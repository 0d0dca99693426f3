"""What can go wrong on the wire, and whose fault it is."""


class ProtocolError(Exception):
    """The root of every error this package raises."""


class DecodeError(ProtocolError):
    """The other side's fault: bytes that are not a message, a field out of place, a number out of range."""


class VersionError(DecodeError):
    """The other side speaks another major version; the message names both."""


class LimitError(DecodeError):
    """The other side's fault: more than is kept of all it says. What follows is not taken either."""


class RingError(ProtocolError):
    """A ring or catalog file that cannot be made, or is not one of ours."""


class EndpointError(ProtocolError):
    """Our side's fault: an address that cannot be used, or a runtime directory that is not safe."""


class KeysError(ProtocolError):
    """A key or an allow-list that cannot be used, or is missing; the message never holds a secret."""


class RecordingError(ProtocolError):
    """A recording that cannot be read or written."""


class RoofsError(ProtocolError):
    """What was measured of this machine, roofs or crossovers, that cannot be read or kept."""


class RequestError(ProtocolError):
    """A process that cannot be asked, or whose answer makes no sense."""
