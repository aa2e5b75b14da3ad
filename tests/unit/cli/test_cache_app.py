"""`mmspeed cache`: what its commands print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmspeed.__main__ import main
from mmspeed.data import CacheWriter, DatasetCache
from mmspeed.data.maintenance.stored_entries import trusted_rows
from tests.support.caches import FOLDER, add_latent, flip
from tests.support.care_caches import CODEC, build_whole


@pytest.fixture
def root(tmp_path: Path) -> Path:
    build_whole(tmp_path / "cache")
    return tmp_path / "cache"


def test_stat(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CacheWriter(root) as writer:
        add_latent(writer, 99)
    (root / "texts" / ".1-dead.tmp").touch()
    assert main(["cache", "stat", str(root)]) == 0
    text = capsys.readouterr().out
    for part in (
        "samples: 11 train, 1 val",
        "005x0016x0032: 13 entries",
        "texts: 2 entries",
        "encoder vae: channels 4, fingerprint",
        "rejected sources: 2",
        "free on its file system",
        "unused: 1 entries that no sample refers to",
        "left by killed writers: 1 files",
        "small shards: latents/005x0016x0032",
        "tokens of the latent:\n    16 ############################## 13 latents",
    ):
        assert part in text, part
    assert main(["cache", "stat", str(root), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["unused"] == {"latents": 1, "texts": 0} and facts["lacking"] == {"latents": 0, "texts": 0}
    assert facts["folders"][FOLDER]["shards"] == 5 and facts["rejected"] == {"no_video": 1, "too_short": 1}
    (root / FOLDER / "000000.tar").unlink()
    assert main(["cache", "stat", str(root)]) == 0
    assert "incomplete: 3 entries that samples refer to are not stored, 1 shards are gone" in capsys.readouterr().out


def test_verify_and_repair(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify", str(root)]) == 0
    assert "15 of 15 entries are intact" in capsys.readouterr().out
    entry = trusted_rows(root, f"{FOLDER}/000000.tar")[1]
    flip(root / entry.shard, entry.offset)
    assert main(["cache", "verify", str(root)]) == 1
    text = capsys.readouterr().out
    assert f"damaged: {entry.shard}: latents {entry.key} ({entry.source}): its checksum differs" in text
    assert "14 of 15 entries are intact" in text and "--repair" in text
    assert main(["cache", "verify", str(root), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["damage"][0]["key"] == entry.key
    assert main(["cache", "verify", str(root), "--repair"]) == 1  # an entry is still to be made
    text = capsys.readouterr().out
    assert f"dropped: latents {entry.key} ({entry.source})" in text and "to do: run `mmspeed preprocess`" in text
    with CacheWriter(root) as writer:
        add_latent(writer, int(str(entry.source).removesuffix(".mp4")))
    assert main(["cache", "verify", str(root), "--repair"]) == 0
    assert "nothing to repair" in capsys.readouterr().out


def test_prune_asks_first(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "prune", str(root)]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    with CacheWriter(root) as writer:
        key = add_latent(writer, 99)
    assert main(["cache", "prune", str(root)]) == 0
    assert "would remove:\n  latents unused: 1 entries" in capsys.readouterr().out
    assert DatasetCache(root).entry(key)
    assert main(["cache", "prune", str(root), "--yes"]) == 0
    assert "removed 1 entries" in capsys.readouterr().out
    assert key not in DatasetCache(root).keys("latents")


def test_pack_and_merge(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "pack", str(root), "--shard-mb", "1"]) == 0
    assert "6 shards are 3 now: 12 entries copied" in capsys.readouterr().out
    build_whole(tmp_path / "other", range(12, 14))
    assert main(["cache", "merge", str(root), str(tmp_path / "other")]) == 0
    assert "14 samples; 1 shards taken as they are, 0 entries copied, 3 were present" in capsys.readouterr().out
    assert main(["cache", "merge", str(root), str(tmp_path / "none")]) == 1
    assert "no dataset cache" in capsys.readouterr().err


def test_show_as_text(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "show", str(root), "-n", "2"]) == 0
    listed = capsys.readouterr().out
    assert listed.count(".mp4") == 2 and "... and 10 more" in listed
    sample = next(iter(DatasetCache(root).samples))
    assert main(["cache", "show", str(root), sample.key, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["latents"][0]["key"] == sample.latent_keys[0] and shown["texts"][0]["meta"] == {"caption": "a rabbit"}
    assert main(["cache", "show", str(root), sample.text_keys[0]]) == 0
    assert json.loads(capsys.readouterr().out)["section"] == "texts"
    assert main(["cache", "show", str(root), "nonsense"]) == 1
    assert "no entry nonsense" in capsys.readouterr().err
    (root / CODEC).unlink()
    assert main(["cache", "show", str(root), sample.key]) == 0
    assert "no picture: " in capsys.readouterr().err


def test_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("stat", "verify", "prune", "pack", "show"):
        assert main(["cache", command, str(tmp_path)]) == 1
        assert "no dataset cache" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
