"""A byte tokenizer in a transformers folder with tokens of begin, end, turn and head, and templates of chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from mmspeed.data.cache.tokenizer_file import byte_tokenizer

BEGIN, END, TURN, HEAD = 256, 257, 258, 259
WORDS = {"<|begin|>": BEGIN, "<|end|>": END, "<|turn|>": TURN, "<|head|>": HEAD}
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}\n{{ m['content'] }}<|turn|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = LLAMA.replace(
    "{% for", "{% if messages[0].role != 'system' %}<|head|>system\nbe good<|turn|>{% endif %}{% for", 1
)


def save(
    folder: Path, rule: str = "<|begin|> $A", template: str = LLAMA, trim: bool | None = None, **settings: Any
) -> Path:
    """The folder of a tokenizer whose post-processor has a rule for single texts, or trims (or not) offsets; settings: of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    core = Tokenizer(models.BPE(vocab=json.loads(byte_tokenizer()["tokenizer.json"])["model"]["vocab"], merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(word, special=True, rstrip=word == "<|turn|>") for word in WORDS])
    if trim is None:
        core.post_processor = processors.TemplateProcessing(
            single=rule, pair=f"{rule} $B", special_tokens=[pair for pair in WORDS.items() if pair[0] in rule]
        )
    else:
        core.post_processor = processors.ByteLevel(trim_offsets=trim)
    (folder / "tokenizer.json").write_text(core.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    config |= {"clean_up_tokenization_spaces": False, "chat_template": template, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
