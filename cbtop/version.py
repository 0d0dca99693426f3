"""The version. This file contains nothing else, so that a build can read the version without importing anything."""

__version__ = "0.1.0"
