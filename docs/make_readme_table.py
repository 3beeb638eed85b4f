"""Writes the table of results in README.md and README.zh.md from docs/results/*.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "en", "README.zh.md": "zh"}
START = "<!-- results: written by docs/make_readme_table.py from docs/results/*.json -->\n"
END = "<!-- end of results -->\n"
HEAD = {
    "en": "| measured | heedful | others, measured beside it | page |\n|---|---:|---|---|\n",
    "zh": "| 测量 | heedful | 同时测量的其他程序 | 页面 |\n|---|---:|---|---|\n",
}
HOW = {
    "en": "Measured on {}, by `benchmarks/`; decoding and encoding with every program in its "
    "fastest settings. What did not work is in [docs/log.md](docs/log.md).",
    "zh": "由 `benchmarks/` 在 {} 上测得；解码和编码时每个程序都用其最快的设置。"
    "没有效果的尝试见 [docs/log.md](docs/log.md)。",
}
# What the rows say, in the order of replacement.
CHINESE = {
    "BLEU after 30 minutes on two cores without bf16, Multi30k en-de, peers in the same size": (
        "双核（无 bf16）训练 30 分钟后的 BLEU，Multi30k 英德，各工具的模型同样大小"
    ),
    "BLEU after 30 and 120 minutes on one core, Multi30k en-de, peers in the same size; eole after "
    "30 in its own": (
        "单核训练 30 分钟和 120 分钟后的 BLEU，Multi30k 英德，各工具的模型同样大小；"
        "eole 的 30 分钟为其文档中的大小"
    ),
    "BLEU after 30 and 120 minutes on one core, LibreOffice en-de, peers in the same size": (
        "单核训练 30 分钟和 120 分钟后的 BLEU，LibreOffice 英德，各工具的模型同样大小"
    ),
    "nats a character after 5 minutes on one core, tiny Shakespeare, peers in the same size": (
        "单核训练 5 分钟后每个字符的损失（nat），tiny Shakespeare，各工具的模型同样大小"
    ),
    "software and its help, en-de: lines that keep their numbers, placeholders and tags": (
        "软件及其帮助，英德：数字、占位符和标签都保留的行"
    ),
    "training, translator of the size base, bf16, tokens/s": (
        "训练，base 大小的翻译模型，bf16，词元/秒"
    ),
    "decoding, GPT-2's size, greedy, batch 1, tokens/s": (
        "解码，GPT-2 的大小，贪心，批大小 1，词元/秒"
    ),
    "encoding, BERT's base shape, tokens/s": "编码，BERT base 的形状，词元/秒",
    "the recipe `translation` in equal steps": "同样步数的配方 `translation`",
    "human translations": "人工译文",
    " of ": "/",
}
SHOWN_DECODING = (("gpt2", 1, "decoding, GPT-2's size, greedy, batch 1"),)
PEERS = {"joeynmt": "JoeyNMT", "eole": "eole", "nanogpt": "nanoGPT", "litgpt": "litgpt"}
# A race, its metric with decimals, whether less is better, and its text.
SHOWN_RACES = (
    (
        "multi30k-30min-2threads",
        "bleu",
        1,
        False,
        "BLEU after 30 minutes on two cores without bf16, Multi30k en-de, peers in the same size",
    ),
    (
        "multi30k-120min-1threads",
        "bleu",
        1,
        False,
        "BLEU after 30 and 120 minutes on one core, Multi30k en-de, peers in the same size; eole "
        "after 30 in its own",
    ),
    (
        "libreoffice-120min-1threads",
        "bleu",
        1,
        False,
        "BLEU after 30 and 120 minutes on one core, LibreOffice en-de, peers in the same size",
    ),
    (
        "shakespeare-5min-1threads",
        "loss",
        3,
        True,
        "nats a character after 5 minutes on one core, tiny Shakespeare, peers in the same size",
    ),
)
LABELS = {"ctranslate2": "CTranslate2", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}


def render(language: str = "en") -> str:
    """The current lines between the markers of the README in a language."""
    rows = [row for rows in (_race, _localization, _speed) for row in rows()]
    machines = {_machine(_read(page)) for _, _, _, page in rows}
    links = [(*cells, f"[{page}](docs/results/{page}.md)") for *cells, page in rows]
    lines = "".join(f"| {' | '.join(cells)} |\n" for cells in links)
    if language == "zh":
        for english, chinese in CHINESE.items():
            assert english in lines, english
            lines = lines.replace(english, chinese)
    table = HEAD[language] + lines
    where = "; ".join(sorted(machines))
    if language == "zh":
        where = where.replace(" cores", " 核").replace(", ", "，").replace("; ", "；")
    return f"{table}\n{HOW[language].format(where)}\n"


def _race() -> Iterator[tuple[str, str, str, str]]:
    """Scores of the models that the tools select; of a peer's configurations the best one.

    Of a race of two hours also those of the last checkpoints of the first half hour, or of a peer
    that was also raced for half an hour in its own size and is better then, of that race.
    """
    races = _read("race")["races"]
    for race, metric, digits, is_loss, text in SHOWN_RACES:
        shown: dict[str, str] = {}
        records = [one for one in races[race] if one.get("scores")]
        half = {
            one["system"].partition("-")[0]: one["scores"][one["model"]][metric]
            for one in races.get(race.replace("120min", "30min"), ())
            if "120min" in race and one.get("scores")
        }
        final = {one["system"]: one["scores"][one["model"]][metric] for one in records}
        for record in sorted(records, key=lambda one: final[one["system"]], reverse=not is_loss):
            name, _, _ = record["system"].partition("-")
            at = record["snapshots"]
            early = [one for one in record["scores"] if at[one] <= 15 * record["minutes"]]
            models = [record["model"]]
            if record["minutes"] == 120:
                models.insert(0, max(early, key=at.__getitem__, default=""))
            values = [record["scores"][one][metric] if one else None for one in models]
            if name in half:
                values[0] = max(half[name], values[0] or 0.0)
            texts = ["–" if value is None else f"{value:.{digits}f}" for value in values]
            shown.setdefault(name, ", ".join(texts))
        ours = shown.pop("heedful")
        others = [f"{PEERS[name]} {scores}" for name, scores in shown.items()]
        yield text, ours, ("; " if "," in ours else ", ").join(others), "race"


def _localization() -> Iterator[tuple[str, str, str, str]]:
    tests = _read("localization")["languages"]["de"]["tests"].values()

    def text(system: str) -> str:
        kept, lines = zip(*(test[system]["kept"]["all"] for test in tests), strict=True)
        return f"{sum(kept)} of {sum(lines)}"

    name = "software and its help, en-de: lines that keep their numbers, placeholders and tags"
    others = f"the recipe `translation` in equal steps {text('translation')}"
    others += f", human translations {text('human translation')}"
    yield name, text("localization"), others, "localization"


def _speed() -> Iterator[tuple[str, str, str, str]]:
    rates = _read("training_speed")["sizes"]["base"]["tokens_per_second"]
    name = "training, translator of the size base, bf16, tokens/s"
    others = {"torch.nn.Transformer": "torch", "transformers Marian": "transformers"}
    texts = [f"{label} {rates[f'{system} bf16']:,.0f}" for label, system in others.items()]
    yield name, f"{rates['heedful bf16']:,.0f}", ", ".join(texts), "training_speed"
    for size, batch, name in SHOWN_DECODING:
        records = [
            record
            for record in _read("decoding")["records"]
            if (record["size"], record["batch"]) == (size, batch)
            and record["beam"] == 1
            and not record["mixed"]
        ]
        systems = {record["system"]: record["tokens/s"] for record in records}
        ours = next(rate for system, rate in systems.items() if system.startswith("optimi"))
        yield f"{name}, tokens/s", f"{ours:,.0f}", _peers(systems), "decoding"
    records = _read("encoding")["records"]
    systems = {record["system"]: record["tokens/s"] for record in records}
    ours = next(rate for system, rate in systems.items() if system.startswith("heedful optimi"))
    yield "encoding, BERT's base shape, tokens/s", f"{ours:,.0f}", _peers(systems), "encoding"


def _peers(rates: dict[str, float]) -> str:
    """Each other program with its fastest variant."""
    fastest: dict[str, float] = {}
    for system, rate in rates.items():
        name = system.partition(",")[0]
        if not name.startswith(("heedful", "eager", "optimi")):
            fastest[name] = max(rate, fastest.get(name, 0.0))
    return ", ".join(f"{LABELS.get(name, name)} {rate:,.0f}" for name, rate in fastest.items())


def _machine(content: dict[str, Any]) -> str:
    machine = content["machine"]
    return f"{machine['processor']}, {machine['logical cores']} cores"


def _read(page: str) -> dict[str, Any]:
    path = ROOT / "docs" / "results" / f"{page}.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def main() -> None:
    """Replace the lines between the markers of both READMEs."""
    for name, language in PAGES.items():
        path = ROOT / name
        before, _, rest = path.read_text(encoding="utf-8").partition(START)
        _, _, after = rest.partition(END)
        path.write_text(f"{before}{START}{render(language)}{END}{after}", encoding="utf-8")
        print(f"wrote the table of {name}")


if __name__ == "__main__":
    main()
