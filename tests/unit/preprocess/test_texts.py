"""Text caches from files: every kind of file, every rejection by name, chats, ids, tokenizers, kills and processes."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from mmspeed import guards
from mmspeed.config.texts import TextsConfig, TextSourceConfig, TokenizerConfig
from mmspeed.data.cache.text_cache import TextCache
from mmspeed.errors import UserError
from mmspeed.preprocess.texts.cache_builder import TextCacheBuilder, TextReport
from mmspeed.preprocess.texts.sources import rows_of

SPARSE = {"major": "1", "minor": "0", "realsize": "60000000", "name": "a.txt"}
WORDS = ["Once upon a time", "there was\na rabbit", "Grüße", "世界 and more"]


def build(
    root: Path, sources: list[dict[str, Any]], tokenizer: dict[str, Any] | None = None, **texts: Any
) -> tuple[TextReport, TextCache]:
    values = {"sources": sources, "cache": str(root / "cache"), "validation": 0.0, **texts}
    config = TypeAdapter(TokenizerConfig).validate_python(tokenizer or {"kind": "bytes"})
    report = TextCacheBuilder(TextsConfig(**values), config).run()
    return report, TextCache(root / "cache")


def texts_of(cache: TextCache) -> list[str]:
    tokenizer = cache.tokenizer()
    return [tokenizer.decode(cache.ids(number).tolist()) for number in range(len(cache))]


def write(path: Path, rows: list[Any], column: str = "text") -> Path:
    """A file of rows, of the kind that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    packing = path.suffix if path.suffix in (".gz", ".zst") else ""
    kind = Path(path.name.removesuffix(packing)).suffix
    if kind == ".json":
        data = json.dumps([{column: row} for row in rows]).encode()
    elif kind == ".jsonl":
        data = "".join(json.dumps({column: row}) + "\n" for row in rows).encode()
    elif kind == ".csv":
        text = io.StringIO()
        csv.writer(text).writerows([["n", column], *([str(n), row] for n, row in enumerate(rows))])
        data = text.getvalue().encode()
    elif kind == ".parquet":
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({column: rows}), sink)
        data = sink.getvalue().to_pybytes()
    elif kind == ".tar":
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            for number, row in enumerate(rows):
                info = tarfile.TarInfo(f"{number}.txt")
                info.size = len(row.encode())
                tar.addfile(info, io.BytesIO(row.encode()))
        data = stream.getvalue()
    else:
        data = "\n\n \n".join(rows).encode()
    if packing == ".gz":
        data = gzip.compress(data)
    elif packing == ".zst":
        data = pa.Codec("zstd").compress(data, asbytes=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("kind", "packing"), [(".jsonl", ""), (".csv", ".gz"), (".parquet", ""), (".tar", ".zst"), (".txt", ".gz")]
)
def test_every_kind_of_file(tmp_path: Path, kind: str, packing: str) -> None:
    path = write(tmp_path / f"a{kind}{packing}", WORDS)
    report, cache = build(tmp_path, [{"path": str(path), "split": "blank_line"}])
    assert [text.strip() for text in texts_of(cache)] == WORDS
    assert cache.ids(2).tolist() == [*"Grüße".encode(), *(b"\n" if kind == ".txt" else b""), 256]
    assert (report.documents, sum(report.rejected.values())) == (4, 0)


def test_a_folder_of_files_each_a_document(tmp_path: Path) -> None:
    for number, words in enumerate(WORDS):
        write(tmp_path / "texts" / "deep" / f"{number}.txt", [words])
    (tmp_path / "texts" / "README.md").write_text("not taken")
    sources = [{"path": str(tmp_path / "texts")}, {"path": str(tmp_path / "texts/deep/*.txt")}]
    report, cache = build(tmp_path, sources)
    assert texts_of(cache) == WORDS * 2 and report.rejected == {"other_file": 1}
    assert cache.sources == ["texts", "*.txt"] and cache.source.tolist() == [0] * 4 + [1] * 4


