"""What a teacher makes of the training sources, stored for a run (Kim and Rush 2016, sec. 3.2)."""

from pathlib import Path

from heedful.data.pair_store import PairStore, open_pairs
from heedful.data.store import write_ids
from heedful.errors import UserError
from heedful.files import read_json
from heedful.inference import Translator
from heedful.jobs.job import DONE, Say, write_json_after

_REPORTS = 10  # how often progress is said


def taught_pairs(
    pairs: PairStore,
    teacher: Translator,
    directory: Path,
    *,
    beam_size: int,
    max_length: int,
    say: Say,
) -> PairStore:
    """The sources with the teacher's translations, which are made once and kept in `directory`.

    A source is left out, and counted, whose translation does not end within the teacher's limit
    for it, or is longer than `max_length`: it would teach where to stop wrongly.

    Raises:
        UserError: no translation is left.
    """
    if not (directory / DONE).is_file():
        _translate(pairs, teacher, directory, beam_size=beam_size, max_length=max_length, say=say)
    content = read_json(directory / DONE)
    if content["beam_size"] != beam_size:
        raise UserError(f"{directory} was made with another beam size; start a new run")
    return open_pairs(directory)


def _translate(
    pairs: PairStore,
    teacher: Translator,
    directory: Path,
    *,
    beam_size: int,
    max_length: int,
    say: Say,
) -> None:
    total = len(pairs)
    say(f"teacher    translates {total:,} sources, beam size {beam_size}")
    told, done = 0, 0

    def progress(count: int) -> None:
        nonlocal told, done
        done += count
        if done * _REPORTS // total > told:
            told = done * _REPORTS // total
            say(f"           {done:,} of {total:,} translated")

    sources = [pairs.src[index].tolist() for index in range(total)]
    found = teacher.generations(
        sources, beam_size=beam_size, stop_rule="optimal", progress=progress
    )
    kept = [
        (source, best.ids)
        for source, (best, *_) in zip(sources, found, strict=True)
        if best.finished and len(best.ids) <= max_length
    ]
    if not kept:
        raise UserError(
            "distillation.teacher ends none of its translations within its length limit, so there "
            "is nothing to learn from; train it longer, or use level word"
        )
    if len(kept) < total:
        say(f"           {total - len(kept):,} left out: too long, or without an end")
    src, tgt = (list(side) for side in zip(*kept, strict=True))
    write_ids(directory / "src", src, teacher.src_tokenizer.vocab_size)
    write_ids(directory / "tgt", tgt, teacher.tgt_tokenizer.vocab_size)
    write_json_after(directory / DONE, {"beam_size": beam_size, "kept": len(kept), "read": total})
