"""The version of cbtop. This file has no other content, because a build must read the version without importing
anything.
"""

__version__ = "0.1.0"
