"""Wrong uses of the command and the library, drawn by Hypothesis over a folder of `make_world`.

What a use may damage it copies into the folder `workdir` first.
"""

import json
import os
import re
import resource
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

from hypothesis import strategies as st

from commands import GONE
from hostile_damage import VALUES, Draw, damage, damage_json, damage_yaml
from hostile_world import EXPORTS, MODELS, RECIPES, WORDS, copy_of


@dataclass
class Use:
    """A command line, or with `call` an expression of the library; `ending`: a signal to send."""

    words: list[str]
    stdin: bytes = "".join(f"{line}\n" for line in WORDS).encode()
    stdout: str | None = None
    call: str | None = None
    closed: tuple[int, ...] = ()
    columns: int = 80
    ending: tuple[signal.Signals, float] | None = None  # a signal, and after how many seconds

    def first(self) -> Callable[[], None]:
        """For `Commands.run`, which starts the process."""
        return partial(_start, self.call, self.closed, self.columns, self.ending)


OF_KIND = {  # a placeholder of the lines below, and what may stand there
    "tr": ("two", "own", "t5", "run", "fast"),
    "lm": ("lm", "llama"),
    "any": MODELS,
    "hf": EXPORTS,
    "run": ("run", "fast"),
    "recipe": RECIPES,
}
LINES = [  # commands that work; {w} is the folder of models and files
    "translate {tr} -i {w}/lines -o out",
    "translate {tr}",
    "translate {w}/fast --backend ctranslate2 --precision int8 --threads 1",
    "translate {w}/own --ensemble {w}/own -i {w}/lines -o out --weight 1 --weight 0.5",
    "generate {lm} hello",
    "generate {lm} -i {w}/lines -o out",
    "generate {tr} -i {w}/lines --json -o out",
    "fill {w}/mlm 'the <mask> sat' -o out",
    "fill {w}/mlm 'the <mask> sat' --json",
    "classify {w}/classes -i {w}/lines -o out",
    "classify {w}/classes --scores",
    "embed {any} -i {w}/lines -o out.npy",
    "embed {any} -i {w}/lines -o out.jsonl",
    "evaluate {tr} --src {w}/lines --ref {w}/lines -o out",
    "evaluate {lm} -i {w}/lines --json",
    "evaluate {w}/classes -i {w}/labels.tsv -o out",
    "score {tr} --src {w}/lines --tgt {w}/lines -o out",
    "score {lm} -i {w}/lines",
    "average {run} out",
    "verify {any} --no-overfit",
    "info {any}",
    "export hf {any} out",
    "export ctranslate2 {any} out",
    "optimize model --src {w}/lines --ref {w}/lines --for latency --backend ctranslate2",
    "optimize model --shortlist --tolerance 100 --backend eager",
    "import hf {hf} out",
    "recipes ls",
    "prepare {recipe} --quiet",
    "train {recipe} --dry-run",
    "report {run} -o out",
    "compare {w}/run {w}/fast -o out",
    "list models",
    "list metrics --json",
    "tokenizer train {w}/lines -o out",
    "tokenizer encode {any} -i {w}/lines -o out",
    "tokenizer decode {any} '5 6 7' --specials",
    "recipes show dates",
    "recipes cp dates out",
    "train {recipe} --out out --quiet --steps 1",
    "distill {tr} {w}/pairs.json --out out --quiet --set data.max_length=20",
]
VERBS = sorted({line.split()[0] for line in LINES})
MEMORY = 6 << 30  # address space of a process, on top of what is imported
OUTPUT_FLAGS = ("-o", "--output", "--out")
NUMBERS = [
    "-1",
    "0",
    "1",
    "2",
    "-0",
    "1e23",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "0.5",
    "1e-400",
    "99999999999999999999",
    "4294967296",
    "-7",
    "1_0",
    "½",
    "٣",
    "0x10",
    "1e5",
    "3.0",
    "1,5",
    "+2",
    "2147483648",
]
TEXTS = (
    *("", " ", "null", "~", "[]", "{}", "[1,2]", "true", "no", "=", "a=b", "-", "--", "x\ny"),
    *("\x1b[31mred", "ünï", "🦜", "'", '"', "%s%n", "{0}", "\udcff\udcfe", "\u202e", "<mask>"),
    *("cpu", "cuda", "cuda:99", "meta", "mps", "cpu:-1", "hf", "lookup", "optimal", "bleuu"),
    *("bleu,,chrf", "lastt", "greedy", "a" * 300, "9" * 5000, "zh", "src", "text", "[" * 3000),
    *("a\tb", "</s>", "mean"),
)
PATHS = (
    *("", ".", "..", "/", "missing", "no/such/folder/x", "a" * 300, "$HOME", "/dev/null", "folder"),
    *("/dev/full", "/dev/zero", "/proc/self/mem", "file/inside", "loop", "dangling", "-", "\udcff"),
    *("x\ny", "here\x1b[0m", "*", "file"),
)
LISTS = ("[1, 2]", "[-1, 0.9]", "[0.9]", "[nan, nan]", "[[0.9, 0.9]]", "{a: 1}", "[1e400, 0]")
some = st.sampled_from
words_of_users = st.one_of(some(NUMBERS), some(TEXTS), some(PATHS))


