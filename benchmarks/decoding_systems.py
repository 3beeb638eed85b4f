"""Models, prompts and systems of the benchmark of decoding speed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ctranslate2
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import heedful
import heedful.files
from common import installed
from heedful.backends.ctranslate2.runtime import select_instructions
from heedful.backends.torch.threads import run_with
from heedful.data.tokenizer import train_tokenizer
from heedful.deploy.convert import convert_model
from heedful.deploy.optimize import optimize
from heedful.export.gguf import export_gguf
from heedful.export.hf import export_hf
from heedful.pipelines import GenerationIds, ModelMetadata, open_net
from heedful.zoo import gpt2, marian
from llama_peer import PRECISIONS, Context, LlamaCpp
from training_speed import QUICK, SIZES, Size

START, END = 0, 2
# For each system the package whose version is on the page.
SYSTEMS = {
    "eager": "heedful",
    "optimized": "heedful",
    "transformers": "transformers",
    "ctranslate2": "ctranslate2",
    "llama.cpp": "llama-cpp-python",
}
Rows = list[list[int]]
Decode = Callable[[], Rows]


class Shape(NamedTuple):
    """A model and its workload.

    Args:
        prompt: tokens of a prompt, with the end token of a source.
        new: number of new tokens.
        beams, batches: beam and batch sizes to measure.
    """

    size: Size
    prompt: int = 16
    new: int = 20
    beams: tuple[int, ...] = (1, 4)
    batches: tuple[int, ...] = (1, 64)
    is_translator: bool = True

    @property
    def never(self) -> tuple[int, ...]:
        """Ids that are never generated."""
        return (0, 1, 3) if self.is_translator else ()

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with mixed lengths."""
        return 2 * self.prompt - self.shortest

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt with mixed lengths; the mean is `prompt`."""
        return self.prompt // 4

    def settings(self) -> "list[Setting]":
        """All beams and batches with equal lengths; the largest batch, greedy, with mixed ones."""
        equal = [Setting(beam, batch) for beam in self.beams for batch in self.batches]
        mixed = Setting(1, max(self.batches), mixed=True)
        return sorted([*equal, *([mixed] if mixed.batch > 1 else [])])

    def work(self, beam: int) -> tuple[float, float]:
        """Multiplications per token of the best output, and weights that a step reads."""
        size, layers = self.size, self.size.num_layers
        square, feedforward = size.d_model**2, 2 * size.d_model * size.d_ff
        block = (6 if self.is_translator else 4) * square + feedforward
        step = layers * block + size.d_model * size.vocab_size
        source = layers * ((6 if self.is_translator else 4) * square + feedforward)
        return beam * step + source * self.prompt / self.new, step


class Setting(NamedTuple):
    """A beam size, a batch size, and whether prompts have mixed lengths."""

    beam: int
    batch: int
    mixed: bool = False

    @property
    def search(self) -> str:
        """The name of the search, with a note for mixed lengths."""
        search = "greedy" if self.beam == 1 else f"beam {self.beam}"
        return f"{search}, mixed lengths" if self.mixed else search

    def __str__(self) -> str:
        search, *mixed = self.search.split(", ")
        return ", ".join([search, f"batch {self.batch}", *mixed])


SHAPES = {name: Shape(size) for name, size in SIZES.items()} | {
    "gpt2": Shape(Size(768, 12, 12, 3072, 16, 32, 50_257), 32, 64, (1,), (1, 16), False)
}
SMALL = {
    "quick": Shape(QUICK["quick"], beams=(1,)),
    "quick gpt2": Shape(replace(QUICK["quick"], d_model=32), 8, 6, (1,), (2,), False),
}


class Variant(NamedTuple):
    """A system with settings.

    Attributes:
        on: returns for prompts (`Rows`) a function (`Decode`) that decodes them once; None in
            another process.
        detail: further settings as text.
    """

    precision: str
    threads: int
    workers: int
    on: Any
    backend: str = ""
    detail: str = ""

    def __str__(self) -> str:
        layout = f"{self.precision} {self.workers}×{self.threads}"
        return " ".join(word for word in (self.backend, layout, self.detail) if word)


def write_model(shape: Shape, folder: Path) -> list[str]:
    """Write a random model for heedful, transformers, CTranslate2 by hand and llama.cpp.

    Returns the words of the vocabulary.
    """
    size = shape.size
    words = [f"w{number}" for number in range(size.vocab_size - 4)]
    tokenizer = train_tokenizer([" ".join(words)], kind="word")
    assert tokenizer.vocab_size == size.vocab_size
    torch.manual_seed(1)
    sizes = {"d_model": size.d_model, "num_heads": size.num_heads, "d_ff": size.d_ff}
    config: Any
    if shape.is_translator:
        config = marian.Config(
            src_vocab_size=size.vocab_size,
            tgt_vocab_size=size.vocab_size,
            num_encoder_layers=size.num_layers,
            num_decoder_layers=size.num_layers,
            activation="relu",
            max_length=64,
            **sizes,
        )
        ids = GenerationIds(decoder_start_ids=(START,), eos_ids=(END,), suppressed_ids=shape.never)
        name, net = "marian", marian.build(config)
    else:
        config = gpt2.Config(vocab_size=size.vocab_size, num_layers=size.num_layers, **sizes)
        ids = GenerationIds(eos_ids=(END,))
        name, net = "gpt2", gpt2.build(config)
    model = open_net(net, config, ModelMetadata(name, "b", generation=ids), tokenizer)
    model.save(folder / "heedful")
    export_hf(model, folder / "hf")
    for precision in ("float32", "int8"):
        convert_model(model, folder / "by_hand", precision)
    if has_llama(shape):
        for precision in PRECISIONS:
            path = folder / f"{precision}.gguf"
            export_gguf(model, path, precision=precision, tokenizer=False)
    return words


def has_llama(shape: Shape) -> bool:
    """True if llama.cpp supports the model (decoder-only) and its packages are installed."""
    is_installed = installed("llama-cpp-python") and installed("gguf")
    return is_installed and not shape.is_translator


def tune(
    folder: Path,
    shape: Shape,
    setting: Setting,
    rows: Rows,
    words: list[str],
    tried: dict[str, list[str]],
) -> None:
    """Run `heedful optimize` for a search, on prompts as text."""
    model = heedful.load(folder, device="cpu", backend="eager")
    model.metadata.options.update(beam_size=setting.beam, max_new_tokens=shape.new)
    texts = [" ".join(words[token - 4] for token in row if token != END) for row in rows]
    optimize(model, folder, texts, **tried)


def prompts(shape: Shape, setting: Setting, seed: int) -> Rows:
    """Prompts of random ids; sources end in the end token."""
    rng = torch.Generator().manual_seed(seed)
    end = [END] if shape.is_translator else []
    lengths = [shape.prompt] * setting.batch
    if setting.mixed:
        # From the shortest to the longest in equal steps, in a random order.
        ordered = torch.linspace(shape.shortest, shape.longest, setting.batch).round().int()
        lengths = ordered[torch.randperm(setting.batch, generator=rng)].tolist()
    return [
        [*torch.randint(4, shape.size.vocab_size, (n - len(end),), generator=rng).tolist(), *end]
        for n in lengths
    ]


def separate_systems(folder: Path, shape: Shape, setting: Setting) -> list[tuple[str, ...]]:
    """All systems that support a model, in groups that share a process.

    Heedful on CTranslate2 and CTranslate2 by hand share a loaded model, see `by_hand`.
    """
    optimized = [("optimized",), ("ctranslate2",)]
    if optimized_backend(load_optimized(folder, setting)).name == "ctranslate2":
        optimized = [("optimized", "ctranslate2")]
    return [("eager",), ("transformers",), *optimized, *([("llama.cpp",)] * has_llama(shape))]


def load_optimized(folder: Path, setting: Setting) -> Any:
    """The model with the backend that `heedful optimize` has selected for a setting."""
    use: Any = "latency" if setting.batch == 1 else "throughput"
    return heedful.load(folder / "heedful", use=use)


def optimized_backend(model: Any) -> Any:
    """The backend of a model: the net itself if `heedful optimize` has selected that."""
    return model.backend or model.eager


def systems(
    folder: Path, shape: Shape, setting: Setting, counts: Sequence[int], names: Sequence[str]
) -> dict[str, list[Variant]]:
    """For some systems their variants with different settings.

    Args:
        counts: numbers of threads.
    """
    options = options_of(shape, setting.beam)
    variants: dict[str, list[Variant]] = {}
    if "eager" in names:
        variants["eager"] = [
            Variant(precision, count, 1, partial(heedful_generate, net, options))
            for precision in ("float32", "bfloat16")
            for count in counts
            for net in [
                heedful.load(
                    folder / "heedful",
                    device="cpu",
                    backend="eager",
                    precision=precision,
                    threads=count,
                )
            ]
        ]
    if "transformers" in names:
        variants["transformers"] = [
            Variant(precision, count, 1, partial(transformers_run, net, shape, setting.beam, count))
            for precision in ("float32", "bfloat16")
            for net in [transformers_net(folder, shape, precision)]
            for count in counts
        ]
    backend = None
    if "optimized" in names:
        model = load_optimized(folder, setting)
        backend = optimized_backend(model)
        layout = backend.precision, backend.settings.threads, backend.settings.workers
        run = partial(heedful_generate, model, options)
        variants["optimized"] = [Variant(*layout, run, backend.name)]
    if "ctranslate2" in names:
        variants["ctranslate2"] = by_hand(folder, shape, setting, counts, backend)
    if "llama.cpp" in names:
        variants["llama.cpp"] = llama(folder, shape, setting, counts)
    return variants


def references(folder: Path, shape: Shape, beam: int) -> dict[str, Callable[[Rows], Decode]]:
    """Each system in float32, to compare outputs; eager is the first."""
    model = heedful.load(folder / "heedful", device="cpu", backend="eager", precision="float32")
    net = transformers_net(folder, shape, "float32")
    opened = open_by_hand(folder, shape, "float32", 1, 1)
    decoders = {
        "eager": partial(heedful_generate, model, options_of(shape, beam)),
        "transformers": partial(transformers_run, net, shape, beam, 1),
        "ctranslate2": partial(by_hand_run, folder, shape, beam, opened, 0),
    }
    if has_llama(shape):
        decoders["llama.cpp"] = partial(llama_exact, folder / "f32.gguf", shape)
    return decoders


def options_of(shape: Shape, beam: int) -> dict[str, Any]:
    """The options of the search in heedful, with a fixed number of new tokens."""
    options: dict[str, Any] = {"stop_rule": "beam_full"} if beam > 1 else {}
    return options | {
        "beam_size": beam,
        "min_new_tokens": shape.new,
        "max_new_tokens": shape.new,
    }


def heedful_generate(model: Any, options: dict[str, Any], rows: Rows) -> Decode:
    """Decoding by heedful's `generate`."""
    return lambda: list(model.generate(rows, **options))


