"""Configuration: sections, loading, checks and the dry-run plan. Imports no other room and no torch."""

from .base import ConfigError, Section
from .hf_config import HfConfig, read_hf_config
from .loading import dump, load_config, validate
from .schema import Config

__all__ = ["Config", "ConfigError", "HfConfig", "Section", "dump", "load_config", "read_hf_config", "validate"]
