"""Configuration: sections, loading, checks and the dry-run plan. Imports no other room and no torch.

Only the plan asks `routes` how wide a row is.
"""

from .base import ConfigError, Section
from .checks import check
from .hf_config import HfConfig, changed_shape, read_hf_config
from .loading import dump, load_config, validate
from .plan import make_plan
from .schema import Config

__all__ = [
    "Config",
    "ConfigError",
    "HfConfig",
    "Section",
    "changed_shape",
    "check",
    "dump",
    "load_config",
    "make_plan",
    "read_hf_config",
    "validate",
]