def test_the_files_of_a_folder_are_found_and_the_others_counted(tmp_path: Path) -> None:
    """Hidden folders, links to other disks and in circles, names in capitals, and the cache itself."""
    root, disk = tmp_path / "texts", tmp_path / "disk"
    for name in ("B.JSONL", "c.ndjson", "d/e.Jsonl.GZ", ".git/config.json", ".ipynb_checkpoints/a.jsonl", ".a.jsonl"):
        write(root / name, [name])
    (root / "d" / "e.Jsonl.GZ").write_bytes(gzip.compress(b'{"text": "d/e.Jsonl.GZ"}'))
    for name in ("B.JSONL", "c.ndjson"):
        (root / name).write_text(json.dumps({"text": name}))
    write(disk / "deep" / "f.jsonl", ["behind a link"])
    (root / "linked").symlink_to(disk)
    (disk / "deep" / "circle").symlink_to(root)
    (root / "gone.jsonl").symlink_to(tmp_path / "nothing")
    (root / "notes.md").write_text("x")
    rejected = {"hidden": 3, "other_file": 1, "unreadable": 1}
    for path in (root, tmp_path / "text*"):
        report, cache = build(root, [{"path": str(path)}])  # its own cache is in the folder
        assert texts_of(cache) == ["B.JSONL", "c.ndjson", "d/e.Jsonl.GZ", "behind a link"]
        assert report.rejected == rejected and report.examples["hidden"] == f"{root}/.a.jsonl"
    again, _ = build(root, [{"path": str(root)}])
    assert again.rejected == rejected and again.reused == again.blocks


@pytest.mark.parametrize(
    ("data", "texts", "rejected"),
    [
        ('[{"text": "a"},\n {"text": "b"}, 3]\n', ["a", "b"], {"broken_line": 1}),
        ('\ufeff [ {"text": "a"} ]', ["a"], {}),
        ('{"text": "a"}\n{"text": "b"}\n', ["a", "b"], {}),
        ('{"text": "a"\n{"text": "b"}', ["b"], {"broken_line": 1}),
        ('{\n "text": "a",\n "n": 1\n}', ["a"], {}),
        ('[{"text": "a"}, {"text": "b"', ["a"], {"broken_line": 1}),
        ('[{"text": "a"}]\n[{"text": "b"}]', ["a"], {"broken_line": 1}),
        ('[{"text": "' + "x" * 600_000 + '"}, {"text": "a"}]', ["a"], {"too_large": 1}),
        ('[{"text": "a"}, {"text": "' + "x" * 9_000_000 + '"}]', ["a"], {"too_large": 1}),
        (json.dumps([{"text": f"{n:200}"} for n in range(9_000)]), [f"{n:200}" for n in range(9_000)], {}),
        ('[{"text": "a"}, ' + "[" * 100_000, ["a"], {"broken_line": 1}),
    ],
)  # fmt: skip
def test_rows_of_json(tmp_path: Path, data: str, texts: list[str], rejected: dict[str, int]) -> None:
    (tmp_path / "a.json").write_text(data)
    report, cache = build(tmp_path, [{"path": str(tmp_path / "a.json")}], max_document_mb=0.5)
    assert texts_of(cache) == texts and report.rejected == rejected


