"""Care of a cache: what `verify` names, what a repair keeps, and that packing, pruning and merging lose and change no byte."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmspeed.data import CacheWriter, DatasetCache, Sample
from mmspeed.data.cache.files import TempFile
from mmspeed.data.cache.keys import entry_key, sample_key
from mmspeed.data.cache.seals import is_sealed
from mmspeed.data.cache.tables import (
    index_files,
    index_path,
    read_info,
    read_rejects,
    shard_of_index,
    write_info,
    write_samples,
)
from mmspeed.data.maintenance.merge import MergeReport, merge, unite_samples
from mmspeed.data.maintenance.prune_pack import blocks_of, pack, plan_prune, prune, publish
from mmspeed.data.maintenance.repair import mend
from mmspeed.data.maintenance.stats import census
from mmspeed.data.maintenance.stored_entries import trusted_rows
from mmspeed.data.maintenance.verify import Findings, verify
from mmspeed.errors import UserError
from mmspeed.models.codecs.linear import LinearCodec
from tests.support.caches import BUCKET, FOLDER, add_latent, add_text, flip, latent, tar_bytes
from tests.support.care_caches import CODEC, build_whole, codec, contents


@pytest.fixture
def root(tmp_path: Path) -> Path:
    build_whole(tmp_path / "cache")
    return tmp_path / "cache"


def lines(findings: Findings) -> list[str]:
    return [str(damage) for damage in findings.damage]


def test_a_whole_cache_has_no_damage(root: Path) -> None:
    findings = verify(root)
    assert (findings.damage, findings.notes, findings.foreign, findings.live, findings.left) == ([], [], [], [], [])
    assert findings.entries == findings.whole == 15


def test_damaged_entries_are_named_with_key_shard_and_source(root: Path) -> None:
    shard = f"{FOLDER}/000001.tar"
    first, second, *_ = trusted_rows(root, shard)
    flip(root / shard, first.offset + first.bytes - 1)
    flip(root / shard, second.offset + 1024 + 512 + 20)  # in its sidecar
    actual = lines(verify(root))
    assert actual[0] == f"{shard}: latents {first.key} ({first.source}): its checksum differs"
    assert f"{shard}: latents {second.key} ({second.source}): its sidecar" in actual[1] and len(actual) == 2
    assert verify(root).whole == 13


def test_the_writer_refuses_and_verify_finds_numbers_that_are_not_finite(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = torch.full((4, 2, 2, 4), float("nan"))
    place = {"bucket": BUCKET, "source": "bad.mp4"}
    key = entry_key({"kind": "latent", "number": 99})
    words = rf"latents {key} \(bad.mp4\) is not stored: its `logvar` holds numbers that are not finite"
    with CacheWriter(root) as writer:
        with pytest.raises(UserError, match=words):
            writer.add("latents", key, {"mean": latent(1), "logvar": bad}, {"number": 99}, **place)  # type: ignore[arg-type]
        assert not writer.has("latents", key)
        monkeypatch.setattr("mmspeed.data.cache.writer.not_finite", lambda tensors: None)  # a writer that does not look
        assert writer.add("latents", key, {"mean": bad}, {"number": 99}, **place)  # type: ignore[arg-type]
    (line,) = lines(verify(root))
    assert line.endswith(f"latents {key} (bad.mp4): its `mean` holds numbers that are not finite")
    assert verify(root).whole == 15
    assert mend(root).lost == [f"latents {key} (bad.mp4)"]
    assert verify(root).damage == [] and verify(root).entries == 15


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda shard: flip(shard, 1300), "bytes between its entries have changed"),
        (lambda shard: os.truncate(shard, 3000), "the shard ends after"),
        (lambda shard: shard.unlink(), "the shard is missing"),
        (lambda shard: flip(shard, 0), "its header in the tar differs"),
    ],
)
def test_damage_of_a_shard(root: Path, harm: Callable[[Path], None], said: str) -> None:
    harm(root / FOLDER / "000000.tar")
    assert said in " ".join(lines(verify(root)))


def test_an_entry_that_no_row_lists_is_found(root: Path) -> None:
    """Index, size and digest are all of one mind, but a member of the tar is in no row."""
    from mmspeed.data.cache.shards import shard_sha256
    from mmspeed.data.cache.tables import write_index

    shard = f"{FOLDER}/000000.tar"
    rows = trusted_rows(root, shard)
    write_index(root, shard, rows[:-1], (root / shard).stat().st_size, shard_sha256(root / shard))
    assert f"{shard}: holds something that its index does not list" in lines(verify(root))


def test_damage_of_tables_and_codec(root: Path) -> None:
    for name in (
        "cache.json",
        "index/samples.parquet",
        "rejects/rejects.parquet",
        CODEC,
        f"index/{index_files(root)[0].name}",
    ):
        before = (root / name).read_bytes()
        flip(root / name, len(before) // 2)
        assert f"{name}: is not as it was written" in lines(verify(root)), name
        (root / name).unlink()
        missing = " ".join(lines(verify(root)))
        assert f"{name}: is missing" in missing or "no index lists its entries" in missing, name
        (root / name).write_bytes(before)
    (root / CODEC).unlink()
    codec(1).save(root / CODEC)
    assert lines(verify(root)) == [f"{CODEC}: is another codec than the one that cache.json records"]


def test_tables_that_took_each_others_place_are_found(root: Path) -> None:
    one, other = index_files(root)[:2]
    one_bytes, other_bytes = one.read_bytes(), other.read_bytes()
    one.write_bytes(other_bytes)
    other.write_bytes(one_bytes)
    assert sum("it lists the entries of another shard" in line for line in lines(verify(root))) == 2


def test_samples_that_name_what_is_not_there(root: Path) -> None:
    shard = f"{FOLDER}/000000.tar"
    count = len(trusted_rows(root, shard))
    (root / shard).unlink()
    index_path(root, shard).unlink()
    findings = verify(root)
    assert findings.lacking == count and findings.damage == []  # as after a first epoch that was stopped
    assert f"{count} of 12 samples have no stored encoding" in findings.notes[0]
    (root / "null/000000.tar").unlink()
    index_path(root, "null/000000.tar").unlink()
    assert "the encoding of the samples' empty caption is missing" in lines(verify(root))[0]


def test_foreign_live_and_left_files_are_no_damage(root: Path) -> None:
    (root / "notes.txt").write_text("mine")
    (root / "report.html").write_text("<html>")
    (root / FOLDER / ".1-dead.tmp").write_bytes(b"half")
    temp = TempFile(root / "texts")
    findings = verify(root)
    assert (findings.damage, findings.foreign, findings.left) == ([], ["notes.txt"], [f"{FOLDER}/.1-dead.tmp"])
    assert findings.live == [f"texts/{temp.path.name}"]
    for command in (mend, prune, lambda root: pack(root, 10**6)):
        with pytest.raises(UserError, match="preprocess or train is writing"):
            command(root)
    temp.discard()
    assert mend(root).done == [f"removed {FOLDER}/.1-dead.tmp, left by a killed writer"]


def test_an_unfinished_an_older_and_no_cache(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no dataset cache"):
        verify(tmp_path)
    with CacheWriter(tmp_path) as writer:
        add_latent(writer, 0)
    findings = verify(tmp_path)
    assert findings.damage == [] and "preprocess has not finished" in findings.notes[0]
    (tmp_path / "cache.json").write_text(json.dumps({"schema": 1, "mmspeed": "0.1"}))
    with pytest.raises(UserError, match=r"has schema 1 \(made by mmspeed 0.1\)"):
        verify(tmp_path)


def test_a_damaged_codec_is_refused(tmp_path: Path) -> None:
    fitted = codec()
    fitted.save(tmp_path / "codec.safetensors")
    data = (tmp_path / "codec.safetensors").read_bytes()
    assert is_sealed(data) and LinearCodec.load(tmp_path / "codec.safetensors").fingerprint == fitted.fingerprint
    flip(tmp_path / "codec.safetensors", len(data) - 1)
    with pytest.raises(UserError, match="is damaged: replace it by an intact copy"):
        LinearCodec.load(tmp_path / "codec.safetensors")


def test_a_repair_drops_what_is_damaged_and_lists_it(root: Path) -> None:
    right, shard = contents(root), f"{FOLDER}/000001.tar"
    before, (first, *others) = tar_bytes(root), trusted_rows(root, shard)
    flip(root / shard, first.offset)
    report = mend(root)
    assert report.lost == [f"latents {first.key} ({first.source})"]
    assert report.done == [f"dropped {shard}; its {len(others)} intact entries are in {FOLDER}/000004.tar now"]
    assert "run `mmspeed preprocess`" in report.todo[0]
    lost = {f"{first.key}.safetensors", f"{first.key}.json"}
    assert tar_bytes(root) == {name: data for name, data in before.items() if name not in lost}
    assert [line for line in lines(verify(root)) if "samples have no stored" not in line] == []
    with CacheWriter(root) as writer:  # as preprocess does
        assert add_latent(writer, int(str(first.source).removesuffix(".mp4"))) == first.key
    assert verify(root).damage == [] and contents(root) == right


def test_a_repair_lists_shards_again_whose_index_is_damaged(root: Path) -> None:
    right, before = contents(root), {path: path.read_bytes() for path in root.rglob("*.tar")}
    for number, path in enumerate(index_files(root)):
        flip(path, 40) if number % 2 else path.unlink()
    report = mend(root)
    assert report.lost == [] and all("again" in line for line in report.done)
    assert {path: path.read_bytes() for path in root.rglob("*.tar")} == before
    assert verify(root).damage == [] and contents(root) == right


def test_a_repair_that_was_killed_leaves_nothing_twice(root: Path) -> None:
    """The new shard stands without its index, and the damaged one is still there: as after a kill in between."""
    shard = f"{FOLDER}/000001.tar"
    first, *others = trusted_rows(root, shard)
    flip(root / shard, first.offset)
    new = publish(root, FOLDER, blocks_of(root, others))
    assert new is not None
    index_path(root, new).unlink()
    mend(root)
    assert census(root)["duplicates"] == 0 and len(tar_bytes(root)) == 2 * 14  # which asserts that no name stands twice
    assert not [line for line in lines(verify(root)) if "have no stored encoding" not in line]


def test_a_repair_of_tables_and_codec(root: Path) -> None:
    kept = tar_bytes(root)
    for name in ("cache.json", "index/samples.parquet", "rejects/rejects.parquet", CODEC):
        flip(root / name, 30)
    report = mend(root)
    assert {f"removed {name}" for name in ("cache.json", "index/samples.parquet", "rejects/rejects.parquet")} < set(
        report.done
    )
    assert (root / f"{CODEC}.damaged").exists() and not (root / CODEC).exists()
    assert any("put a copy of the codec's file back" in what for what in report.todo)
    assert tar_bytes(root) == kept and mend(root).done == []


def latent_of(writer: CacheWriter, codec_name: str, content: str) -> str:
    """An entry whose key names a codec, as preprocess' do."""
    import torch

    parts = {"content": content, "codec": codec_name, "dtype": "float32"}
    writer.add(
        "latents", entry_key(parts), {"mean": torch.ones(4, 1, 2, 2)}, parts, bucket=BUCKET, tokens=4, source="x"
    )
    return entry_key(parts)


