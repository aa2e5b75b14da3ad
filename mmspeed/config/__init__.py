"""Configuration: YAML to pydantic, unknown keys forbidden, dotted overrides."""

from .json_schema import json_schema
from .launcher import obey_launcher
from .load import all_fields, dump_config, load_config, load_record, make_config, sections, video_config
from .schema import Bucket, Config, RunConfig

__all__ = [
    "Bucket",
    "Config",
    "RunConfig",
    "all_fields",
    "dump_config",
    "json_schema",
    "load_config",
    "load_record",
    "make_config",
    "obey_launcher",
    "sections",
    "video_config",
]
