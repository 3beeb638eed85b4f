"""Systems of the benchmark of encoding speed: the vector of a text is the mean of its states."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ctranslate2
import numpy as np
import torch
from torch import Tensor, nn

import heedful
from common import installed
from heedful.backends.base import Settings
from heedful.backends.ctranslate2.runtime import select_instructions
from heedful.backends.torch.threads import run_with
from heedful.deploy.convert import convert_model
from heedful.export.hf import export_hf
from heedful.files import read_json
from heedful.pipelines.batching import by_length

BUDGETS = (512, 1024)  # tokens of a batch, padding included
Rows = list[list[int]]
Vectors = np.ndarray
Encode = Callable[[], Vectors]
# Function from the ids and the mask of a batch, both (B, T), to states (B, T, D).
States = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Variant(NamedTuple):
    """A system with settings.

    Attributes:
        on: returns for texts a function that encodes them once.
    """

    precision: str
    threads: int | None
    workers: int
    batches: str
    on: Callable[[Rows], Encode]

    def __str__(self) -> str:
        return f"{self.precision} {self.workers}×{self.threads}, {self.batches}"


def systems(folder: Path, counts: Sequence[int], *, compiles: bool) -> dict[str, list[Variant]]:
    """For each installed system its variants with different settings.

    Args:
        folder: the folder of `write_forms`, with the optimized model in `heedful`.
        counts: numbers of threads.
        compiles: also run transformers with torch.compile, which takes a minute.
    """
    best = heedful.load(folder / "heedful", use="throughput")
    runs = best.backend or best.eager
    detail = f"{runs.name}, sorted, {runs.settings.batch_tokens} tokens"
    run = partial(heedful_vectors, best, None, {})
    settings = runs.settings
    best_run = Variant(runs.precision, settings.threads, settings.workers, detail, run)
    variants = {"heedful optimized": [best_run]}
    for precision in ("float32", "bfloat16"):
        model = heedful.load(folder / "heedful", device="cpu", backend="eager", precision=precision)
        variants[f"heedful eager, {precision}"] = [
            Variant(
                *(precision, count, 1, f"sorted, {budget} tokens"),
                partial(heedful_vectors, model, count, {"batch_tokens": budget}),
            )
            for count in counts
            for budget in BUDGETS
        ]
    net = transformers_net(folder)
    variants["transformers"] = sorted_batches("bfloat16", by_torch(net, counts))
    if compiles:
        compiled = torch.compile(net, dynamic=True)
        variants["transformers, torch.compile"] = sorted_batches(
            "bfloat16", by_torch(compiled, counts)
        )
    if installed("onnxruntime"):
        for precision in ("float32", "int8"):
            path = folder / f"{precision}.onnx"
            variants[f"onnxruntime, {precision}"] = sorted_batches(precision, by_onnx(path, counts))
    if installed("openvino"):
        for precision in ("bfloat16", "int8"):
            path = folder / f"{precision}.xml"
            variants[f"openvino, {precision}"] = sorted_batches(
                precision, by_openvino(path, counts)
            )
    variants["ctranslate2"] = sorted_batches("int8", by_ctranslate2(folder, counts))
    return variants


def write_forms(model: Any, folder: Path) -> None:
    """Write a model for transformers, CTranslate2, and if installed ONNX Runtime and OpenVINO.

    ONNX is written in float32 and in int8 with dynamic quantization, OpenVINO in bfloat16 and with
    weights of 8 bits.
    """
    export_hf(model, folder / "hf")
    convert_model(model, folder / "by_hand", "int8")
    if installed("onnxruntime"):
        net = transformers_net(folder).float()
        # ONNX Runtime's optimizer fuses only this implementation of attention.
        net.set_attn_implementation("eager")
        write_onnx(StatesOf(net), model.config.num_heads, model.config.d_model, folder)
    if installed("openvino"):
        write_openvino(StatesOf(transformers_net(folder).float()), folder)


class StatesOf(nn.Module):
    """A net of transformers as a function of two tensors."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """States (B, T, D) of ids and their mask, both (B, T)."""
        states: Tensor = self.net(input_ids=ids, attention_mask=mask).last_hidden_state
        return states


EXAMPLE = (torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long))


def transformers_net(folder: Path) -> Any:
    """The exported model in bfloat16, loaded by transformers."""
    from transformers import BertModel

    net = BertModel.from_pretrained(folder / "hf", add_pooling_layer=False)
    return net.to(torch.bfloat16).eval()


def write_onnx(net: nn.Module, num_heads: int, width: int, folder: Path) -> None:
    """ONNX with the fused operators of ONNX Runtime, in float32 and quantized to 8 bits."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model

    names, path = ["ids", "mask"], folder / "plain.onnx"
    sizes = {name: {0: "batch", 1: "length"} for name in (*names, "states")}
    torch.onnx.export(
        net,
        EXAMPLE,
        str(path),
        input_names=names,
        output_names=["states"],
        dynamic_axes=sizes,
        dynamo=False,
    )
    fused = optimize_model(str(path), model_type="bert", num_heads=num_heads, hidden_size=width)
    fused.save_model_to_file(str(folder / "float32.onnx"))
    quantize_dynamic(
        folder / "float32.onnx",
        folder / "int8.onnx",
        weight_type=QuantType.QInt8,
        per_channel=True,
        # The output type of fused operators, which ONNX cannot infer.
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )


def write_openvino(net: nn.Module, folder: Path) -> None:
    """Write OpenVINO's format, unchanged and with weights of 8 bits."""
    import nncf
    import openvino

    path = folder / "bfloat16.xml"
    sizes = [openvino.PartialShape([-1, -1])] * 2
    openvino.save_model(openvino.convert_model(net, example_input=EXAMPLE, input=sizes), path)
    model = openvino.Core().read_model(path)
    openvino.save_model(nncf.compress_weights(model), folder / "int8.xml")


Workers = dict[tuple[int, int], list[States]]  # (workers, threads): the function of each worker


def sorted_batches(precision: str, workers: Workers) -> list[Variant]:
    """Variants with all layouts and batch sizes, and texts sorted by length."""
    return [
        Variant(
            *(precision, threads, count, f"sorted, {budget} tokens"),
            partial(encode, functions, budget),
        )
        for (count, threads), functions in workers.items()
        for budget in BUDGETS
    ]


def encode(functions: list[States], budget: int, rows: Rows) -> Encode:
    """Encode padded batches by the next function that is free; one thread per function."""
    batches = [*by_length(rows, budget)][::-1]

    def work(function: States, queue: list[list[int]], results: list[Any]) -> None:
        while queue:
            try:
                batch = queue.pop()
            except IndexError:  # another thread took the last batch
                return
            results.append((batch, means(function, [rows[row] for row in batch])))

    def run() -> Vectors:
        queue, results = batches.copy(), []
        if len(functions) == 1:
            work(functions[0], queue, results)
        else:
            with ThreadPoolExecutor(len(functions)) as pool:
                list(pool.map(lambda function: work(function, queue, results), functions))
        vectors = np.empty((len(rows), results[0][1].shape[1]), np.float32)
        for batch, batch_vectors in results:
            vectors[batch] = batch_vectors
        return vectors

    return run


def means(function: States, rows: Rows) -> Vectors:
    """The mean state of each row of one padded batch."""
    lengths = np.array([len(row) for row in rows])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    ids = np.zeros_like(mask)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    weights = (mask / lengths[:, None]).astype(np.float32)
    vectors: Vectors = (weights[:, None] @ function(ids, mask))[:, 0]
    return vectors


def heedful_vectors(model: Any, threads: int | None, options: dict[str, Any], rows: Rows) -> Encode:
    """Encoding by heedful's `vectors`; `threads` of torch, None: the backend's settings."""

    def run() -> Vectors:
        if threads is not None:
            model.settings = Settings(threads)
        vectors: Vectors = model.vectors(rows, **options)
        return vectors

    return run


def by_torch(net: Any, counts: Sequence[int]) -> Workers:
    """A net of transformers, with fused attention."""

    @torch.inference_mode()
    def states(threads: int, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        with run_with(threads):
            outputs = net(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
        out: np.ndarray = outputs.last_hidden_state.float().numpy()
        return out

    return {(1, count): [partial(states, count)] for count in counts}


def by_onnx(path: Path, counts: Sequence[int]) -> Workers:
    """ONNX Runtime, by layout: one session with several threads, or a session per core."""
    import onnxruntime

    def session(threads: int) -> States:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        opened = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda ids, mask: opened.run(None, {"ids": ids, "mask": mask})[0]

    return {
        (workers, threads): [session(threads) for _ in range(workers)]
        for workers, threads in layouts(counts)
    }


def by_openvino(path: Path, counts: Sequence[int]) -> Workers:
    """OpenVINO in bfloat16, by layout: one stream with several threads, or a stream per core."""
    import openvino

    core = openvino.Core()

    def requests(workers: int, threads: int) -> list[States]:
        model = core.compile_model(
            path,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": "bf16",
                "NUM_STREAMS": workers,
                "INFERENCE_NUM_THREADS": workers * threads,
            },
        )

        def states(request: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
            hidden: np.ndarray = request.infer([ids, mask])[0]
            return hidden

        return [partial(states, model.create_infer_request()) for _ in range(workers)]

    return {layout: requests(*layout) for layout in layouts(counts)}


def by_ctranslate2(folder: Path, counts: Sequence[int]) -> Workers:
    """CTranslate2, by layout; one thread calls each worker."""
    place = folder / "by_hand" / "backends" / "ctranslate2" / "int8"
    select_instructions()
    tokens = read_json(place / "vocabulary.json")

    def states(opened: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        lengths = mask.sum(1).tolist()
        words = [
            [tokens[token] for token in row[:n]]
            for row, n in zip(ids.tolist(), lengths, strict=True)
        ]
        return np.array(opened.forward_batch(words).last_hidden_state)

    workers_by_layout = {}
    for workers, threads in layouts(counts):
        options = {"inter_threads": workers, "intra_threads": threads}
        opened = ctranslate2.Encoder(str(place), compute_type="int8", **options)
        workers_by_layout[workers, threads] = [partial(states, opened)] * workers
    return workers_by_layout


def layouts(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(workers, threads): one worker with each number of threads, or a worker per core."""
    max_count = max(counts)
    return sorted({*((1, count) for count in counts), (max_count, 1)})