def test_prune_removes_what_no_sample_names(root: Path) -> None:
    with CacheWriter(root) as writer:
        keys = [latent_of(writer, codec_name, "c") for codec_name in ("a" * 64, "b" * 64)]
        latent_of(writer, "b" * 64, "gone")
        add_text(writer, "nobody says this")
    samples = list(DatasetCache(root).samples)
    more = Sample(sample_key([keys[0]], []), (keys[0],), (), "train", BUCKET, "x.mp4", 4, "c")
    write_samples(root, [*samples, more], null_key=DatasetCache(root).null_key)
    right = contents(root)
    plan = plan_prune(root)
    assert plan.entries == 3 and dict(plan.reasons) == {
        "latents: made with another codec bbbbbbbbbbbb": 1,
        "latents: no sample has this content": 1,
        "texts: no sample has this caption": 1,
    }
    assert "latents unused: 2 entries" in plan.lines()[0]
    assert plan_prune(root, ["bbb"]).entries == 1 and plan_prune(root, ["c"]).entries == 3
    assert len(tar_bytes(root)) == 2 * 19
    assert prune(root).entries == 3
    assert len(tar_bytes(root)) == 2 * 16 and verify(root).damage == [] and contents(root) == right
    assert plan_prune(root).empty
    flip(root / "index/samples.parquet", 200)
    with pytest.raises(UserError, match="is not as it was written"):
        prune(root)