def test_rejections_by_name_and_count(tmp_path: Path) -> None:
    lines = [
        b'{"text": "kept"}',
        b'{"text": "  "}',
        b'{"text": 3}',
        b'{"txt": "x"}',
        b'{"text": "x"',
        b'{"text": "\xff\xfe"}',
        b'{"text": "\\ud800"}',
        b"[1]",
        b"[" * 100_000,
        b'{"text": "' + b"x" * 300_000 + b'"}',
        b'{"text": "' + b"y" * 2_000 + b'"}',
        b'{"text": "last"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    report, cache = build(tmp_path, [{"path": str(tmp_path / "a.jsonl")}], max_tokens=1_000, max_document_mb=0.2)
    assert texts_of(cache) == ["kept", "last"]
    assert report.rejected == {
        "empty": 1,
        "not_a_string": 1,
        "missing_column": 1,
        "broken_line": 3,
        "not_utf8": 2,
        "too_large": 1,
        "too_long": 1,
    }
    assert {row["reason"] for row in cache.rejects()} == set(report.rejected)
    assert cache.info["rejected"] == dict(report.rejected)
    again, _ = build(tmp_path, [{"path": str(tmp_path / "a.jsonl")}], max_tokens=1_000, max_document_mb=0.2)
    assert (again.rejected, again.reused) == (report.rejected, 1)


def test_bombs_are_refused_without_memory(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", ["kept"])
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb", compresslevel=9) as file:
        for _ in range(100):
            file.write(bytes(1 << 20))
    report, cache = build(tmp_path, [{"path": str(tmp_path / "bomb.jsonl.gz")}, {"path": str(good)}])
    assert report.rejected["too_large"] == 1 and len(cache) == 1
    assert "more than 200 times" in report.examples["too_large"]


def test_broken_files_lose_nothing_else(tmp_path: Path) -> None:
    good = write(tmp_path / "a" / "z.jsonl", ["kept"])
    for name in ("b.jsonl.gz", "c.parquet", "d.tar", "e.jsonl.zst"):
        (good.parent / name).write_bytes(b"no such thing" * 100)
    times = pa.table({"text": pa.array([2**62], pa.duration("s"))})
    pq.write_table(times, good.parent / "h.parquet")
    sparse = tarfile.TarInfo("a.txt")
    sparse.size = 512
    sparse.pax_headers = {f"GNU.sparse.{name}": value for name, value in SPARSE.items()}
    (good.parent / "i.tar").write_bytes(sparse.tobuf(tarfile.PAX_FORMAT) + b"0\n".ljust(512, b"\0") + bytes(1024))
    whole = write(good.parent / "f.tar", WORDS).read_bytes()
    (good.parent / "f.tar").write_bytes(whole[:1_540])  # the second member is cut
    (good.parent / "j.tar").write_bytes(whole[:1_100])  # its header
    write(good.parent / "g.parquet", ["x"], "other")
    report, cache = build(tmp_path, [{"path": str(good.parent)}])
    assert texts_of(cache) == [WORDS[0], WORDS[0], "kept"]
    assert report.rejected == {"broken_line": 7, "missing_column": 1, "too_large": 1}


@pytest.mark.parametrize(
    ("kind", "packing", "most"),
    [
        (".jsonl", ".gz", 16),
        (".json", ".gz", 16),
        (".csv", ".gz", 16),
        (".txt", ".gz", 16),
        (".tar", ".gz", 16),
        (".jsonl", ".zst", 300),
    ],
)
def test_rows_before_a_cut_are_read_and_the_cut_is_told(tmp_path: Path, kind: str, packing: str, most: int) -> None:
    """`most`: so many rows before the cut may be lost; zstd unpacks in blocks of 128 KiB."""
    noise = Random(1)
    rows = [f"{number} {noise.randbytes(200).hex()}" for number in range(3_000)]
    path = write(tmp_path / f"a{kind}{packing}", rows)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    report, cache = build(tmp_path, [{"path": str(path), "split": "blank_line"}])
    read = [text.strip() for text in texts_of(cache)]
    assert read == rows[: len(read)] and 1_500 - most < len(read) < 1_500 + most
    assert report.rejected == {"broken_line": 1} and "cannot be read further" in report.examples["broken_line"]


@pytest.mark.parametrize("as_stored", [True, False])
def test_tables_are_unfolded_elsewhere_and_never_beyond_the_limit(tmp_path: Path, as_stored: bool) -> None:
    long = pa.array(["words", "z" * 20_000_000])
    texts = pa.DictionaryArray.from_arrays(pa.array([None, 0, *[1] * 60], pa.int32()), long)
    one_each = pa.array(range(len(texts) + 1), pa.int32())
    chats = pa.ListArray.from_arrays(one_each, pa.StructArray.from_arrays([texts, texts], ["role", "content"]))
    numbers = pa.ListArray.from_arrays(pa.array([0, 2, 3_000_000], pa.int32()), pa.array(np.zeros(3_000_000, np.int32)))
    times = pa.array([2**62], pa.duration("s"))
    before = pa.default_memory_pool().max_memory()
    for content, values, reasons in (
        ("text", texts, ["not_a_string", "", *["too_large"] * 60]),
        ("chat", chats, ["", "", *["too_large"] * 60]),
        ("ids", numbers, ["", "too_large"]),
        ("text", pa.array([None, "words"], pa.string_view()), ["not_a_string", ""]),
        ("text", times, ["broken_line" if as_stored else "not_a_string"]),
    ):
        path = tmp_path / f"{content}.parquet"
        pq.write_table(pa.table({"d": values}), path, compression="zstd", store_schema=as_stored)
        source = {"path": str(path), "content": content, "column": "d"}
        config = TextsConfig(sources=[source], cache=str(tmp_path), max_document_mb=1)
        assert [row.reason for row in rows_of(config, config.sources[0])] == reasons
    assert pa.default_memory_pool().max_memory() <= before + 100_000_000


def test_rows_before_damage_are_kept_and_a_reader_that_dies_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": WORDS * 900}), path, row_group_size=1800, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[pq.read_metadata(path).row_group(1).column(0).data_page_offset] ^= 255
    path.write_bytes(data)
    config = TextsConfig(sources=[{"path": str(path)}], cache=str(tmp_path))
    *rows, last = rows_of(config, config.sources[0])
    assert [row.value for row in rows] == WORDS * 450 and last.reason == "broken_line"
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert ["ended by itself" in row.detail for row in rows_of(config, config.sources[0])] == [True]


MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|endoftext|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
THOUGHTS = PLAIN.replace("{{ m.content }}<|", "{% if loop.last %}<think></think>{% endif %}{{ m.content }}<|")
LAST_ONLY = "{% for m in messages %}{% if loop.last %}<|{{ m.role }}|>{% endif %}{{ m.content }}{% endfor %}"
CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes, four"},
]


def folder_of(root: Path, tmp_path: Path) -> Path:
    """A transformers folder with a tokenizer."""
    build(root, [{"path": str(write(tmp_path / "seed.jsonl", WORDS))}])
    return root / "cache" / "tokenizer"


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_chats_have_their_loss_on_the_assistant(tmp_path: Path, template: str) -> None:
    folder = folder_of(tmp_path / "seed", tmp_path)
    path = tmp_path / "chats.jsonl"
    chats = [CHAT, CHAT[:1], [{"role": "user"}, "x"], [{"content": "x"}], []]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    tokenizer = {"kind": "transformers", "path": str(folder), "chat_template": template}
    report, cache = build(tmp_path, [{"path": str(path), "content": "chat"}], tokenizer)
    marks = cache.trained(0)
    assert marks is not None and report.rejected == {"bad_chat": 3, "empty": 1}
    spans = cache.tokenizer().decode(cache.ids(0)[marks].tolist(), special=True)
    assert spans == "four<|endoftext|>yes, four<|endoftext|>"
    assert (
        cache.tokenizer().decode(cache.ids(0)[~marks].tolist())
        == "<|user|>2 + 2?<|assistant|><|user|>sure?<|assistant|>"
    )


def test_answers_that_the_template_changes_later_have_no_loss(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "seed", tmp_path)
    path = write(tmp_path / "chats.jsonl", [CHAT, CHAT[:2], CHAT[:3]], "messages")
    tokenizer = {"kind": "transformers", "path": str(folder), "chat_template": THOUGHTS}
    report, cache = build(tmp_path, [{"path": str(path), "content": "chat"}], tokenizer)
    trained = [cache.tokenizer().decode(cache.ids(n)[cache.trained(n)].tolist(), special=True) for n in (0, 1)]
    assert trained == ["<think></think>yes, four<|endoftext|>", "<think></think>four<|endoftext|>"]
    assert report.shortened == 1 and "alone have a loss in 1 chat" in "\n".join(report.lines())
    assert "changes each of its answers" in report.examples["bad_chat"] and report.rejected == {"bad_chat": 1}


SHAREGPT = [
    {"from": "system", "value": "short"},
    {"from": "human", "value": "2 + 2?"},
    {"from": "gpt", "value": "four"},
    {"from": "human", "value": "sure?"},
    {"from": "gpt", "value": "yes"},
]
OWN = {"assistant": "answer", "user": ["question", "context"], "system": "rules"}


@pytest.mark.parametrize("template", [MARKED, PLAIN])
@pytest.mark.parametrize(
    ("row", "turns", "said"),
    [
        ({"conversations": SHAREGPT}, None, ["s:short", "u:2 + 2?", "a:four", "u:sure?", "a:yes"]),
        ({"instruction": "Add.", "input": "2 + 2", "output": "four", "text": "x"}, None, ["u:Add.\n2 + 2", "a:four"]),
        ({"instruction": "Add 2 + 2.", "input": "", "output": "four"}, None, ["u:Add 2 + 2.", "a:four"]),
        ({"prompt": "2 + 2?", "completion": " four"}, None, ["u:2 + 2?", "a: four"]),
        ({"prompt": CHAT[:3], "completion": CHAT[3:]}, None, ["u:2 + 2?", "a:four", "u:sure?", "a:yes, four"]),
        ({"question": "2 + 2?", "answer": "four", "rules": None, "context": "sum"}, OWN, ["u:2 + 2?\nsum", "a:four"]),
        ({"question": "2 + 2?", "answer": "four", "rules": "short"}, OWN, ["s:short", "u:2 + 2?", "a:four"]),
    ],
)
def test_rows_of_other_formats_are_chats_of_transformers(
    tmp_path: Path, row: dict[str, Any], turns: dict[str, Any] | None, said: list[str], template: str
) -> None:
    """Ids and marks in each kind of file are those of `apply_chat_template` for the messages that the row says."""
    from transformers import PreTrainedTokenizerFast

    folder = folder_of(tmp_path / "seed", tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
    roles = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": roles[words[0]], "content": words[2:]} for words in said]
    asked = {"chat_template": MARKED, "return_dict": True, "return_assistant_tokens_mask": True}
    expected = theirs.apply_chat_template(messages, tokenize=True, **asked)
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        cells = {name: json.dumps(value) if name == "conversations" else value for name, value in row.items()}
        csv.writer(file).writerows([cells.keys(), cells.values()])
    source = {"content": "chat", **({} if turns is None else {"turns": turns})}
    tokenizer = {"kind": "transformers", "path": str(folder), "chat_template": template}
    for kind in ("jsonl", "parquet", *(["csv"] if not isinstance(row.get("prompt"), list) else [])):
        _, cache = build(tmp_path / kind, [{"path": str(tmp_path / f"a.{kind}"), **source}], tokenizer)
        marks = cache.trained(0)
        assert marks is not None and marks.any() and not marks.all()
        assert cache.ids(0).tolist() == expected["input_ids"]
        assert marks.astype(int).tolist() == expected["assistant_masks"]


def test_rows_without_a_chats_columns_say_which(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a", "completion": 3}\n')
    source = TextSourceConfig(path=str(tmp_path / "a.jsonl"), content="chat")
    rows = rows_of(TextsConfig(sources=(source,), cache="-"), source)
    assert [(row.reason, row.detail) for row in rows] == [
        (
            "missing_column",
            "it has no messages, conversations, instruction and output, prompt and completion",
        ),
        ("bad_chat", "completion is of type int"),
    ]


def test_a_template_that_changes_earlier_turns_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "seed", tmp_path)
    path = write(tmp_path / "chats.jsonl", [CHAT], "messages")
    tokenizer = {"kind": "transformers", "path": str(folder), "chat_template": LAST_ONLY}
    with pytest.raises(UserError, match=r"no document that can be used\nrejected, bad_chat: 1"):
        build(tmp_path, [{"path": str(path), "content": "chat"}], tokenizer)
    with pytest.raises(UserError, match="has no chat template"):
        build(tmp_path / "b", [{"path": str(path), "content": "chat"}])


def test_a_template_that_never_ends_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_TEMPLATE", 0.3)
    folder = folder_of(tmp_path / "seed", tmp_path)
    path = write(tmp_path / "chats.jsonl", [CHAT], "messages")
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = {"kind": "transformers", "path": str(folder), "chat_template": MARKED + loop}
    with pytest.raises(UserError, match=r"chat template does not end within 0\.3 s"):
        build(tmp_path, [{"path": str(path), "content": "chat"}], tokenizer)


def megatron(path: Path, documents: list[list[list[int]]], kind: str = "<u2", code: int = 8) -> Path:
    """Megatron's bin and idx of documents of sequences."""
    sequences = [np.array(sequence, kind) for document in documents for sequence in document]
    path.write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    begins = np.concatenate([[0], np.cumsum([sequence.nbytes for sequence in sequences])[:-1]]).astype("<i8")
    bounds = np.cumsum([0, *map(len, documents)]).astype("<i8")
    head = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([code])
    head += len(lengths).to_bytes(8, "little") + len(bounds).to_bytes(8, "little")
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + begins.tobytes() + bounds.tobytes())
    return path


def test_token_ids_are_taken(tmp_path: Path) -> None:
    rows = write(tmp_path / "ids.jsonl", [[1, 2], [], [257], [-1], ["x"], [True], 5], "ids")
    table = write(tmp_path / "ids.parquet", [[3, 4], [5]], "tokens")
    binary = megatron(tmp_path / "m.bin", [[[6, 7], [8]], [[9]], [[999]]])
    sources = [
        {"path": str(rows), "content": "ids"},
        {"path": str(table), "content": "ids", "column": "tokens"},
        {"path": str(binary), "content": "ids"},
    ]
    report, cache = build(tmp_path, sources)
    assert [cache.ids(n).tolist() for n in range(len(cache))] == [[1, 2], [3, 4], [5], [6, 7, 8], [9]]
    assert report.rejected == {"empty": 1, "unknown_ids": 6}


def test_an_index_of_megatron_that_lies(tmp_path: Path) -> None:
    binary = megatron(tmp_path / "m.bin", [[[6, 7]], [[8]]])
    binary.write_bytes(binary.read_bytes()[:4])
    report, cache = build(tmp_path, [{"path": str(binary), "content": "ids"}])
    assert len(cache) == 1 and report.rejected == {"broken_line": 1}


def test_a_tokenizer_is_trained_once(tmp_path: Path) -> None:
    text = " ".join(f"the rabbit number {n % 17} sat in the meadow" for n in range(300))
    path = write(tmp_path / "a.jsonl", [text, text[::-1]])
    tokenizer = {"kind": "train", "size": 300}
    _, cache = build(tmp_path / "a", [{"path": str(path)}], tokenizer)
    _, same = build(tmp_path / "b", [{"path": str(path)}], tokenizer)
    assert cache.vocabulary == 300 and texts_of(cache) == [text, text[::-1]]
    assert len(cache.ids(0)) < len(text) / 2
    assert cache.info["tokenizer"]["fingerprint"] == same.info["tokenizer"]["fingerprint"]
    write(tmp_path / "a.jsonl", [text, "more"])
    _, later = build(tmp_path / "a", [{"path": str(path)}], tokenizer)
    assert later.info["tokenizer"] == cache.info["tokenizer"] and texts_of(later) == [text, "more"]
    with pytest.raises(UserError, match="was made with another tokenizer"):
        build(tmp_path / "a", [{"path": str(path)}])


def test_of_two_builds_of_other_sources_the_second_waits_and_says_so(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number}.jsonl", [f"{number} {words}" for words in WORDS]) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda path: build(tmp_path, [{"path": str(path)}], {"kind": "train", "size": 300})[0], paths)
        said = [line for report in made for line in report.lines() if "sources" in line]
    assert said == ["the sources have changed since the build before: 1 new, 1 gone"]
    assert build(tmp_path, [{"path": str(paths[0])}], {"kind": "train", "size": 300})[0].reused == 1


def test_a_tokenizer_without_texts_to_train_on_says_why(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["", ""])
    with pytest.raises(UserError, match=r"with a text in it; rejected, empty: 2, such as .*a\.jsonl:1$"):
        build(tmp_path, [{"path": str(path)}], {"kind": "train", "size": 300})


def test_a_folder_of_transformers_is_loaded_again(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = folder_of(tmp_path / "seed", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("Grüße").input_ids) == "Grüße" and tokenizer.eos_token_id == 256
    (folder / "evil.py").write_text("raise SystemExit")
    path = write(tmp_path / "a.jsonl", WORDS)
    _, cache = build(tmp_path / "b", [{"path": str(path)}], {"kind": "transformers", "path": str(folder)})
    assert texts_of(cache) == WORDS and cache.tokenizer_folder is not None
    assert sorted(p.name for p in cache.tokenizer_folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="only fast tokenizers are taken"):
        build(tmp_path / "c", [{"path": str(path)}], {"kind": "transformers", "path": str(folder)})


def many(path: Path, count: int = 3_000) -> Path:
    generator = np.random.default_rng(0)
    sizes = generator.integers(200, 2_000, count)
    return write(path, [bytes(generator.integers(97, 123, size, np.uint8)).decode() for size in sizes])


def files(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }


@pytest.mark.slow
def test_processes_write_the_same_bytes(tmp_path: Path) -> None:
    path = many(tmp_path / "a.jsonl")
    for processes in (0, 2):
        report, _ = build(tmp_path / str(processes), [{"path": str(path)}], processes=processes, shard_mb=1.0)
        assert report.blocks > 2 and report.reused == 0
    assert files(tmp_path / "0") == files(tmp_path / "2")


@pytest.mark.slow
def test_an_added_document_changes_few_blocks(tmp_path: Path) -> None:
    path = many(tmp_path / "a.jsonl", 6_000)
    first, _ = build(tmp_path, [{"path": str(path)}])
    path.write_bytes(b'{"text": "in front"}\n' + path.read_bytes())
    report, cache = build(tmp_path, [{"path": str(path)}])
    assert texts_of(cache)[0] == "in front" and len(cache) == 6_001
    assert report.blocks - report.reused <= 1 < first.blocks


def test_a_document_that_a_held_out_source_has_is_held_out_everywhere(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", WORDS)
    held = write(tmp_path / "held.jsonl", [WORDS[2], "of its own"])
    report, cache = build(tmp_path, [{"path": str(train)}, {"path": str(held), "held_out": True}])
    assert cache.held_out.tolist() == [False, False, True, False, True, True] and report.held_out == 3
