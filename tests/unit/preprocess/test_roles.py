"""Samples as entries by role: a manifest's further columns become further entries, and every part of a cache knows them."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspeed.cli.cache_app import details
from mmspeed.config import Config, make_config, roles
from mmspeed.data import DatasetCache, Sample, SampleUse, webdataset
from mmspeed.data.cache.tables import SAMPLES_FILE, read_table, sample_schema
from mmspeed.data.loading.collate import VideoCollate, assemble
from mmspeed.data.maintenance.merge import merge
from mmspeed.data.maintenance.prune_pack import prune
from mmspeed.data.maintenance.verify import verify
from mmspeed.device import pick
from mmspeed.errors import UserError
from mmspeed.models.codecs.vae import load_codec
from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder, OnlineBuilder, check
from mmspeed.preprocess.build.coordination import ProcessRecord, read_part, write_part
from mmspeed.preprocess.build.ray import _source_of, _table_of
from mmspeed.preprocess.records.sample_table import ClipRow
from mmspeed.preprocess.report.show import draw_entry
from mmspeed.preprocess.sources.discover import list_sources
from tests.support.caches import flip, tar_bytes
from tests.support.media import write_image, write_video
from tests.support.runs import small_tree

ROLES = {"roles": {"control": "control_path"}}
GOOD = 4  # rows whose control is the next row's video


def tree_of(folder: Path, rows: list[dict[str, Any]], source: dict[str, Any]) -> dict[str, Any]:
    """`small_tree` of a CSV manifest with these rows."""
    tree = small_tree(folder, 1)
    manifest = folder / "clips.csv"
    with open(manifest, "w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
        writer.writeheader()
        writer.writerows(rows)
    tree["data"]["sources"] = [{"path": str(manifest), "name": "clips", **source}]
    return tree


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of different bytes and one shape, and some that go with none of them."""
    folder = tmp_path_factory.mktemp("media")
    for number in range(GOOD):
        write_video(folder / f"{number}.mp4", options={"crf": str(12 + number)})
    write_video(folder / "short.mp4", frames=30)
    write_video(folder / "slow.mp4", fps=12)
    write_video(folder / "wide.mp4", width=112)
    write_image(folder / "picture.png")
    (folder / "broken.mp4").write_bytes(b"no video")
    return folder


def good_rows(media: Path) -> list[dict[str, Any]]:
    return [
        {
            "video": str(media / f"{number}.mp4"),
            "caption": f"clip {number}",
            "control_path": str(media / f"{(number + 1) % GOOD}.mp4"),
            "split": "val" if number == 0 else "train",
        }
        for number in range(GOOD)
    ]


def config_of(folder: Path, media: Path, *overrides: str, **source: Any) -> Config:
    return make_config(tree_of(folder, good_rows(media), source or ROLES), overrides, origin="test")