def prepare(workdir: Path) -> None:
    """Create the paths of `PATHS` in the folder that a command runs in."""
    workdir.mkdir()
    (workdir / "file").write_text("x\n")
    (workdir / "folder").mkdir()
    (workdir / "folder" / "precious").write_text("keep\n")
    (workdir / "loop").symlink_to("loop")
    (workdir / "dangling").symlink_to("nowhere")


# --- uses: each takes the folder of models, and the one that the command runs in ---------------


def right_use(draw: Draw, world: Path, workdir: Path, lines: list[str] = LINES) -> Use:
    """A command that works, with few new tokens."""
    line = draw(some(lines))
    for kind, names in OF_KIND.items():
        line = line.replace(f"{{{kind}}}", f"{world}/{draw(some(names))}")
    words = shlex.split(line.replace("{w}", str(world)))
    if "model" in words:  # what is optimized is written to
        copy_of(world / draw(some(("fast", "run", "lm"))), workdir / "model")
    if words[0] in ("translate", "generate"):
        words += ["--max-new-tokens", "4"]
    return Use(words)


def values(draw: Draw, world: Path, workdir: Path) -> Use:
    """Values of options and arguments that are out of range."""
    use = right_use(draw, world, workdir)
    options = [item for item in _parameters(use.words) if item.param_type_name == "option"]
    for _ in range(draw(some((1, 1, 1, 2, 3)))):
        if options and draw(some((True, True, False))):
            option = draw(some(options))
            flag = draw(some(option.opts))
            if flag != "--overfit":  # minutes
                value = some(PATHS) if flag in OUTPUT_FLAGS else words_of_users
                use.words += [flag] if option.is_flag else [flag, draw(value)]
            continue
        places = [n for n, word in enumerate(use.words) if n and not word.startswith("-")]
        if places:
            place = draw(some(places))
            is_output = use.words[place].startswith("out") or use.words[place - 1] in OUTPUT_FLAGS
            use.words[place] = draw(some(PATHS) if is_output else words_of_users)
    return use


def words(draw: Draw, world: Path, workdir: Path) -> Use:
    """Command lines with missing, extra, repeated, truncated or reordered words."""
    use = right_use(draw, world, workdir)
    for _ in range(draw(some((1, 1, 2)))):
        if not use.words:
            break
        place = draw(st.integers(0, len(use.words) - 1))
        word = use.words[place]
        more = draw(some((*TEXTS, "--nonsense", "-z", "--help")))
        changed = [[], [word, word], [more, word], [word[:-1] or "x"]]
        use.words[place : place + 1] = draw(some(changed))
        if draw(some((False, False, True))):
            use.words = draw(st.permutations(use.words))
    return use


def other_paths(draw: Draw, world: Path, workdir: Path) -> Use:
    """Models of another kind, other files, or neither, as a path."""
    use = right_use(draw, world, workdir)
    names = sorted(path.name for path in world.iterdir())
    paths = [n for n, word in enumerate(use.words) if word.startswith(f"{world}/")]
    for place in paths:
        if draw(some((True, True, False))):
            use.words[place] = f"{world}/{draw(some((*names, 'missing')))}"
    if not paths:
        file = draw(some([name for name in names if (world / name).is_file()]))
        use.stdin = (world / file).read_bytes()
    return use


def damaged_models(draw: Draw, world: Path, workdir: Path) -> Use:
    """A model's folder in which files are damaged, absent, or another model's."""
    uses = [line for line in LINES if re.search(r"\{(tr|lm|any|hf|run)\}|fast|mlm|classes", line)]
    use = right_use(draw, world, workdir, [line for line in uses if " model " not in line])
    is_model = {f"{world}/{name}" for name in (*MODELS, *EXPORTS)}
    source = next(word for word in use.words if word in is_model)
    model = copy_of(Path(source), workdir / "model")
    use.words = ["model" if word == source else word for word in use.words]
    others = [world / name for name in (*MODELS, *EXPORTS) if f"{world}/{name}" != source]
    damage(draw, model, others)
    return use


