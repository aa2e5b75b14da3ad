"""The bench of `mmspeed preprocess`: whether the slowest stage is kept busy, whichever it is.

Half 1 encodes with a codec that is far slower than decoding: its encoder must be busy. Half 2 decodes large clips for a codec that
costs next to nothing: they must be decoded as fast as bare PyAV or decord do it on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from mmspeed.config import Config, make_config
from mmspeed.errors import UserError
from mmspeed.log import get_logger, setup

from .decoding import ClipFiles, DecodingSpeed, bare_ways, clips_of, cpu_seconds, make_clips, start_seconds

log = get_logger("bench")

BUSY, DECODE = 0.90, 0.90  # what must be reached
ENCODED, DECODED = (720, 12), (1080, 16)  # lines and number of the clips of each half
VAE_WIDTH = 12  # makes a clip take seconds on a CPU core


@dataclass(frozen=True)
class EncoderBusy:
    """Half 1. Seconds are of the stage that encodes the clips."""

    clips: int
    seconds: float
    busy_seconds: float
    start_seconds: float  # until the first clip was decoded
    decode_wait_seconds: float
    write_wait_seconds: float

    @property
    def busy(self) -> float:
        return self.busy_seconds / self.seconds

    @property
    def busy_once_begun(self) -> float:
        """The same without the time before the first clip, which a long run does not notice."""
        return self.busy_seconds / (self.seconds - self.start_seconds)


@dataclass(frozen=True)
class DecoderSpeed:
    """Half 2. Frames a second are medians over the rounds."""

    files: int
    frames: int
    rounds: int
    build: float  # frames/s of the stage that encodes the clips, from its beginning to its end
    build_once_begun: float  # the same without starting the decoder processes
    start_seconds: float
    build_busy: float  # share of the stage in which the codec encoded
    cpu_ms: dict[str, float] = field(default_factory=dict)  # CPU milliseconds a frame of all processes
    bare: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> str:
        return max(self.bare, key=lambda name: self.bare[name])

    @property
    def share(self) -> float:
        return self.build / self.bare[self.best]

    @property
    def share_once_begun(self) -> float:
        return self.build_once_begun / self.bare[self.best]


@dataclass(frozen=True)
class TextSpeed:
    """Captions a second, and whether both ways gave the same bytes."""

    captions: int
    one_by_one: float
    batched: float
    equal: bool


@dataclass(frozen=True)
class PreprocessResult:
    """What the bench found."""

    cores: int
    encoder: EncoderBusy
    decoder: DecoderSpeed
    text: TextSpeed | None  # None: MiniLM is not installed

    def passed(self) -> bool:
        """Whether each half's slowest stage was kept busy."""
        return self.encoder.busy >= BUSY and self.decoder.share >= DECODE

    def lines(self) -> list[str]:
        e, d = self.encoder, self.decoder
        return [
            f"encoder slowest: {e.clips} clips in {e.seconds:.1f} s on {self.cores} cores",
            f"  encoder busy {e.busy:.1%} of the time ({e.busy_once_begun:.1%} once the first clip was there,"
            f" after {e.start_seconds:.2f} s): {_verdict(e.busy >= BUSY)} (at least {BUSY:.0%})",
            f"  waited {e.decode_wait_seconds:.2f} s for decoders, {e.write_wait_seconds:.2f} s for the disk",
            f"decoder slowest: {d.files} files, {d.frames} frames, {d.rounds} rounds, medians",
            f"  {'frames/s':>9}  {'CPU ms/frame':>12}",
            f"  {d.build:>9.1f}  {d.cpu_ms['build']:>12.2f}  preprocess, whole stage (the codec takes {d.build_busy:.1%} of it)",
            f"  {d.build_once_begun:>9.1f}  {'':>12}  preprocess, without the {d.start_seconds:.2f} s in which its decoders start",
            *(f"  {speed:>9.1f}  {d.cpu_ms[name]:>12.2f}  bare {name}" for name, speed in d.bare.items()),
            *([] if any("decord" in name for name in d.bare) else ["  decord is not installed, and not compared"]),
            f"  {d.share:.1%} of the best bare one, {d.share_once_begun:.1%} once begun:"
            f" {_verdict(d.share >= DECODE)} (at least {DECODE:.0%})",
            *self._text_lines(),
        ]

    def _text_lines(self) -> list[str]:
        if self.text is None:
            return ["captions: MiniLM is not installed, and not measured"]
        t = self.text
        same = "the same bytes" if t.equal else "OTHER BYTES"
        return [
            f"captions: {t.captions}, {t.one_by_one:.0f} /s one by one, {t.batched:.0f} /s in batches of one length; {same}"
        ]

    def to_json(self) -> str:
        """All figures, and what follows from them."""
        e, d = self.encoder, self.decoder
        more = {
            "encoder_busy": e.busy,
            "encoder_busy_once_begun": e.busy_once_begun,
            "decode_share": d.share,
            "decode_share_once_begun": d.share_once_begun,
            "passed": self.passed(),
        }
        return json.dumps(asdict(self) | more, indent=2)


