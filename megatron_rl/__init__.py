"""The name and version of the package; nothing else belongs here, so that importing any room stays cheap."""

__version__ = "0.1.0"