def test_parts_of_an_unfinished_build_are_kept_and_stop_a_prune(root: Path) -> None:
    part = root / "parts" / "build" / "rank-00000.parquet"
    part.parent.mkdir(parents=True)
    part.write_bytes((root / "rejects/rejects.parquet").read_bytes())
    findings = verify(root)
    assert (findings.damage, findings.foreign) == ([], []) and "is unfinished" in findings.notes[0]
    with pytest.raises(UserError, match="is unfinished"):
        prune(root)
    flip(part, 99)
    assert lines(verify(root)) == ["parts/build/rank-00000.parquet: is not as it was written"]
    mend(root)
    assert not part.exists()


def test_pack_keeps_every_byte_of_every_entry(root: Path) -> None:
    with CacheWriter(root, mend=False) as one, CacheWriter(root, mend=False) as two:  # two writers at once
        assert add_latent(one, 100) == add_latent(two, 100)
    right = contents(root)
    files = {path: path.read_bytes() for path in root.rglob("*.tar")}
    assert census(root)["duplicates"] == 1
    report = pack(root, 30_000)
    assert report.duplicates == 1 and report.after < report.before and census(root)["duplicates"] == 0
    after = tar_bytes(root)  # asserts that no name stands twice
    assert len(after) == 2 * 16 and verify(root).damage == [] and contents(root) == right
    whole = b"".join(files.values())
    assert all(data in whole for data in after.values())
    for path in (root / "index").glob("latents-*.parquet"):
        keys = [entry.key for entry in trusted_rows(root, shard_of_index(path))]
        assert keys == sorted(keys)
    again = pack(root, 30_000)
    assert again.entries == 0 and again.before == again.after == report.after