def _verdict(passed: bool) -> str:
    return "PASSED" if passed else "FAILED"


def bench_preprocess(
    output: Path, videos: Path | None = None, rounds: int = 3, cores: int | None = None, vae_width: int = VAE_WIDTH
) -> PreprocessResult:
    """Measure both halves on the same `cores` (all that this process may use), on clips made on the spot or of a folder."""
    import torch

    output = output.resolve()
    allowed = sorted(os.sched_getaffinity(0))
    chosen = allowed[: cores or len(allowed)]
    threads = torch.get_num_threads()
    os.sched_setaffinity(0, chosen)  # child processes inherit it
    torch.set_num_threads(len(chosen))
    try:
        small, large = (
            make_clips(output / "clips", count, height) if videos is None else clips_of(videos, output, count)
            for height, count in (ENCODED, DECODED)
        )
        encoder = encoder_busy(output, small, len(chosen), vae_width)
        decoder = decoder_speed(output, large, len(chosen), rounds)
        return PreprocessResult(len(chosen), encoder, decoder, text_speed(output))
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)


def encoder_busy(output: Path, clips: ClipFiles, cores: int, vae_width: int) -> EncoderBusy:
    """Build a cache with a slow codec, and say how long it was busy."""
    from mmspeed.preprocess import CacheBuilder

    log.info("encoder slowest: a Wan codec with random weights, width %d", vae_width)
    folder = _save_vae(output / f"vae-{vae_width}", vae_width)
    data = {"fps": 8.0, "buckets": [{"frames": 17, "height": 64, "width": 112}]}
    config = _config(output, "encode", clips, cores, data, {"kind": "diffusers", "pretrained": str(folder)})
    report = CacheBuilder(config).run()
    return EncoderBusy(
        clips=report.clips_encoded,
        seconds=report.latent_seconds,
        busy_seconds=report.busy_seconds,
        start_seconds=report.start_seconds,
        decode_wait_seconds=report.decode_wait_seconds,
        write_wait_seconds=report.write_wait_seconds,
    )


def decoder_speed(output: Path, clips: ClipFiles, cores: int, rounds: int) -> DecoderSpeed:
    """Build caches with a quick codec, in turns with bare decoders of the same files."""
    from mmspeed.preprocess import CacheBuilder

    data = {"fps": None, "windows": "all", "buckets": [{"frames": 25, "height": 96, "width": 160}]}
    config = _config(output, "decode", clips, cores, data, {"kind": "linear", "channels": 8, "fit_clips": 2})
    CacheBuilder(config).run()  # fits the codec, and reads the files once
    bare, busy, starts = bare_ways(cores), list[float](), list[float]()
    speeds: dict[str, list[DecodingSpeed]] = {name: [] for name in ("build", *bare)}
    for number in range(rounds):
        shutil.rmtree(config.cache_dir / "latents")
        before, report = cpu_seconds(), CacheBuilder(config).run()
        speeds["build"].append(DecodingSpeed(clips.frames / report.latent_seconds, cpu_seconds() - before))
        busy.append(report.busy)
        starts.append(start_seconds(cores, clips))
        for name, measure in bare.items():
            speeds[name].append(measure(clips))
        summary = ", ".join(f"{name} {some[-1].frames_per_s:.0f}" for name, some in speeds.items())
        log.info("decoder slowest, round %d of %d: frames/s: %s", number + 1, rounds, summary)
    medians = {name: statistics.median(speed.frames_per_s for speed in some) for name, some in speeds.items()}
    start, build = statistics.median(starts), medians.pop("build")
    return DecoderSpeed(
        files=len(clips.paths),
        frames=clips.frames,
        rounds=rounds,
        build=build,
        build_once_begun=clips.frames / (clips.frames / build - start),
        start_seconds=start,
        build_busy=statistics.median(busy),
        cpu_ms={
            name: 1e3 * statistics.median(speed.cpu_seconds for speed in some) / clips.frames
            for name, some in speeds.items()
        },
        bare=medians,
    )