@pytest.fixture(scope="module")
def built(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A whole cache with controls. Not to be changed."""
    config = config_of(tmp_path_factory.mktemp("built"), media)
    report = CacheBuilder(config).run()
    assert (report.rejected, report.clips_encoded) == (0, GOOD + 1)  # and the blank one
    assert (report.encoded, report.reused) == (GOOD - 1, 1)  # the last one's are encoded as those of others
    return config


def by_source(cache: DatasetCache) -> dict[str, Sample]:
    return {Path(sample.source).stem: sample for sample in cache.samples}


VARIANTS = ("data.windows=2", "data.crops=2", "data.mirror=true", "data.variants=draw", "data.buckets.0.width=32")


def test_a_control_has_the_frames_crop_and_flip_of_its_video(media: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, media, *VARIANTS)
    assert CacheBuilder(config).run().clips_encoded == 8 * GOOD + 1
    cache = DatasetCache(config.cache_dir)
    samples = by_source(cache)
    for number in range(GOOD):  # the entry that the file has as a video: so it was encoded once, too
        assert samples[str(number)].roles["control"] == samples[str((number + 1) % GOOD)].latent_keys
        assert len(set(samples[str(number)].latent_keys)) == 8 and len(set(samples[str(number)].roles["blank"])) == 1
    draws = [(SampleUse(sample, epoch, 0), 1.0) for epoch in range(3) for sample in samples.values()]
    batch, drawn = assemble(cache, draws, 0, 0.0), set()
    for item, (draw, _) in enumerate(draws):
        latents, controls = (
            [cache.latent(key)["mean"] for key in keys]
            for keys in (draw.sample.latent_keys, draw.sample.roles["control"])
        )
        (variant,) = (place for place, latent in enumerate(latents) if torch.equal(latent, batch["latents"][item]))
        assert torch.equal(controls[variant], batch["control.latents"][item])
        drawn.add(variant)
    assert len(drawn) > 3


def test_the_batch_of_a_run(built: Config) -> None:
    cache = DatasetCache(built.cache_dir)
    collate, draws = VideoCollate(cache, 0, 0.1), [(SampleUse(sample, 0, 0), 1.0) for sample in cache.samples]
    batch = collate(draws)
    assert collate.shape(draws).tensors == {name: tuple(tensor.shape) for name, tensor in batch.tensors.items()}
    assert batch.to(torch.device("cpu"), torch.bfloat16)["control.latents"].dtype == torch.bfloat16
    grey = load_codec(built.vae, pick("cpu"), built.codec_weights).encode(torch.zeros(1, 3, 5, 32, 48)).mean_BCThw
    assert torch.equal(batch["blank.latents"], grey.expand_as(batch["latents"])) and bool(grey.any())
    for read in webdataset(cache, batch_size=GOOD - 1, seed=0):
        assert read["control.latents"].shape == read["latents"].shape


def test_without_roles_rows_columns_and_keys_are_as_ever(built: Config, media: Path, tmp_path: Path) -> None:
    shutil.copytree(built.cache_dir, tmp_path / "cache")
    config = config_of(tmp_path, media, name="clips")
    assert CacheBuilder(config).run().clips_encoded == 0
    table = read_table(config.cache_dir / SAMPLES_FILE)
    assert table.schema.names == sample_schema().names
    assert {s.key for s in DatasetCache(config.cache_dir).samples}.isdisjoint(
        s.key for s in DatasetCache(built.cache_dir).samples
    )
    assert "roles:" not in DatasetCache(config.cache_dir).info["config"]


BAD = {
    "": ("bad_row", "'control_path' names no file, its control: it is empty"),
    "gone.mp4": ("missing_file", "its control gone.mp4: no such file"),
    "short.mp4": ("role_differs", "it has 96 x 64 pixels, 30 frames, 24 a second; its video 96 x 64 pixels, 36 frames"),
    "slow.mp4": ("role_differs", "36 frames, 12 a second; its video 96 x 64 pixels, 36 frames, 24 a second"),
    "wide.mp4": ("role_differs", "it has 112 x 64 pixels"),
    "picture.png": ("role_differs", "1 frames, 0 a second"),
    "broken.mp4": ("undecodable", "its control broken.mp4: "),
}


def test_rows_whose_control_does_not_serve_are_rejected_by_name(media: Path, tmp_path: Path) -> None:
    rows = good_rows(media)
    for bad in BAD:
        shutil.copy(media / "0.mp4", tmp_path / f"of-{bad or 'none'}.mp4")
        rows.append({**rows[1], "video": f"of-{bad or 'none'}.mp4", "control_path": bad})
        if (media / bad).is_file():
            shutil.copy(media / bad, tmp_path)
    config = make_config(tree_of(tmp_path, rows, ROLES), origin="test")
    lines = "\n".join(check(config).lines())
    assert f"11 files, 9 sources, {GOOD} usable, 7 rejected" in lines and "role_differs         4" in lines
    assert f"role control: {GOOD} clips, {GOOD} to encode once" in lines
    report = CacheBuilder(config).run()
    assert (report.encoded + report.reused, report.rejected) == (GOOD, 5) and len(report.rejections) == len(BAD)
    found = [(rejection.reason.value, rejection.detail) for rejection in report.rejections]
    for reason, detail in BAD.values():
        assert any(reason == why and detail in how for why, how in found), (reason, detail, found)
    assert sorted(by_source(DatasetCache(config.cache_dir))) == [str(number) for number in range(GOOD)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"kontrol": "a"}, "'kontrol' is no role: use control, chosen, rejected"),
        ({"control": " "}, "the column of the role control is blank"),
        ({"chosen": "control_path"}, "the role chosen is one of a pair: name the column of rejected, too"),
        ({"control": "depth"}, "has no column 'depth'; .*: correct `roles`, which takes the control from it"),
    ],
)
def test_columns_that_cannot_be(media: Path, tmp_path: Path, columns: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list_sources(config_of(tmp_path, media, roles=columns).data)


def test_places_that_cannot_have_roles(media: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = tree_of(tmp_path, [{**row, "control": row.pop("control_path")} for row in good_rows(media)], {})
    list_sources(make_config(tree, origin="test").data)
    assert "has a column 'control' that no role reads" in caplog.text
    both = [*tree["data"]["sources"], {"path": str(media), **ROLES}]
    with pytest.raises(
        UserError, match=r"media\d* has the role control, and .*clips\.csv has not: name it for all sources"
    ):
        make_config(tree, [f"data.sources={both}"], origin="test")
    tree["data"]["sources"] = both[1:]
    with pytest.raises(UserError, match="has no columns, and `roles` names some; name a manifest"):
        list_sources(make_config(tree, origin="test").data)


def test_another_role_is_a_line_of_the_table(media: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(roles.ROLES, "before", roles.Role("before"))
    config = config_of(tmp_path, media, roles={"before": "control_path"})
    assert CacheBuilder(config).run().clips_encoded == GOOD
    cache = DatasetCache(config.cache_dir)
    samples = by_source(cache)
    assert dict(samples["0"].roles) == {"before": samples["1"].latent_keys}
    batch = assemble(cache, [(SampleUse(samples[str(number)], 0, 0), 1.0) for number in (0, 1)], 0, 0.0)
    assert torch.equal(batch["before.latents"][0], batch["latents"][1])


def test_a_pair_is_two_latents_of_a_sample(media: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, media, roles={"chosen": "video", "rejected": "control_path"})
    assert CacheBuilder(config).run().clips_encoded == GOOD
    cache = DatasetCache(config.cache_dir)
    batch = assemble(cache, [(SampleUse(sample, 0, 0), 1.0) for sample in cache.samples], 0, 0.0)
    assert torch.equal(batch["chosen.latents"], batch["latents"])
    assert not torch.equal(batch["rejected.latents"], batch["latents"])


def test_care_knows_the_entries(built: Config, media: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(built.cache_dir, tmp_path / "cache"))
    assert prune(root).empty and not verify(root).damage
    cache = DatasetCache(root)
    sample = by_source(cache)["0"]
    assert draw_entry(cache, sample.roles["blank"][0], tmp_path / "a.png").startswith("5 frames of")
    assert "dB from the source" in draw_entry(cache, sample.key, tmp_path / "b.png")
    assert details(cache, sample.key)["control"][0]["key"] == sample.roles["control"][0]
    entry = cache.entry(sample.roles["blank"][0])
    del cache
    merge(tmp_path / "merged", [root])
    assert by_source(DatasetCache(tmp_path / "merged"))["0"] == sample
    rows = [{**row, "control_path": row["video"]} for row in good_rows(media)]
    other = make_config(tree_of(tmp_path, rows, ROLES), [f"data.cache={root}"], origin="test")
    CacheBuilder(other).run()  # of the same entries, used otherwise
    assert prune(root).empty
    CacheBuilder(config_of(tmp_path, media, name="clips")).run()
    assert prune(root).entries == 1  # the blank one: the others are videos, too
    flip(tmp_path / "merged" / entry.shard, entry.offset + entry.bytes - 1)
    assert [damage.key for damage in verify(tmp_path / "merged").damage] == [entry.key]


def test_the_first_epoch_of_training_makes_the_same_cache(built: Config, media: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, media)
    config = make_config(config.model_dump(), ["model.control=true"], origin="test")
    TrainPipeline(config, OnlineBuilder(config)).run()
    assert tar_bytes(config.cache_dir) == tar_bytes(built.cache_dir)
    assert (config.cache_dir / SAMPLES_FILE).read_bytes() == (built.cache_dir / SAMPLES_FILE).read_bytes()


def test_processes_tell_each_other_of_roles(built: Config, tmp_path: Path) -> None:
    row = ClipRow("a", "train", "c", "005x0032x0048", 0, 0, "k", ("t",), roles=("control",), role_keys=("l",))
    write_part(tmp_path / "part.parquet", ProcessRecord([row]))
    assert read_part(tmp_path / "part.parquet").rows == [row]
    sources = list_sources(built.data).sources
    assert [_source_of(row) for row in _table_of(sources).to_pylist()] == sources
