"""The captions of a config's sources by the keys of their entries, for those who have an entry and want its words."""

from __future__ import annotations

from mmspeed.config import Config
from mmspeed.device import Device
from mmspeed.preprocess.encoding.encode import Encoders
from mmspeed.preprocess.sources.discover import list_sources


def captions_by_key(config: Config) -> dict[str, str]:
    """The captions of a config's sources, and the empty one, by the keys of their entries in its cache.

    Reads lists of media and captions, and no media. Raises UserError for sources or a text encoder that cannot be found.
    """
    encoders = Encoders(config, Device("cpu", 0))
    words = dict.fromkeys(caption for source in list_sources(config.data).sources for caption in source.captions)
    return {encoders.text_key(caption): caption for caption in ("", *words)}
