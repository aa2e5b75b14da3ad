"""Config sections of the input: sources, buckets, codec, text encoder and preprocessing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from mmspeed.shapes import Bucket

from .addresses import checked_address
from .places import base_name
from .roles import checked_roles, roles_of


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys forbidden, defaults checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


_MAX_AFFIX_CHARS = 1024


def checked_affix(value: str) -> str:
    """The words before or behind captions, with single spaces. Raises ValueError for blank, unprintable or very long ones."""
    words = " ".join(value.split())
    if value and not words:
        raise ValueError("it is blank; leave it out, or write '' for none")
    if len(words) > _MAX_AFFIX_CHARS:
        raise ValueError(f"it has {len(words)} characters, and at most {_MAX_AFFIX_CHARS} are taken")
    if not words.replace("\u200c", "").replace("\u200d", "").isprintable():  # joiners form letters and emoji
        raise ValueError("it holds control or invisible characters")
    return words


class SourceConfig(Section):
    """A folder, manifest or tar that holds media and captions."""

    path: str = Field(
        description="Folder, manifest file or webdataset tar, on disk or behind a URL (`s3://`, `https://`, `hf://` and others that fsspec reads). `*` and braces (`{000000..000099}`) name several, and `::` stands between sets. Relative paths are taken from the config file."
    )
    name: str | None = Field(
        None,
        min_length=1,
        description="Name of this source; null: the last part of `path`, numbered where two are the same.",
    )
    repeats: int = Field(
        1, ge=1, description="Times each of its samples is used in an epoch, times `data.repeats`. Not with weights."
    )
    weight: float | None = Field(
        None,
        gt=0,
        description="Share of this source in an epoch's samples, relative to the other sources' weights: all have one, or none. With a small share, a sample is not used in every epoch, but as often as any other of the source in its bucket (at least one of each bucket in every epoch).",
    )
    format: Literal["auto", "folder", "jsonl", "json", "csv", "parquet", "webdataset"] = Field(
        "auto",
        description="Format of `path`; `auto` goes by the file name's ending, and reads a folder that holds `metadata.jsonl`, `.csv` or `.parquet` by that file, and one whose media have no captions beside them by the only file that lists media with captions.",
    )
    media_column: str = Field(
        "video", description="Manifest column with the media file's path, relative to the manifest's folder."
    )
    caption_column: str = Field(
        "caption", description="Manifest column with the caption: a string, or a list of strings."
    )
    roles: dict[str, str] = Field(
        {},
        description="Further videos of each row by their role, and the manifest column that names them, such as `{control: control_path}`: `control`, or `chosen` and `rejected` of a pair. They have the frames, the crop and the flip of the row's video. All sources name the same roles.",
    )
    split_column: str | None = Field(
        "split",
        description="Manifest column that holds `train` or `val`; rows without it are `train`. Null: all rows are `train`.",
    )
    caption_prefix: str | None = Field(
        None, description="Words before each caption of this source; null: `data.caption_prefix`, an empty text: none."
    )
    caption_suffix: str | None = Field(
        None, description="Words behind each caption of this source; null: `data.caption_suffix`, an empty text: none."
    )

    @field_validator("caption_prefix", "caption_suffix")
    @classmethod
    def _words(cls, value: str | None) -> str | None:
        return value if value is None else checked_affix(value)

    @field_validator("roles")
    @classmethod
    def _roles(cls, value: dict[str, str]) -> dict[str, str]:
        checked_roles(value)
        return value

    @model_serializer(mode="wrap")
    def _with_roles(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The section without `roles` where there are none: caches record it, and stay as they are."""
        tree: dict[str, Any] = dump(self)
        return tree if self.roles else {name: value for name, value in tree.items() if name != "roles"}


class BucketConfig(Section):
    """A pixel shape that samples are cropped and scaled to."""

    frames: int = Field(
        ge=1, description="Frames of a sample; 1 means images. Causal codecs need 1 + k x their temporal stride."
    )
    height: int = Field(ge=8, description="Height in pixels.")
    width: int = Field(ge=8, description="Width in pixels.")
    keep: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the clips that fit this bucket best and are put in it, drawn by content; the rest go to the next best bucket, if there is one.",
    )

    def bucket(self) -> Bucket:
        return Bucket(self.frames, self.height, self.width)


