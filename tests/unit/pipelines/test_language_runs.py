"""Language models of runs: folders that transformers loads, and texts that they write."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmspeed.__main__ import main
from mmspeed.config import make_config
from mmspeed.config.yaml_text import parse_yaml
from mmspeed.errors import UserError
from mmspeed.initialize import materialize
from mmspeed.loop.checkpoint.load import open_checkpoint
from mmspeed.loop.checkpoint.manager import latest
from mmspeed.loop.checkpoint.merging import whole_tensor
from mmspeed.models.language.families import config_tree, settings_of
from mmspeed.models.language.shapes import SHAPES, shape_named, tiny_twin
from mmspeed.models.language.weights import on_meta
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.language.domain import LanguageDomain
from mmspeed.pipelines.inference.language import LanguageModel, Writing, export_language_run, run_settings
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.preprocess.texts.preparation import TextPreparation
from tests.support.special_tokens import BEGIN, END, HEAD, TURN, save

WRITTEN = [name for name in SHAPES if name != "pangu-ultra-moe"]


def made_run(folder: Path, **model: Any) -> Path:
    """The folder of a run of three steps on two hundred lines."""
    (folder / "a.jsonl").write_text(
        "".join(
            json.dumps({"text": f"the rabbit {n} runs over a meadow of {n * n} flowers"}) + "\n" for n in range(200)
        )
    )
    tree = {
        "task": "language",
        "name": "own",
        "output": str(folder / "runs"),
        "texts": {"sources": [{"path": str(folder / "a.jsonl")}], "cache": str(folder / "cache"), "validation": 0.0},
        "model": {"shape": "tiny-qwen3-0.6b", **model},
        "sequence_length": 64,
        "train": {"steps": 3, "batch_size": 2, "lr": 1e-2, "warmup_steps": 0},
        "device": {"kind": "cpu"},
    }
    config = make_config(tree, (), origin="test")
    TextPreparation(config).build()
    TrainPipeline(config).run()
    return config.run_dir


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("language"))


@pytest.mark.parametrize("weights", ["ema"])
def test_transformers_loads_an_export_and_computes_what_the_decoder_does(
    run: Path, tmp_path: Path, weights: Any
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = export_language_run(run, tmp_path / "out", weights=weights)
    assert result.weights == weights and result.tensors == len(load_file(tmp_path / "out" / "model.safetensors"))
    folder = RunFolder.open(run)
    place, config = latest(folder.checkpoints), folder.run_config()
    assert place is not None
    index = open_checkpoint(place)[1]["tensors"]
    decoder = on_meta(run_settings(folder, config))  # type: ignore[arg-type]
    materialize(decoder, torch.device("cpu"))
    decoder.load_state_dict({name: whole_tensor(place, index, f"{weights}.{name}") for name in decoder.state_dict()})
    ids_BN = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits_BNV = theirs(ids_BN).logits
        output = decoder(ids_BN, torch.tensor([0, 30, 60], dtype=torch.int32))
    torch.testing.assert_close(output.logits_BNV, logits_BNV, atol=2e-6, rtol=2e-6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the rabbit 草"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    with pytest.raises(UserError, match=r"exists already; name a new folder"):
        export_language_run(run, tmp_path / "out")


def test_greedy_texts_are_those_of_the_likeliest_tokens(run: Path, tmp_path: Path) -> None:
    """In a batch, with a cache of keys and values, as one prompt after another without it."""
    export_language_run(run, tmp_path / "out")
    model = LanguageModel(tmp_path / "out", "cpu")
    prompts = ["the rabbit", "a"]
    texts = model(prompts, Writing(tokens=12))
    for prompt, text in zip(prompts, texts, strict=True):
        ids = model.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(model.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] == model.tokenizer.eos_token_id:
                break
        assert model.tokenizer.decode(ids, skip_special_tokens=True) == prompt + text
    warm = Writing(tokens=12, temperature=1.5, top_p=0.9, seed=1)
    assert model(prompts, warm) == model(prompts, warm) != model(prompts, replace(warm, seed=2))
    with pytest.raises(UserError, match=r"--temperature -1"):
        Writing(temperature=-1)


def test_the_commands_sample_and_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(run), "-p", "the rabbit", "--max-new-tokens", "4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("the rabbit")
    assert not list(run.glob(".sampled*"))
    for words, message in (
        (["-p", "a", "--frames", "5"], "--frames is of videos"),
        ([], "give a --prompt"),
        (["-p", "a", "--top-p", "0"], "--top-p 0"),
    ):
        assert main(["sample", str(run), *words]) == 1
        assert message in capsys.readouterr().err
    assert main(["export", str(run), "-o", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "AutoModelForCausalLM of transformers loads it" in capsys.readouterr().out
    assert all(value.dtype == torch.bfloat16 for value in load_file(tmp_path / "out" / "model.safetensors").values())
    assert main(["export", str(run), "-o", str(tmp_path / "two"), "--others", "copy"]) == 1
    assert "--others is of models of diffusers" in capsys.readouterr().err


@pytest.mark.parametrize("name", WRITTEN)
def test_a_shape_has_a_config_of_transformers(name: str) -> None:
    from transformers import AutoConfig

    for settings in (shape_named(name).settings, tiny_twin(shape_named(name).settings)):
        tree = config_tree(settings)
        again = settings_of(tree, "config.json", settings.num_nextn_predict_layers)
        assert again.rotary.theta == settings.rotary.theta and config_tree(again) == tree
        assert AutoConfig.for_model(**tree).vocab_size == settings.vocab_size


def test_a_shape_of_no_family_is_refused() -> None:
    with pytest.raises(UserError, match=r"no family of transformers .* differs in sandwich"):
        config_tree(shape_named("pangu-ultra-moe").settings)


def test_the_configs_of_the_page_are_of_a_family_and_another_is_told_before_the_first_step() -> None:
    page = Path("docs/language-models.md").read_text(encoding="utf-8")
    found = [parse_yaml(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    trees = [tree for tree in found if tree.keys() != {"parallel"}]
    assert len(trees) == 3
    for tree in trees:
        assert LanguageDomain(make_config(tree, (), origin="page")).use(300).warnings() == []  # type: ignore[arg-type]
    other = make_config(trees[0], ("model.windows=[3, 7]",), origin="page")
    (warning,) = LanguageDomain(other).use(300).warnings()  # type: ignore[arg-type]
    assert "`mmspeed sample` and `mmspeed export` will refuse this run" in warning


BASE = {
    "bos_token_id": 256,
    "eos_token_id": [257, 258],
    "do_sample": True,
    "temperature": 0.6,
    "repetition_penalty": 9.0,
}


def tuned(folder: Path, generation: dict[str, Any] | None, chats: bool = False, **tokenizer: Any) -> Path:
    """The folder of a run of one step from a tiny Llama of one layer, whose folder is `base`, on texts or chats."""
    from transformers import LlamaConfig, LlamaForCausalLM

    base = folder / "base"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=300, bos_token_id=256, eos_token_id=257, **sizes)).save_pretrained(base)
    save(base)
    (base / "generation_config.json").unlink()
    if generation is not None:
        (base / "generation_config.json").write_text(json.dumps(generation))
    for name in ("LICENSE", "README.md", "vocab.txt"):
        (base / name).write_text(name)
    (folder / "a.txt").write_text("words\n\nmore words")
    (folder / "a.json").write_text('{"prompt": "words", "completion": "more"}')
    source = {"path": str(folder / "a.json"), "content": "chat"} if chats else {"path": str(folder / "a.txt")}
    tree = {
        "task": "language",
        "output": str(folder / "runs"),
        "texts": {"sources": [source], "cache": str(folder / "cache"), "validation": 0.0},
        "tokenizer": {"kind": "transformers", "path": str(base), **tokenizer},
        "model": {"pretrained": str(base)},
        "sequence_length": 64,
        "train": {"steps": 1, "batch_size": 1, "warmup_steps": 0},
        "device": {"kind": "cpu"},
    }
    config = make_config(tree, (), origin="test")
    TextPreparation(config).build()
    TrainPipeline(config).run()
    return config.run_dir


@pytest.mark.parametrize(
    ("generation", "tokenizer", "stops", "written"),
    [
        (BASE, {}, [257, 258], BASE),
        (None, {}, 257, None),
        ({"eos_token_id": 258}, {}, [258, 257], {"eos_token_id": [258, 257]}),  # it has learnt to end with 257
        (BASE, {"end_of_document": "<|head|>"}, [257, 258, 259], BASE | {"eos_token_id": [257, 258, 259]}),
    ],
)
def test_an_export_keeps_what_training_did_not_change(
    tmp_path: Path, generation: Any, tokenizer: dict[str, str], stops: Any, written: dict[str, Any] | None
) -> None:
    run = tuned(tmp_path, generation, **tokenizer)
    out, base = tmp_path / "out", tmp_path / "base"
    export_language_run(run, out)
    for name in ("LICENSE", "vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert not (out / "README.md").exists()  # it is of the base
    place = out / "generation_config.json"
    assert (json.loads(place.read_text()) if place.exists() else None) == written
    changed = {"eos_token_id": stops} if written != generation else {}
    assert json.loads((out / "config.json").read_text()) == json.loads((base / "config.json").read_text()) | changed
    model = LanguageModel.from_run(run, device="cpu")
    assert (model.begin, model.stops) == ([256], stops if isinstance(stops, list) else [stops])


def test_another_tokenizer_than_the_bases_brings_its_own_stops(tmp_path: Path) -> None:
    save(tmp_path / "other", "$A")
    path = tmp_path / "other" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|turn|>", "<|stop|>"))
    out = tmp_path / "out"
    export_language_run(tuned(tmp_path, BASE, path=str(path.parent), end_of_document="<|stop|>"), out)
    assert (out / "tokenizer.json").read_bytes() == path.read_bytes() and not (out / "vocab.txt").exists()
    written = json.loads((out / "generation_config.json").read_text())
    assert (
        written == BASE | {"bos_token_id": None, "eos_token_id": 258, "pad_token_id": 258}
        and (out / "LICENSE").exists()
    )


def test_a_chat_is_answered_by_its_template_up_to_the_end_of_the_turn(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats, words = tuned(tmp_path, None, chats=True), ["--max-new-tokens", "9", "--device", "cpu"]
    model = LanguageModel.from_run(chats, device="cpu")
    assert model.stops == [END, TURN]
    ids = [BEGIN, HEAD, *b"user\nwords", TURN, HEAD, *b"assistant\n"]
    (row,) = model.written([ids], Writing(tokens=9))
    answer = str(model.tokenizer.decode(row, skip_special_tokens=True))
    assert model.chat(["words"], Writing(tokens=9)) == [answer]
    assert main(["sample", str(chats), "-p", "words", "--chat", *words]) == 0
    assert capsys.readouterr().out == answer + "\n"
    assert main(["sample", str(run), "-p", "words", "--chat", *words]) == 1
    assert "--chat: the tokenizer of this run has no chat template" in capsys.readouterr().err


def test_a_text_begins_once_and_ends_at_each_stop(tmp_path: Path) -> None:
    """Whatever the base's other settings of generation are."""
    folder = tmp_path / "out"
    export_language_run(tuned(tmp_path, BASE), folder)
    free, long = LanguageModel(folder, "cpu"), Writing(tokens=40)
    prompts = [free.ids(prompt) for prompt in ("words", "<|begin|>a b", "")]
    assert prompts == [[256, *b"words"], [256, *b"a b"], [256]]
    free.stops, free.model.generation_config.eos_token_id = [], None
    rows = free.written(prompts, long)
    for prompt, row in zip(prompts, rows, strict=True):  # the likeliest ids, without the base's penalty
        assert len(row) == 40 and row[0] == int(free.model(torch.tensor([prompt])).logits[0, -1].argmax())
    stops = [rows[0][3], rows[1][5]]
    (folder / "generation_config.json").write_text(json.dumps(BASE | {"eos_token_id": stops}))
    ended = LanguageModel(folder, "cpu").written(prompts, long)
    assert ended == [row[: min(row.index(stop) for stop in stops if stop in row)] for row in rows[:2]] + ended[2:]
    assert not set(stops) & set(ended[2]) and ended[2] == rows[2][: len(ended[2])]
