"""Chat templates in the formats of published models, tokenizers of several kinds, and toy chats."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from architectures import config_of
from heedful.data.chat_template import BUILT_IN
from heedful.data.tokenizer import train_tokenizer
from heedful.pipelines import LanguageModel, from_net
from heedful.zoo import architecture
from option_space import randomized

Chat = list[dict[str, str]]

TEMPLATES = {
    "chatml": (
        "{%- for message in messages %}\n"
        "    {{- '<|im_start|>' + message.role + '\\n' }}\n"
        "    {%- if message.role == 'assistant' %}\n"
        "        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}\n"
        "    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}\n"
        "    {{- '\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
    ),
    "llama3": (
        "{{- bos_token }}\n"
        "{%- for message in messages %}\n"
        "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}\n"
        "    {%- if message['role'] == 'assistant' %}\n"
        "        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}"
        "{%- endgeneration %}\n"
        "    {%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
        "{%- endif %}\n"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}"
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\\n' }}"
        "{% if role == 'model' %}"
        "{% generation %}{{ message['content'] | trim + '<end_of_turn>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}"
        "{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
        "{% endif %}{% endfor %}"
    ),
}
SPECIALS = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "mistral": [],
}
KINDS = ("bytes", "metaspace", "legacy")
LINES = [
    "user assistant model system INST",
    "[INST] What is the capital of France? [/INST] The capital of France is Paris.</s>",
    "Write a list:\n\n1. one\n2. two\nThank you, that is what I wanted!",
    "def main():\n    return 0\n",
]


def backend_of(kind: str, specials: list[str]) -> Backend:
    """A tokenizer of the `tokenizers` library.

    bytes: GPT-2's; metaspace: LLaMA's with a space before the first word; legacy: LLaMA's with a
    space behind each special token; crossing: merges cross any border.
    """
    names = ["<unk>", "<s>", "</s>", *specials]
    trainer: dict[str, Any] = {"special_tokens": names, "show_progress": False}
    backend = Backend(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer["initial_alphabet"] = sorted(pre_tokenizers.ByteLevel.alphabet())
    elif kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    elif kind == "legacy":
        spaces = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        backend.decoder = decoders.Fuse()
    size = {"crossing": 400}.get(kind, 330 if kind == "bytes" else 160)
    words = [piece for line in LINES for piece in line.split("\n")]
    texts = LINES * 3 if kind == "crossing" else words * 3
    backend.train_from_iterator(
        [*texts, *map(chr, range(32, 127)), "\n"], trainers.BpeTrainer(vocab_size=size, **trainer)
    )
    return backend


def write_hf_tokenizer(directory: Path, kind: str, template: str | None, **more: Any) -> Path:
    """A tokenizer in the Hugging Face format, with a template of `TEMPLATES`."""
    directory.mkdir(exist_ok=True)
    specials = SPECIALS.get(template or "", [])
    backend = backend_of(kind, specials)
    backend.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in specials])
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        **more,
    }
    if template is not None:
        config["chat_template"] = TEMPLATES.get(template, template)
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def chat_of(*contents: str, system: str | None = None) -> Chat:
    """Questions and answers in turn."""
    roles = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def chat_model(template: str | None = BUILT_IN["chatml"], max_length: int = 96) -> LanguageModel:
    """A random net with a tokenizer of bytes, whose tokens end inside characters."""
    names = ("<|im_start|>", "<|im_end|>")
    tokenizer = train_tokenizer([], kind="byte", extra_specials=names).extended((), template)
    sizes = {"vocab_size": tokenizer.vocab_size, "max_length": max_length, "d_ff": 16}
    config = config_of("llama", {"d_model": 16, "num_heads": 2, "num_layers": 1, **sizes}, {})
    torch.manual_seed(1)
    return from_net(randomized(architecture("llama").build(config)), config, tokenizer)


# Answers that a tiny net can learn by heart: tastes of three names, asked in two ways.
TASTES = {"ann": "tea", "bob": "milk", "cy": "figs"}


def toy_chats() -> list[Any]:
    """Chats of two turns, single messages, and pairs of prompt and response."""
    chats: list[Any] = []
    for name, taste in TASTES.items():
        for other, second in TASTES.items():
            texts = (f"what does {name} like?", taste, f"and {other}?", second)
            chats.append({"messages": chat_of(*texts)})
        chats.append({"prompt": f"what does {name} like?", "response": taste})
        chats.append((f"tell me about {name}", f"{name} likes {taste}."))
    return chats