class ScenesConfig(Section):
    """Cutting of videos at scene changes, by PySceneDetect (`pip install mmspeed[scenes]`)."""

    detector: Literal["content", "adaptive"] = Field(
        "content",
        description="`content`: a cut is a change of colour, saturation and brightness above `threshold` from one frame to the next; `adaptive`: one that is `threshold` times that of the frames around it, which fast camera movement does not reach.",
    )
    threshold: float | None = Field(
        None,
        gt=0,
        description="Change that makes a cut; null: 27 for `content`, 3 for `adaptive`, as in PySceneDetect.",
    )
    min_seconds: float = Field(
        1.0, ge=0, description="Scenes shorter than this, in seconds, are left out, such as flashes and fades."
    )

    @property
    def least_change(self) -> float:
        """The threshold, the detector's own if none is set."""
        return self.threshold or {"content": 27.0, "adaptive": 3.0}[self.detector]


class MixedSource(Protocol):
    """The keys of a source that say how it is mixed with others."""

    @property
    def path(self) -> str: ...

    @property
    def name(self) -> str | None: ...

    @property
    def repeats(self) -> int: ...

    @property
    def weight(self) -> float | None: ...


def check_mixing(sources: Sequence[MixedSource], temperature: float | None, key: str) -> None:
    """Raise ValueError for sources whose weights, repeats and temperature (of that `key`) contradict, and for two of one name."""
    weights = [source.weight for source in sources]
    if any(weights) and not all(weights):
        raise ValueError("give every source a weight, or none")
    if any(weights) and temperature is not None:
        raise ValueError(f"the sources' weights and {key} both set the shares of sources: use one of them")
    if (any(weights) or temperature is not None) and any(source.repeats > 1 for source in sources):
        raise ValueError(
            "repeats of a source and shares (weight, temperature) both set how often it is used: use one of them"
        )
    names = [source.name for source in sources if source.name is not None]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"two sources have the name {repeated}")


def distinct_names(sources: Sequence[MixedSource], usual: str) -> tuple[str, ...]:
    """The name of each source, in order: its own, else that of its path, else the `usual` one, with numbers where two are the same."""
    explicit = {source.name for source in sources if source.name is not None}
    names: list[str] = []
    for source in sources:
        base = name = source.name or base_name(source.path) or usual
        number = 2
        while source.name is None and (name in explicit or name in names):
            name, number = f"{base}-{number}", number + 1
        names.append(name)
    return tuple(names)