def damaged_runs(draw: Draw, world: Path, workdir: Path) -> Use:
    """Runs that are resumed, or averaged, from a folder with damaged files."""
    out = copy_of(world / "run", workdir / "out")
    damage(draw, out, [world / "fast"])
    lines = ["train out --resume --quiet", "average out out2", "translate out"]
    return Use(draw(some(lines)).split(), b"1 2\n")


def settings_of_recipes(draw: Draw, world: Path, workdir: Path) -> Use:
    """Values of a recipe's keys, given on the command line."""
    from heedful.config import Recipe
    from heedful.nested_keys import keys_of

    lines = [line for line in LINES if line.startswith(("train", "distill"))]
    use = right_use(draw, world, workdir, lines)
    names = (
        "d_model num_heads num_layers num_encoder_layers d_ff dropout activation max_length size"
    )
    more = "architecture norm_placement vocab_size src_vocab_size head num_labels nonsense"
    keys = [key.name for key in keys_of(Recipe) if key.name != "plugins"]
    keys += [f"model.{name}" for name in f"{names} {more}".split()]
    texts = st.one_of(words_of_users, some(LISTS), VALUES.map(json.dumps))
    for _ in range(draw(some((1, 1, 2)))):
        use.words += ["--set", f"{draw(some(keys))}={draw(texts)}"]
    return use


def recipe_files(draw: Draw, world: Path, workdir: Path) -> Use:
    """Recipe files with something wrong in them."""
    from heedful.recipe_files import RECIPES as SHIPPED

    source = draw(some([*(world / name for name in RECIPES), *sorted(SHIPPED.glob("*.yaml"))]))
    damage_content = damage_json if source.suffix == ".json" else damage_yaml
    (workdir / "recipe.json").write_bytes(damage_content(draw, source.read_bytes()))
    limits = "--set training.max_steps=1 --set data.generated.num_train=20"
    lines = [
        f"train recipe.json --out out --quiet {limits}",
        f"distill {world}/own recipe.json --out out --quiet {limits}",
        "recipes show recipe.json",
    ]
    return Use(draw(some(lines)).split())


def training_data(draw: Draw, world: Path, workdir: Path) -> Use:
    """Training on files with other content."""
    name = draw(some(("lm", "mlm", "noise", "pairs", "classes")))
    use = Use(["train", f"{world}/{name}.json", "--out", "out", "--quiet"])
    files = [*sorted(path.name for path in world.iterdir() if path.is_file()), "folder"]
    for key in {"pairs": ("src", "tgt"), "classes": ("file",)}.get(name, ("text",)):
        split, file = draw(some(("train", "train", "valid"))), f"{world}/{draw(some(files))}"
        use.words += ["--set", f"data.{split}.{key}={file}"]
    others = (*files, *MODELS, *EXPORTS)
    key = draw(some((None, None, "tokenizer.path", "init_from")))
    if key:
        use.words += ["--set", f"{key}={world}/{draw(some(others))}"]
    return use


def streams(draw: Draw, world: Path, workdir: Path) -> Use:
    """Closed, full and broken streams, invalid texts, and narrow terminals."""
    use = right_use(draw, world, workdir)
    use.closed = draw(some(((), (), (0,), (1,), (2,), (0, 1, 2))))
    use.stdout = draw(some((None, "/dev/full", GONE)))
    use.columns = draw(some((1, 20, 59, 80)))
    use.stdin = draw(some((b"", b"\xff\xfe\n", "ünï 🦜\n".encode(), b"x" * 100_000, b"\0\n")))
    return use