def text_speed(output: Path, count: int = 2000) -> TextSpeed | None:
    """Encode made-up captions of many lengths, one by one and in batches; None where MiniLM is not installed."""
    import torch

    from mmspeed.device import pick
    from mmspeed.preprocess.encoding.encode import Encoders, TrustedBatches, encode_texts

    encoders = Encoders(_config(output, "text", None, 1, {}, {"kind": "linear"}), pick())
    try:
        _ = encoders.text
    except UserError:
        return None
    captions = made_up_captions(count)
    results, rates = [], []
    for size in (1, encoders.config.preprocess.text_batch):
        list(encode_texts(encoders, TrustedBatches(1), captions[:50]))  # warm
        started = time.monotonic()
        results.append(dict(encode_texts(encoders, TrustedBatches(size), captions)))
        rates.append(count / (time.monotonic() - started))
    alone, together = results
    pairs = [(alone[caption], together[caption]) for caption in alone]
    equal = alone.keys() == together.keys() and all(
        isinstance(one, dict) and isinstance(other, dict) and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in pairs
    )
    return TextSpeed(count, rates[0], rates[1], equal)


def made_up_captions(count: int) -> list[str]:
    """Distinct captions of 4 to 60 words, always the same."""
    subjects = ("a rabbit", "an old man", "the earth", "a red kite", "two birds", "a small boat", "the tall grass")
    doings = ("runs over a meadow", "turns slowly", "waits in the morning sun", "drifts along the river", "shines")
    places = ("in the dark", "under a pink sky", "near the old mill", "while the camera pans left", "at sunset")
    sentences = [" ".join(parts) for parts in product(subjects, doings, places)]
    return [
        ", then ".join(sentences[(number * 7 + 13 * place) % len(sentences)] for place in range(1 + number % 6))
        + f", take {number}"
        for number in range(count)
    ]


def _config(
    output: Path, name: str, clips: ClipFiles | None, cores: int, data: dict[str, Any], vae: dict[str, Any]
) -> Config:
    """A config of one of the halves, with a cache that holds no latents yet."""
    cache = output / f"cache-{name}"
    shutil.rmtree(cache, ignore_errors=True)
    tree = {
        "name": name,
        "output": str(output / "runs"),
        "data": {
            "sources": [{"path": str(clips.manifest if clips else output)}],
            "cache": str(cache),
            "buckets": [{"frames": 1, "height": 64, "width": 64}],
            "allow_upscale": True,
            **data,
        },
        "vae": vae,
        "preprocess": {"decode_workers": cores},
    }
    return make_config(tree, origin="preprocess bench")


def _save_vae(folder: Path, width: int) -> Path:
    """A Wan autoencoder of random weights, always the same, with a diffusers folder's files."""
    import diffusers
    import torch

    if not (folder / "config.json").exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            vae: Any = diffusers.AutoencoderKLWan(base_dim=width, z_dim=16)
        vae.save_pretrained(folder)
    return folder


def main() -> int:
    """Check that preprocess keeps its slowest stage busy, the encoder or the decoders; 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.preprocess", description=main.__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/preprocess"))
    parser.add_argument("--videos", type=Path, help="folder of your own videos; default: generated clips")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of decoding; medians count")
    parser.add_argument("--cores", type=int, help="default: all")
    parser.add_argument("--vae-width", type=int, default=VAE_WIDTH, help="of the slow codec: larger is slower")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    setup()
    result = bench_preprocess(chosen.output, chosen.videos, chosen.rounds, chosen.cores, chosen.vae_width)
    print(result.to_json() if chosen.json else "\n".join(result.lines()))
    return 0 if result.passed() else 1


if __name__ == "__main__":
    raise SystemExit(main())