def test_pack_refuses_damaged_entries(root: Path) -> None:
    flip(root / FOLDER / "000001.tar", 600)
    before = {path: path.read_bytes() for path in root.rglob("*.tar")}
    with pytest.raises(UserError, match="run `mmspeed cache verify --repair"):
        pack(root, 10**6)
    assert {path: path.read_bytes() for path in root.rglob("*.tar")} == before


def test_merged_caches_hold_what_both_held(tmp_path: Path) -> None:
    one, two, whole = (tmp_path / name for name in ("one", "two", "whole"))
    build_whole(one, range(8), sources=("a",))
    build_whole(two, range(6, 14), sources=("b",))
    build_whole(whole, range(14), sources=("a", "b"))
    report = merge(one, [two])
    assert report.samples == 14 and report.present == 2 + 3 and report.linked + report.copied > 0
    assert verify(one).damage == [] and tar_bytes(one) == tar_bytes(whole)
    merged, built = contents(one), contents(whole)
    merged.pop("rejects"), built.pop("rejects")
    assert merged == built
    assert {row["path"] for row in read_rejects(one)} == {"bad.mp4", "a.gif", "b.gif"}
    assert read_info(one)["made_for"] == read_info(whole)["made_for"]
    assert verify(two).damage == []
    again = merge(one, [two])
    assert (again.linked, again.copied, again.samples) == (0, 0, 14)
    fresh = merge(tmp_path / "fresh", [one, two])
    assert fresh.samples == 14 and fresh.linked > 0 and tar_bytes(tmp_path / "fresh") == tar_bytes(whole)
    assert contents(tmp_path / "fresh") == contents(one)


def test_caches_that_do_not_fit_are_refused_in_one_line(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    build_whole(one, range(2))
    build_whole(two, range(2, 4))
    info = {name: value for name, value in read_info(two).items() if name not in ("seal", "schema", "mmspeed")}
    before = tar_bytes(one)
    for name, value, said in (
        ("latent_dtype", "bfloat16", "latent_dtype float32 and bfloat16"),
        ("encoding_version", 1, "encoding_version 2 and 1"),
        ("made_for", {**info["made_for"], "fps": 4.0}, r"other data settings \(fps\)"),
        (
            "encoders",
            {**info["encoders"], "vae": {**info["encoders"]["vae"], "fingerprint": "f" * 64}},
            "vae.fingerprint",
        ),
    ):
        write_info(two, {**info, name: value})
        with pytest.raises(UserError, match=said) as error:
            merge(one, [two])
        assert "\n" not in str(error.value)
    assert tar_bytes(one) == before
    with pytest.raises(UserError, match="into itself"):
        merge(one, [one])


def test_samples_of_two_caches_are_numbered_as_in_one() -> None:
    def sample(key: str, source: str, split: str = "train", dataset: str = "") -> Sample:
        return Sample(key, ("l",), (), split, BUCKET, source, dataset=dataset)

    base, report = "0" * 32, MergeReport()
    united = unite_samples(
        [
            [sample(base, "b.mp4"), sample(f"{base}-1", "c.mp4")],
            [
                *(sample(base, "a.mp4"), sample(f"{base}-1", "b.mp4", "val")),
                *(sample(f"{base}-2", "b.mp4", dataset="dogs"), sample("odd-1", "d.mp4")),
            ],
        ],
        report,
    )
    assert [(s.key, s.source, s.dataset) for s in united] == [
        *((base, "a.mp4", ""), (f"{base}-1", "b.mp4", ""), (f"{base}-2", "b.mp4", "dogs")),
        *((f"{base}-3", "c.mp4", ""), ("odd-1", "d.mp4", "")),
    ]
    assert report.split_conflicts == 1 and united[1].split == "train"
