"""Configuration: YAML to pydantic, unknown keys forbidden, dotted overrides."""

from .load import all_fields, dump_config, load_config, make_config
from .schema import Bucket, Config

__all__ = ["Bucket", "Config", "all_fields", "dump_config", "load_config", "make_config"]