def transformers_net(folder: Path, shape: Shape, precision: str) -> Any:
    """The exported model, loaded by transformers."""
    kind: Any = AutoModelForSeq2SeqLM if shape.is_translator else AutoModelForCausalLM
    net = kind.from_pretrained(folder / "hf", dtype=getattr(torch, precision)).eval()
    net.generation_config.max_length = None  # max_new_tokens is used instead
    return net


def transformers_run(net: Any, shape: Shape, beam: int, threads: int, rows: Rows) -> Decode:
    """Decoding by transformers' `generate`; texts are padded on the left, sources on the right."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), net.config.pad_token_id or 0)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        columns = slice(0, len(row)) if shape.is_translator else slice(longest - len(row), None)
        ids[index, columns], mask[index, columns] = torch.tensor(row), 1

    @torch.inference_mode()
    def run() -> Rows:
        with run_with(threads):
            outputs = net.generate(
                input_ids=ids,
                attention_mask=mask,
                num_beams=beam,
                do_sample=False,
                max_new_tokens=shape.new,
                min_new_tokens=shape.new,
                length_penalty=1.0,
                bad_words_ids=[[token] for token in shape.never] or None,
                forced_eos_token_id=None,
                pad_token_id=0,
            )
        return [row[-shape.new :] for row in outputs.tolist()]

    return run


def by_hand(
    folder: Path, shape: Shape, setting: Setting, counts: Sequence[int], backend: Any
) -> list[Variant]:
    """CTranslate2 with one worker or one per core, in all 8-bit precisions and several batch sizes.

    If heedful's backend in this process (None: none) has the same settings, its loaded model is
    used: the speed of two copies differs by some percent, depending on their addresses in memory.
    """
    loaded = {}
    if backend is not None and backend.name == "ctranslate2":
        layout = backend.precision, backend.settings.workers, backend.settings.threads
        loaded[layout] = backend._model
    most = max(counts)
    layouts = {(1, 1), (1, most)} | ({(most, 1)} if setting.batch > 1 else set())
    variants = []
    for precision in eight_bit_precisions():
        for workers, threads in sorted(layouts):
            opened = loaded.get((precision, workers, threads)) or open_by_hand(
                folder, shape, precision, workers, threads
            )
            share = -(-setting.batch // workers)
            for size in sorted({-(-share // parts) for parts in (1, 2, 4)}):
                run = partial(by_hand_run, folder, shape, setting.beam, opened, size)
                variants.append(Variant(precision, threads, workers, run, detail=f"by {size}"))
    return variants


def eight_bit_precisions() -> list[str]:
    """int8, and int8_bfloat16 if CTranslate2 supports it on this processor."""
    known = ctranslate2.get_supported_compute_types("cpu")
    return [name for name in ("int8", "int8_bfloat16") if name in known]


def open_by_hand(folder: Path, shape: Shape, precision: str, workers: int, threads: int) -> Any:
    """A converted model, loaded by CTranslate2, with the instructions that heedful selects."""
    select_instructions()
    kind = ctranslate2.Translator if shape.is_translator else ctranslate2.Generator
    place = by_hand_folder(folder, precision.split("_")[0])
    layout = {"inter_threads": workers, "intra_threads": threads}
    return kind(str(place), compute_type=precision, **layout)


def by_hand_folder(folder: Path, precision: str) -> Path:
    """The folder of `write_model` with the model in a precision."""
    return folder / "by_hand" / "backends" / "ctranslate2" / precision


def by_hand_run(
    folder: Path, shape: Shape, beam: int, opened: Any, batch_size: int, rows: Rows
) -> Decode:
    """Decoding by one call of CTranslate2, in batches of `batch_size`; 0: one batch."""
    place = by_hand_folder(folder, "int8")
    name = "shared_vocabulary" if shape.is_translator else "vocabulary"
    tokens: Sequence[str] = heedful.files.read_json(place / f"{name}.json")
    number = {token: place for place, token in enumerate(tokens)}
    words = [[tokens[i] for i in row] for row in rows]
    options: dict[str, Any] = {
        "max_batch_size": batch_size,
        "beam_size": beam,
        "return_end_token": True,
    }

    def translate() -> Rows:
        results = opened.translate_batch(
            words,
            min_decoding_length=shape.new,
            max_decoding_length=shape.new,
            suppress_sequences=[[tokens[i]] for i in shape.never],
            **options,
        )
        return [[number[token] for token in result.hypotheses[0]] for result in results]

    def continue_prompts() -> Rows:
        results = opened.generate_batch(
            words,
            min_length=shape.new,
            max_length=shape.new,
            include_prompt_in_result=False,
            **options,
        )
        return [result.sequences_ids[0] for result in results]

    return translate if shape.is_translator else continue_prompts


def llama(folder: Path, shape: Shape, setting: Setting, counts: Sequence[int]) -> list[Variant]:
    """llama.cpp in Q8_0, by threads, kind of attention, and buffers of keys and values."""
    model = LlamaCpp(folder / "q8_0.gguf")
    variants = []
    for threads in counts:
        for flash in (False, True):
            for unified in (False, True) if setting.batch > 1 else (True,):
                run = partial(
                    llama_run, model, shape, threads=threads, flash=flash, unified=unified
                )
                detail = " ".join(
                    name for name, is_on in {"flash": flash, "unified": unified}.items() if is_on
                )
                variants.append(Variant("Q8_0", threads, 1, run, detail=detail))
    return variants


def llama_run(model: LlamaCpp, shape: Shape, rows: Rows, **options: Any) -> Decode:
    """Greedy decoding by llama.cpp of all prompts as parallel sequences."""
    capacity = max(map(len, rows)) + shape.new
    context = Context(
        model, sequences=len(rows), capacity=capacity, vocab_size=shape.size.vocab_size, **options
    )
    return lambda: context.generate(rows, shape.new, END)


def llama_exact(path: Path, shape: Shape, rows: Rows) -> Decode:
    """Greedy decoding by llama.cpp with weights, keys and values in float32."""
    options = {"threads": 1, "flash": False, "unified": False, "exact": True}
    return llama_run(LlamaCpp(path), shape, rows, **options)