def endings(draw: Draw, world: Path, workdir: Path) -> Use:
    """A signal at any moment."""
    use = right_use(draw, world, workdir)
    number = draw(some((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
    use.ending = (number, draw(st.floats(0, 0.6)))
    return use


def calls(draw: Draw, world: Path, workdir: Path) -> Use:
    """Calls of the library with values out of range, of the right types."""
    whole = some((-1, 0, 1, 3, 10**9, 2**63, 10**23, -(2**63)))
    real = st.one_of(some((-1.0, 0.0, 0.5)), st.floats(), some((1e308, -1e308, 5e-324)))
    text = st.one_of(some(TEXTS), st.text(max_size=9), some(("\ud800", "a\0b", "x" * 5000)))
    form = draw(some(CALLS))
    for kind, names in OF_KIND.items():
        form = form.replace(f"{{{kind}}}", draw(some(names)))
    options: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(WHOLE_OPTIONS, whole),
        **dict.fromkeys(REAL_OPTIONS, real),
        **dict.fromkeys(("normalization", "stop_rule", "too_long", "draft", "nonsense"), text),
        **dict.fromkeys(
            ("banned", "stop", "require"), some(([""], ["\ud800"], [[]], [[10**9]], ["a"]))
        ),
        "prefixes": some((["\ud800"], ["a" * 5000], [""], ["a", "a", "a"])),
        "forced": some(({0: -1}, {0: 10**9}, {-1: 3})),
    }
    selected = draw(st.lists(some(sorted(options)), min_size=1, max_size=2))
    options_used = {"max_new_tokens": 4} | {name: draw(options[name]) for name in selected}
    pools = {"T": text, "N": whole, "F": real}
    form = re.sub(r"\b([TNF])\b(?!')", lambda match: repr(draw(pools[match[1]])), form)
    return Use([], call=form.replace("{o}", f"**{options_used!r}").replace("W + '", f"'{world}"))


CALLS = [
    "load(W + '/{tr}').translate([T, T], {o})",
    "load(W + '/{lm}').generate([T], {o})",
    "load(W + '/{tr}').generate([T], {o}, return_details=True)",
    "list(load(W + '/{lm}').stream(T, {o}))",
    "load(W + '/{tr}').generate([[N, 5]], max_new_tokens=3, return_details=True)",
    "load(W + '/{lm}').generate([[N]], max_new_tokens=3)",
    "load(W + '/mlm').fill(T, top_k=N)",
    "load(W + '/mlm').fill('<mask> ' + T)",
    "load(W + '/classes').classify([T, 'a'])",
    "load(W + '/classes').classify(['a'], pairs=[T])",
    "load(W + '/{lm}').vectors([T], pooling=T)",
    "load(W + '/{lm}').vectors([T, 'a'], batch_tokens=N)",
    "load(W + '/{lm}').score([T, 'a b'])",
    "load(W + '/{lm}').score(['a b'], stride=N)",
    "load(W + '/{tr}').score([T], [T])",
    "load(W + '/{tr}').score(['a'], [])",
    "load(T)",
    "load(W + '/{any}', device=T)",
    "load(W + '/{any}', backend=T)",
    "load(W + '/{any}', precision=T)",
    "load(W + '/fast', threads=N)",
    "load(W + '/{any}').tokenizer.encode(T)",
    "load(W + '/{any}').tokenizer.decode([N])",
    "ensemble([load(W + '/own')] * 2, [F, F]).translate([T])",
    "load_recipe('dates', [T])",
    "load_recipe('dates', {T: 5})",
    "load_recipe('dates').replace({'training.max_steps': T})",
    "load_recipe('dates', ['training.max_steps=' + T])",
]
WHOLE_OPTIONS = (
    *("beam_size", "num_return", "max_new_tokens", "min_new_tokens", "top_k", "seed", "num_groups"),
    *("no_repeat_ngram_size", "batch_tokens", "num_draft_tokens"),
)
TOKENS = ([""], ["\ud800"], [[]], [[10**9]], ["a"])
REAL_OPTIONS = (
    *("temperature", "top_p", "min_p", "typical_p", "length_penalty", "diversity_penalty"),
    *("coverage_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty"),
)
USES: dict[str, Callable[[Draw, Path, Path], Use]] = {
    "values of options": values,
    "words of the command": words,
    "other files and models": other_paths,
    "damaged models": damaged_models,
    "damaged runs": damaged_runs,
    "settings of recipes": settings_of_recipes,
    "recipe files": recipe_files,
    "training data": training_data,
    "streams": streams,
    "signals": endings,
    "calls of the library": calls,
}


def _parameters(words: list[str]) -> list[Any]:
    """The parameters that the command line's parser knows of a command."""
    import typer

    from heedful.cli.app import make_app

    command: Any = typer.main.get_command(make_app())
    for word in words[:2]:
        command = getattr(command, "commands", {}).get(word, command)
    return list(command.params)


def _start(
    call: str | None,
    closed: tuple[int, ...],
    columns: int,
    ending: tuple[signal.Signals, float] | None,
) -> None:
    """In the new process: limit its memory, close its streams, and set its ending."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.environ["COLUMNS"] = str(columns)
    for handle in closed:
        os.close(handle)
        setattr(sys, ("stdin", "stdout", "stderr")[handle], None)
    if ending is not None:
        number, seconds = ending
        signal.signal(number, signal.SIG_DFL)  # until the command sets its own
        timer = Timer(seconds, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
    if call is not None:
        _call(call)


def _call(expression: str) -> None:
    """Evaluate a call of the library and exit, with its errors printed as those of a command."""
    import heedful
    from heedful.cli.guard import run_checked
    from heedful.recipe_files import load_recipe

    names = {"load": heedful.load, "ensemble": heedful.ensemble, "load_recipe": load_recipe}
    names |= {"nan": float("nan"), "inf": float("inf")}

    def evaluate(**options: Any) -> None:
        eval(expression, names)

    run_checked(evaluate)
