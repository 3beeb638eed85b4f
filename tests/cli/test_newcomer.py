"""A newcomer's path: two files of pairs become a translator, which then runs elsewhere."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

NUMBERS = "one two three four five six seven eight nine ten".split()  # noqa: SIM905
SMALL = "{d_model: 32, num_heads: 4, d_ff: 64, num_encoder_layers: 1, num_decoder_layers: 1}"


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """1,500 pairs: words of numbers, and their digits."""
    folder = tmp_path_factory.mktemp("newcomer")
    draw = random.Random(0)
    pairs = [[draw.randrange(10) for _ in range(draw.randint(2, 6))] for _ in range(1_500)]
    english = [" ".join(NUMBERS[digit] for digit in pair) for pair in pairs]
    digits = [" ".join(str(digit + 1) for digit in pair) for pair in pairs]
    for name, lines in {"a.en": english, "a.num": digits}.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    for name, lines in {"test.en": english[:20], "test.num": digits[:20]}.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_from_two_files_to_a_translator_elsewhere(commands, here: Path) -> None:
    def run(*words: object, code: int = 0) -> str:
        done = commands.run(*words, cwd=here)
        assert done.code == code, done.err
        assert "Traceback" not in done.err
        return done.out + done.err

    sets: list[str] = []
    for key in (
        "data.train.src=a.en", "data.train.tgt=a.num", f"model={SMALL}", "training.device=cpu",
        "training.precision=fp32", "training.schedule.name=constant",
        "training.schedule.warmup_steps=20", "training.schedule.learning_rate=0.01",
        "training.evaluate_every=40", "training.max_minutes=0.02", "evaluation.final_beam_size=1",
    ):  # fmt: skip
        sets += ["--set", key]
    said = run("train", "translation", "--out", "mine", *sets)
    assert "150 of data.train" in said, "a tenth is held out of few pairs"
    assert "stopped at the time limit" in said
    longer = ["--set", "training.max_minutes=null", "--set", "training.max_steps=160"]
    said = run("train", "mine", "--resume", *longer)
    assert "all steps done" in said
    for line in said.splitlines():
        assert "step 160.00" not in line
    translated = run("translate", "mine", "-i", "test.en")
    files = ("--src", "test.en", "--ref", "test.num")
    found = json.loads(run("evaluate", "mine", *files, "--json"))
    right = sum(
        ours == line
        for ours, line in zip(
            translated.splitlines(), (here / "test.num").read_text().splitlines(), strict=True
        )
    )
    assert found["scores"]["exact_match"]["score"] == right / 20
    run("export", "mine", "elsewhere", "--to", "hf")
    assert theirs(here / "elsewhere", here / "test.en") == translated.splitlines()


def theirs(folder: Path, sources: Path) -> list[str]:
    """The text of transformers alone, with the options that the directory says."""
    transformers = pytest.importorskip("transformers")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    batch = tokenizer(sources.read_text().splitlines(), return_tensors="pt", padding=True)
    found = model.generate(**batch)
    return tokenizer.batch_decode(found, skip_special_tokens=True)
