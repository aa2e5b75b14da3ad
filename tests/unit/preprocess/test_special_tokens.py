"""What special tokens mean in text caches: those around a text, those that a text spells, and those of a chat's template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from mmspeed.config import make_config
from mmspeed.data.cache.tables import read_info, write_info
from mmspeed.data.cache.text_cache import TextCache
from mmspeed.data.cache.tokenizer_file import TextTokenizer
from mmspeed.errors import UserError
from mmspeed.pipelines.domains.language.start import open_texts
from mmspeed.preprocess.texts.chat import ChatError, ChatTemplate
from tests.support.special_tokens import BEGIN, DEFAULT_SYSTEM, END, HEAD, LLAMA, TURN, save
from tests.unit.pipelines.test_language_start import ALONE
from tests.unit.preprocess.test_texts import build, write

HELLO = list(b"hello")


def ids_of(cache: TextCache) -> list[list[int]]:
    return [cache.ids(number).tolist() for number in range(len(cache))]


@pytest.mark.parametrize(
    ("tokenizer", "settings", "ids"),
    [
        ({}, {}, [BEGIN, *HELLO, END]),  # as Llama 3
        ({"rule": "<|begin|> $A <|end|>"}, {}, [BEGIN, *HELLO, END]),  # the end once
        ({"rule": "$A <|turn|>"}, {}, [*HELLO, TURN, END]),
        ({"rule": "$A"}, {}, [*HELLO, END]),
        (
            {"rule": "$A", "add_bos_token": True},
            {},
            [*HELLO, END],
        ),  # tokenizer.json has the last word, as in transformers
        ({}, {"begin_of_document": False}, [*HELLO, END]),
        ({"rule": "$A <|turn|>"}, {"begin_of_document": "<|head|>"}, [HEAD, *HELLO, END]),
        ({}, {"end_of_document": "<|turn|>"}, [BEGIN, *HELLO, TURN]),
    ],
)
def test_a_document_has_what_its_tokenizer_puts_around_it(
    tmp_path: Path, tokenizer: dict[str, Any], settings: dict[str, Any], ids: list[int]
) -> None:
    section = {"kind": "transformers", "path": str(save(tmp_path / "tokenizer", **tokenizer)), **settings}
    _, cache = build(tmp_path, [{"path": str(write(tmp_path / "a.jsonl", ["hello"]))}], section)
    assert ids_of(cache) == [ids]
    assert cache.tokenizer().encode_all(["hello", ""]) == [ids[:-1], []]
    own = cache.info["tokenizer"]
    assert (own.get("begin"), own.get("behind")) == (
        [ids[0]] if ids[0] > 255 else None,
        [TURN] if ids[-2:] == [TURN, END] else None,
    )


def test_a_token_that_there_is_not_begins_no_document(tmp_path: Path) -> None:
    section = {"kind": "transformers", "path": str(save(tmp_path / "tokenizer")), "begin_of_document": "<s>"}
    with pytest.raises(UserError, match=r"no token '<s>', which is to begin each document"):
        build(tmp_path, [{"path": str(write(tmp_path / "a.jsonl", ["hello"]))}], section)


def made_earlier(root: Path) -> None:
    """Let a cache be one of before `begin_of_document`."""
    info = read_info(root)
    del info["tokenizer_config"]["begin_of_document"]
    write_info(root, {name: value for name, value in info.items() if name not in ("mmspeed", "schema", "seal")})


def test_caches_of_before_keep_their_bytes_or_are_named(tmp_path: Path) -> None:
    source = {"path": str(write(tmp_path / "a.jsonl", ["Once upon a time"]))}
    plain = {"kind": "transformers", "path": str(save(tmp_path / "plain", "$A"))}
    llama = {"kind": "transformers", "path": str(save(tmp_path / "llama"))}
    build(tmp_path / "plain", [source], plain)
    made_earlier(tmp_path / "plain" / "cache")
    again, _ = build(tmp_path / "plain", [source], plain)
    assert (again.blocks, again.reused) == (1, 1)

    _, before = build(tmp_path / "llama", [source], {**llama, "begin_of_document": False})
    made_earlier(before.root)
    tree = {"task": "language", "texts": {"sources": [source], "cache": str(before.root), "validation": 0.0}}
    with pytest.raises(UserError, match=r"was made with other tokenizer\.begin_of_document"):
        open_texts(make_config({**tree, "tokenizer": llama}, (), origin="test"), None, ALONE)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"without the tokens that its tokenizer puts around each text .*false keeps it"
    ):
        build(tmp_path / "llama", [source], llama)
    again, kept = build(tmp_path / "llama", [source], {**llama, "begin_of_document": False})
    assert again.reused == 1 and kept.fingerprint == before.fingerprint
    _, other = build(tmp_path / "new", [source], llama)
    assert other.info["tokenizer"]["fingerprint"] != kept.info["tokenizer"]["fingerprint"]


def test_a_text_that_spells_a_special_token_has_the_ids_of_its_words(tmp_path: Path) -> None:
    texts = ["Once upon a time", "a <|endoftext|> b"]
    _, cache = build(tmp_path / "a", [{"path": str(write(tmp_path / "a.jsonl", texts[:1]))}])
    assert cache._table.blocks == ["bc4ee2c0635db1258a639ce882aff4c0"]  # as ever
    assert cache.fingerprint == "f8caf89ac860b731e490d2587ed2e157"
    report, cache = build(tmp_path / "b", [{"path": str(write(tmp_path / "b.jsonl", texts))}])
    assert ids_of(cache) == [[*text.encode(), 256] for text in texts]
    assert report.lines()[2].endswith(f"in 1 documents, such as {tmp_path / 'b.jsonl'}:2 (<|endoftext|>)")
    again, _ = build(tmp_path / "b", [{"path": str(tmp_path / "b.jsonl")}])
    assert (again.reused, again.spelled) == (1, 1)


def test_a_vocabulary_that_has_a_special_token_as_words_rejects_texts_that_spell_it(tmp_path: Path) -> None:
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), *((sign, -3.0) for sign in "▁abs</>")]
    core = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.add_special_tokens(["</s>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    core.save(str(folder / "tokenizer.json"))
    path = write(tmp_path / "a.jsonl", ["a </s> b", "a b"])
    section = {"kind": "transformers", "path": str(folder), "end_of_document": "</s>"}
    report, cache = build(tmp_path, [{"path": str(path)}], section)
    assert report.rejected == {"special_token": 1} and ids_of(cache) == [[2, 3, 2, 4, 1]]


TOOLS = LLAMA.replace("{{ m['content'] }}", "{{ m['content'] }}{% if m.call %}<think>{{ m.call | tojson }}{% endif %}")
PARTS = LLAMA.replace("{{ m['content'] }}", "{% for p in m['content'] %}{{ p.text | trim }}{% endfor %}")
_TURN = "{{ m['content'] }}<|turn|>"
GROUPED = LLAMA.replace(
    _TURN, "{{ m['content'] }}{% if loop.last or m.role != 'tool' or loop.nextitem.role != 'tool' %}<|turn|>{% endif %}"
)
ASKED = "{% if messages[-1].role == 'system' %}{{ raise_exception('no question') }}{% endif %}" + LLAMA
MARKED = LLAMA.replace(
    _TURN, f"{{% if m.role == 'user' %}}{_TURN}{{% else %}}{{% generation %}}{_TURN}{{% endgeneration %}}{{% endif %}}"
)


def say(*words: Any) -> list[dict[str, Any]]:
    """A chat in turns that begin with the user."""
    return [{"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(words)]


def turn(role: str, *words: bytes | int) -> list[int]:
    """The ids of a turn."""
    ids = [number for word in words for number in ([word] if isinstance(word, int) else word)]
    return [HEAD, *f"{role}\n".encode(), *ids, TURN]


@pytest.mark.parametrize(
    ("template", "chat", "ids", "trained"),
    [
        (LLAMA, say("hi <|end|><|head|>", "yo"), turn("user", b"hi <|end|><|head|>") + turn("assistant", b"yo"), b"yo"),
        (LLAMA, say("hi", "a<|turn|>b"), turn("user", b"hi") + turn("assistant", b"a<|turn|>b"), b"a<|turn|>b"),
        (PARTS, say([{"text": " <|end|> "}], [{"text": "yo"}]), turn("user", b"<|end|>") + turn("assistant", b"yo"), b"yo"),
        (MARKED, say("<|begin|>", "yo"), turn("user", b"<|begin|>") + turn("assistant", b"yo"), b"yo"),
        (
            TOOLS,
            [*say("hi"), {"role": "assistant", "content": None, "call": {"<|turn|>": "<|end|>", "y": None}}],
            turn("user", b"hi") + turn("assistant", b'<think>{"<|turn|>": "<|end|>", "y": null}'),
            b'<think>{"<|turn|>": "<|end|>", "y": null}',
        ),
        (LLAMA, say("", "yo")[1:], turn("assistant", b"yo"), b"yo"),  # begins with the assistant
        (ASKED, [{"role": "system", "content": "x"}, *say("hi", "yo")], turn("system", b"x") + turn("user", b"hi") + turn("assistant", b"yo"), b"yo"),
        (GROUPED, [{"role": "tool", "content": "x"}, {"role": "tool", "content": "y"}, *say("", "yo")[1:]], [*turn("tool", b"x")[:-1], *turn("tool", b"y"), *turn("assistant", b"yo")], b"yo"),
        (DEFAULT_SYSTEM, say("", "yo", "a", "b")[1:], turn("system", b"be good") + turn("assistant", b"yo") + turn("user", b"a") + turn("assistant", b"b"), [*b"yo", TURN, *b"b"]),
        (LLAMA, say("hi", "  \n yo  "), turn("user", b"hi") + turn("assistant", b"  \n yo  "), b"  \n yo  "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("trim", [None, True])
def test_the_tokens_of_a_chat_are_those_of_its_template(
    tmp_path: Path, template: str, chat: list[Any], ids: list[int], trained: Any, trim: bool | None
) -> None:
    got, marks = ChatTemplate(save(tmp_path, template=template, trim=trim)).encode(chat)
    assert got == [BEGIN, *ids]
    assert [number for number, mark in zip(got, marks, strict=True) if mark] == [*trained, TURN]


@pytest.mark.parametrize(
    ("flag", "chat", "ids"),
    [
        ("normalized", say("a<|TURN|>", "yo"), turn("user", b"a<|turn|>") + turn("assistant", b"yo")),
        ("single_word", say("<|end|>", "<|turn|>yo."), turn("user", b"<|end|>") + turn("assistant", b"<|turn|>yo.")),
        ("single_word", say("a", "<|turn|>."), [*turn("user", b"a<|turn|>")[:-1], *turn("assistant", b"<|turn|>.")]),
    ],
)
def test_a_token_is_what_the_tokenizer_takes_in_the_words_of_the_template(
    tmp_path: Path, flag: str, chat: list[Any], ids: list[int]
) -> None:
    path = save(tmp_path, template=LLAMA) / "tokenizer.json"
    tree = json.loads(path.read_text())
    for token in tree["added_tokens"]:
        token[flag] |= token["content"] == "<|turn|>"
    path.write_text(json.dumps({**tree, "normalizer": {"type": "Lowercase"}}))
    chats, words = ChatTemplate(path.parent), TextTokenizer(path)
    assert chats.encode(chat)[0] == [BEGIN, *ids] and chats.altered(chat) == (flag == "normalized")
    assert words.encode("<|TURN|>") == [*b"<|turn|>"] and words.special.folds("<|TURN|>") == (flag == "normalized")


def test_the_head_of_a_turn_that_a_user_spells_is_text_and_a_thought_of_the_assistant_is_not(tmp_path: Path) -> None:
    """As in DeepSeek, whose heads of turns are no special tokens of its tokenizer.json."""
    folder = save(tmp_path, template=LLAMA.replace("<|head|>", "[user]").replace("{{ bos_token }}", "[think]"))
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_tokens(["[user]", "[think]"])
    core.save(str(folder / "tokenizer.json"))
    user, think = core.token_to_id("[user]"), core.token_to_id("[think]")
    chats = ChatTemplate(folder)
    got, _ = chats.encode(say("[user]", "[think]x"))
    assert got == [think, user, *b"user\n[user]", TURN, user, *b"assistant\n", think, *b"x", TURN]
    with pytest.raises(ChatError, match="private character"):
        chats.encode(say("\U00100001", "yo"))


@pytest.mark.parametrize("template", [LLAMA, LLAMA.replace("{{ bos_token }}", "")])
def test_a_chat_has_one_begin_whoever_writes_it(tmp_path: Path, template: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": say(words, "yo")}) + "\n" for words in ("hi", "<|end|>")))
    section = {"kind": "transformers", "path": str(save(tmp_path / "tokenizer", template=template))}
    report, cache = build(tmp_path, [{"path": str(path), "content": "chat"}], section)
    assert ids_of(cache)[0] == [BEGIN, *turn("user", b"hi"), *turn("assistant", b"yo")]
    marks = cache.trained(0)
    assert marks is not None and cache.ids(0)[marks].tolist() == [*b"yo", TURN] and report.spelled == 1
