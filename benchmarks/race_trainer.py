"""The program that a user of transformers' Trainer writes for a classifier of texts, from scratch.

python race_trainer.py masked|classify|predict [OPTIONS] FOLDER [OUT]

FOLDER holds train.tsv and valid.tsv (a text, a tab, a label), train.text, and test.text.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import BertWordPieceTokenizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

TOKENIZER, LONGEST, VOCABULARY = Path("tokenizer"), 128, 8_000


def tokenizer_of(folder: Path) -> BertTokenizerFast:
    """WordPiece of the training text, trained unless that was done."""
    if not TOKENIZER.is_dir():
        trained = BertWordPieceTokenizer(lowercase=True)
        text = str(folder / "train.text")
        trained.train(text, vocab_size=VOCABULARY, min_frequency=2, show_progress=False)
        vocabulary = trained.get_vocab()
        BertTokenizerFast(vocab=vocabulary, do_lower_case=True).save_pretrained(TOKENIZER)
    return BertTokenizerFast.from_pretrained(TOKENIZER)


def rows(tokenizer: BertTokenizerFast, path: Path, has_label: bool = True) -> list[dict]:
    """The token ids and labels of a file."""
    pairs = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    encoded = tokenizer([pair[0] for pair in pairs], truncation=True, max_length=LONGEST)
    found = [{"input_ids": ids} for ids in encoded["input_ids"]]
    if has_label:
        for row, pair in zip(found, pairs, strict=True):
            row["label"] = int(pair[1])
    return found


def config_of(tokenizer: BertTokenizerFast, dropout: float) -> BertConfig:
    """The size of heedful's recipe."""
    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=LONGEST,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.1,
        num_labels=2,
    )


def settings(options: argparse.Namespace, out: str, **more: object) -> TrainingArguments:
    """The arguments of both stages."""
    return TrainingArguments(
        output_dir=out,
        learning_rate=options.rate,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=64,
        num_train_epochs=options.epochs,
        max_steps=options.steps,
        weight_decay=0.01,
        warmup_steps=options.warmup,
        label_smoothing_factor=options.smoothing,
        adam_beta2=options.beta2,
        logging_steps=options.log_every,
        seed=42,
        bf16=options.bf16,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        **more,
    )


def masked(options: argparse.Namespace) -> None:
    """Train a masked language model of the training text, and save it in OUT."""
    tokenizer = tokenizer_of(options.folder)
    model = BertForMaskedLM(config_of(tokenizer, options.dropout))
    Trainer(
        model,
        settings(options, "masked-out", save_strategy="no"),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3),
        train_dataset=rows(tokenizer, options.folder / "train.text", has_label=False),
    ).train()
    model.save_pretrained(options.out)


def classify(options: argparse.Namespace) -> None:
    """Train a classifier, and take the checkpoint of the epoch that is the best on valid.tsv."""
    tokenizer = tokenizer_of(options.folder)
    config = config_of(tokenizer, options.dropout)
    if options.init:
        model = BertForSequenceClassification.from_pretrained(options.init, config=config)
    else:
        model = BertForSequenceClassification(config)
    trainer = Trainer(
        model,
        settings(
            options,
            str(options.out),
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
        ),
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=rows(tokenizer, options.folder / "train.tsv"),
        eval_dataset=rows(tokenizer, options.folder / "valid.tsv"),
        compute_metrics=lambda found: {
            "accuracy": float(np.mean(np.argmax(found.predictions, axis=-1) == found.label_ids))
        },
    )
    trainer.train()
    trainer.save_model()


@torch.inference_mode()
def predict(options: argparse.Namespace) -> None:
    """Write the label of each test text into OUT, by the model of --init."""
    tokenizer = tokenizer_of(options.folder)
    model = BertForSequenceClassification.from_pretrained(options.init).eval()
    texts = rows(tokenizer, options.folder / "test.text", has_label=False)
    pad, labels = DataCollatorWithPadding(tokenizer), []
    for start in range(0, len(texts), 64):
        labels += model(**pad(texts[start : start + 64])).logits.argmax(-1).tolist()
    options.out.write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")


def main() -> None:
    """Run a stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    stages = {"masked": masked, "classify": classify, "predict": predict}
    parser.add_argument("stage", choices=stages)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--init")
    # The defaults are those of transformers' guide to text classification.
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--smoothing", type=float, default=0.0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    stages[options.stage](options)
    print(f"{options.stage}: {time.monotonic() - began:.1f} seconds")


if __name__ == "__main__":
    main()