class DataConfig(Section):
    """The media to train on, and how they are cut into samples."""

    sources: tuple[SourceConfig, ...] = Field(
        min_length=1, description="Folders, manifests and tars with media and captions, read in this order."
    )
    cache: str = Field(
        "cache",
        description="Folder of the dataset cache; relative paths are taken from the config file. To train from a remote copy, its URL (such as `s3://bucket/cache`); entries are fetched as they are needed.",
    )
    fps: float | None = Field(
        8.0,
        gt=0,
        le=240,
        description="Frames per second that clips are sampled at, by time. Null: every frame of the file.",
    )
    buckets: tuple[BucketConfig, ...] = Field(
        min_length=1, description="Pixel shapes; each clip goes to the one that loses least of it."
    )
    windows: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        1,
        description="Time windows taken from a video for a bucket, evenly spaced and without overlap; fewer if the video is too short. `all`: as many as fit.",
    )
    scenes: ScenesConfig | None = Field(
        None,
        description="Cut videos into scenes: each scene has its own windows, and none crosses a cut. Null: videos are not cut.",
    )
    crops: int = Field(
        1,
        ge=1,
        le=9,
        description="Crops taken from a picture whose shape is not the bucket's, evenly spaced from edge to edge; 1: the middle.",
    )
    mirror: bool = Field(
        False,
        description="Also take the mirror image of each crop, as one more crop. Not of sources with a caption that has a word of `mirror_words`; they are counted.",
    )
    mirror_words: tuple[str, ...] = Field(
        ("left", "right", "links", "rechts", "izquierda", "derecha", "gauche", "droite", "左", "右"),
        description="Words of captions whose media are not mirrored, as whole words in upper or lower case; empty: all are mirrored.",
    )
    buckets_per_clip: int = Field(
        1, ge=1, description="Buckets that a clip is used for, the best fitting first; each gives its own samples."
    )
    variants: Literal["each", "draw"] = Field(
        "each",
        description="`each`: every window and crop is a sample of the epoch. `draw`: each use of a clip in an epoch draws one of them.",
    )
    allow_upscale: bool = Field(
        False, description="Enlarge media that are smaller than every bucket; otherwise they are rejected as too small."
    )
    limit: int | None = Field(
        None, ge=1, description="Use only this many sources, the first in the order they are listed; null: all."
    )
    max_repeated: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Share of a window's frames that may repeat the frame before: gaps of a variable frame rate, or a rate below `fps`. Windows above it are rejected.",
    )
    untagged: Literal["auto", "bt601", "bt709"] = Field(
        "auto",
        description="Colour matrix of videos that state none. `auto`: BT.709 from 720 lines on, BT.601 below, as players take them; tagged videos keep theirs.",
    )
    background: str = Field(
        "#ffffff",
        description="Colour that transparent pixels of pictures and videos show: a name such as `white`, or red, green and blue as six hexadecimal digits behind a number sign.",
    )
    val_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the samples held out for validation, drawn by content, in addition to rows that the manifest marks `val`.",
    )
    repeats: int = Field(
        1,
        ge=1,
        description="Times each sample is used in an epoch, each time with its own noise, timestep and caption.",
    )
    temperature: float | None = Field(
        None,
        gt=0,
        description="Mix several sources with shares of size ** (1 / temperature): 1 follows their sizes, larger values are more even. Null: every sample equally often, or by the sources' weights.",
    )
    min: dict[str, float] = Field(
        {},
        description="Least scores by manifest column or key of a JSON sidecar, such as `{aesthetic: 5}`: sources below are rejected, and those without a number.",
    )
    max: dict[str, float] = Field({}, description="Greatest scores, as `min`: sources above are rejected.")
    max_file_mb: float = Field(4096.0, gt=0, description="Larger media files are rejected as too large, in megabytes.")
    max_pixels: int = Field(
        8192 * 8192,
        gt=0,
        description="Media with more pixels in a frame are rejected as too large, before they are decoded.",
    )
    max_caption_chars: int = Field(
        4096, ge=1, description="Longer captions are cut to this many characters, and counted."
    )
    missing_caption: Literal["reject", "empty", "default"] = Field(
        "reject",
        description="Media without a caption: `reject` them, take them with the `empty` caption, or with the `default` one (`default_caption`); they are counted.",
    )
    default_caption: str | None = Field(
        None, min_length=1, description="Caption of media that have none, with `missing_caption: default`."
    )
    caption_encoding: str | None = Field(
        None,
        description="Encoding of caption files and manifests that have no byte-order mark, such as `gb18030`, `shift_jis` or `cp1252`; null: UTF-8. Media with a caption that is not in it are rejected.",
    )
    caption_prefix: str = Field(
        "",
        description="Words before each caption, the default one included, such as a trigger word; `max_caption_chars` does not cut them. A space follows them.",
    )
    caption_suffix: str = Field(
        "",
        description="Words behind each caption, after a space unless they begin with a punctuation mark; `max_caption_chars` does not cut them.",
    )
    local_mb: float = Field(
        20000.0,
        gt=0,
        description="Size of the local store that holds fetched remote media, in megabytes: beyond it the oldest that are not in use are deleted. It lies under `$MMSPEED_CACHE`, else `~/.cache/mmspeed`.",
    )

    allow_addresses: tuple[str, ...] = Field(
        (),
        description="Addresses that manifests may name beside public ones: hosts, addresses and networks in private networks behind `http` and `https` (`media.lan`, `10.0.0.0/8`), and protocols beside `s3`, `gs`, `http`, `https`, `hf` and those of the sources (`oss://`).",
    )

    @field_validator("allow_addresses")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(checked_address, value))

    @field_validator("background")
    @classmethod
    def _colour(cls, value: str) -> str:
        """The colour as `#rrggbb`."""
        from PIL import ImageColor

        try:
            red, green, blue = ImageColor.getrgb(value)[:3]
        except ValueError:
            raise ValueError(f"{value!r} is no colour: write #rrggbb, or a name such as white") from None
        return f"#{red:02x}{green:02x}{blue:02x}"

    @field_validator("caption_prefix", "caption_suffix")
    @classmethod
    def _words(cls, value: str) -> str:
        return checked_affix(value)

    @field_validator("mirror_words")
    @classmethod
    def _sides(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        blank = next((word for word in value if not word.strip()), None)
        if blank is not None:
            raise ValueError(f"{blank!r} is no word; write [] for none")
        return tuple(word.strip() for word in value)

    @model_validator(mode="after")
    def _scores(self) -> DataConfig:
        if any(not column.strip() for column in (*self.min, *self.max)):
            raise ValueError("min and max: a column's name is blank")
        crossed = next((name for name in self.min if self.min[name] > self.max.get(name, self.min[name])), None)
        if crossed is not None:
            raise ValueError(
                f"min of {crossed} is {self.min[crossed]:g}, above its max of {self.max[crossed]:g}: no source is between"
            )
        return self

    @field_validator("caption_encoding")
    @classmethod
    def _known_encoding(cls, name: str | None) -> str | None:
        try:
            bytes(4).decode(name or "utf-8", "surrogateescape")
        except (LookupError, UnicodeError):
            raise ValueError(f"{name!r} is not an encoding that Python knows") from None
        return name

    @model_validator(mode="after")
    def _captions(self) -> DataConfig:
        if (self.missing_caption == "default") != (self.default_caption is not None):
            raise ValueError("missing_caption: default and default_caption go together: set both, or neither")
        if self.default_caption is not None and not self.default_caption.strip():
            raise ValueError("default_caption is blank; for no caption set missing_caption: empty")
        return self

    @model_validator(mode="after")
    def _same_roles(self) -> DataConfig:
        first = self.sources[0]
        for other in self.sources:
            if odd := sorted(first.roles.keys() ^ other.roles.keys()):
                have, lack = (other, first) if odd[0] in other.roles else (first, other)
                raise ValueError(f"{have.path} has the role {odd[0]}, and {lack.path} has not: name it for all sources")
        return self

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of each sample beside its video and captions, in the order of their table."""
        return roles_of(tuple(self.sources[0].roles))

    @model_validator(mode="after")
    def _mixing(self) -> DataConfig:
        check_mixing(self.sources, self.temperature, "data.temperature")
        return self

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """The name of each source, in order; all are distinct."""
        return distinct_names(self.sources, "data")


class LinearVaeConfig(Section):
    """The built-in codec: a causal linear autoencoder (stride 4 x 8 x 8), fitted on the user's clips in seconds."""

    kind: Literal["linear"] = Field(description="The built-in codec.")
    channels: int = Field(16, ge=1, le=192, description="Latent channels; more of them keep more of the picture.")
    fit_clips: int = Field(64, ge=1, description="Clips that the codec is fitted on, the first time the cache is made.")
    weights: str | None = Field(
        None,
        description="A fitted `codec.safetensors` to use instead of fitting one. Null: the one in the cache, fitted if it is missing.",
    )


class DiffusersVaeConfig(Section):
    """Any `AutoencoderKL*` of diffusers, for video or images."""

    kind: Literal["diffusers"] = Field(description="A diffusers autoencoder.")
    pretrained: str = Field(description="Hub id (`owner/name`) or folder of the autoencoder.")
    subfolder: str | None = Field(
        None, description="Folder inside `pretrained` that holds the autoencoder, such as `vae`."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of the hub id.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Number type the autoencoder computes in.")
    tiling: bool = Field(
        False, description="Encode and decode large pictures in tiles: less memory, slower, edges may differ slightly."
    )
    slicing: bool = Field(True, description="Encode and decode a batch one by one: less memory.")


class MiniLmTextConfig(Section):
    """MiniLM (22.7 M parameters, width 384), installed as a Python package; works offline."""

    kind: Literal["minilm"] = Field(description="MiniLM.")
    max_tokens: int = Field(128, ge=1, le=512, description="Tokens that a caption is cut to.")


class TransformersTextConfig(Section):
    """Any text encoder of transformers: T5, UMT5, CLIP, BERT and others."""

    kind: Literal["transformers"] = Field(description="A transformers text encoder.")
    pretrained: str = Field(description="Hub id (`owner/name`) or folder with the encoder and its tokenizer.")
    subfolder: str | None = Field(
        None, description="Folder inside `pretrained` that holds the encoder, such as `text_encoder`."
    )
    tokenizer_subfolder: str | None = Field(
        None,
        description="Folder inside `pretrained` that holds the tokenizer, such as `tokenizer`; null: the encoder's.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of the hub id.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Number type the encoder computes in.")
    max_tokens: int = Field(256, ge=1, description="Tokens that a caption is cut to.")


class FamilyTextConfig(Section):
    """The text encoders of a published video model, used as its own pipeline uses them: template, length, layer and padding."""

    kind: Literal["family"] = Field(description="The text encoders of the model's own repository.")
    pretrained: str = Field(
        description="Hub id (`owner/name`) or folder of the repository; that of the model, if left out."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of the hub id.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Number type the encoders compute in.")
    max_tokens: int = Field(
        1024, ge=1, description="Tokens that a caption is cut to, where the model's own limit is not smaller."
    )


VaeConfig = Annotated[LinearVaeConfig | DiffusersVaeConfig, Field(discriminator="kind")]
TextConfig = Annotated[MiniLmTextConfig | TransformersTextConfig | FamilyTextConfig, Field(discriminator="kind")]


class PreprocessConfig(Section):
    """Settings of preprocessing, which builds the cache."""

    decoder: Literal["pyav", "torchcodec", "decord"] = Field(
        "pyav",
        description="Library that decodes videos. `torchcodec` and `decord` read a file if they have PyAV's frames at PyAV's times; PyAV reads the others, which are counted. Their own conversion to RGB gives other pixels, so their name is a part of the keys of the entries made with them, except where the bytes are the same.",
    )
    decoder_device: Literal["cpu", "run"] = Field(
        "cpu",
        description="Device that torchcodec decodes on: `run` is that of `device.kind`, which must be a GPU that decodes video.",
    )
    decode_workers: int = Field(2, ge=1, le=64, description="Decoder processes beside each encoding process.")
    time_limit: float = Field(
        60.0, gt=0, description="Seconds that probing and decoding one file may take before it is rejected."
    )
    first_frame: bool = Field(
        False,
        description="Also store the latent of each clip's first frame encoded alone, for image-to-video training with codecs that are not strictly causal (CogVideoX, HunyuanVideo). With causal codecs it equals the clip's first latent frame.",
    )
    encode_batch: int = Field(
        1,
        ge=1,
        description="Clips of one bucket that the codec encodes at a time, if the device gives the same bits as one by one (checked while encoding).",
    )
    text_batch: int = Field(
        16,
        ge=1,
        description="Captions of one length that the text encoder encodes at a time, under the same condition.",
    )
    exact_batches: bool = Field(
        True,
        description="Use batches only if they give the same bits as encoding one by one. False: always use them; the last bits of an entry then depend on the others in its batch.",
    )
    online: bool = Field(
        True,
        description="Let `mmspeed train` encode missing entries during its first epoch; false: an incomplete cache is an error.",
    )
    shard_mb: float = Field(256.0, gt=0, description="Size at which a shard is closed, in megabytes.")
    latent_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Number type that latents are stored in."
    )
    text_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Number type that text embeddings are stored in."
    )
    full_hash: bool = Field(
        False, description="Hash whole files for the content id, instead of their size and 16 blocks spread over them."
    )

    @model_validator(mode="after")
    def _decoder_has_the_device(self) -> PreprocessConfig:
        if self.decoder_device == "run" and self.decoder != "torchcodec":
            raise ValueError(f"decoder_device: run goes with decoder: torchcodec; {self.decoder} decodes on the cpu")
        return self
