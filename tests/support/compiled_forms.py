"""Models that are compiled, proved, measured and kept, and a program that uses them.

`make` and `python compiled_forms.py DIR` fail where a property does not hold. Both run in a process
without checked shapes, which cannot be compiled.
"""

import ctypes
import random
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfile
from threading import Event, Lock, Thread
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

import compiled_encoders
import heedful
from architectures import one_layer
from backend_models import TEXTS, VOCAB, model_of
from heedful.backends.aot.compiled_net import KERNEL
from heedful.backends.aot.kernels import PackedFeedForward, pack, pack_int8, text_attention
from heedful.backends.base import Settings
from heedful.parts.feedforward import FeedForward
from heedful.progress import Advance, use_display
from kept_objects import kept_objects
from option_cases import hold_options

REQUESTS, SENTENCES = 60, 4_000


def make(folder: Path) -> None:
    """Compile a decoder and an encoder into two folders."""
    from torch._inductor import config

    from heedful.backends.aot import compile as compiling

    # Without what takes longer than it saves in three graphs: optimized callers of the kernels,
    # precompiled headers, and trial compilations for every set of vector instructions.
    config.aot_inductor.compile_wrapper_opt_level = "O0"
    config.aot_inductor.precompile_headers = False
    config.cpp.vec_isa_ok = True
    library = folder / "writer" / "backends" / "compiled" / "float32" / KERNEL
    copied = patch.object(compiling, "build_library", lambda sources, path: copyfile(library, path))
    with kept_objects():
        make_decoder(folder / "writer", "llama")
        with copied:
            compiled_encoders.make(folder / "reader")


def make_decoder(folder: Path, name: str) -> None:
    """Compile, prove and measure a model of an architecture; hold the kernels against torch."""
    from heedful.deploy.optimize import optimize

    # Heads as wide as real ones: a constant of few numbers would be folded into the code.
    model_of(name, **one_layer(name), head_dim=32).save(folder)
    model = heedful.load(folder, device="cpu", backend="eager")
    messages: list[str] = []
    keys: dict[str, Any] = {"precisions": ["float32"], "threads": [1]}

    def show(what: str, total: int | None) -> AbstractContextManager[Advance]:
        messages.append(what)
        return nullcontext(lambda count: None)

    with use_display(show):
        optimize(model, folder, TEXTS, backends=["compiled"], uses=["latency"], **keys)
        assert messages.count("compiling float32: step") == 1, messages
        actual = optimize(model, folder, TEXTS, backends=["eager", "compiled"], **keys)
    assert actual.refused == {}, actual.refused
    assert actual.proofs["compiled float32"].same == 1
    measured = {choice.backend for outcome in actual.outcomes.values() for choice in outcome.rates}
    assert measured == {"eager", "compiled"}
    assert messages.count("compiling float32: step") == 1  # the same weights, so not again
    own = sum(path.stat().st_size for path in folder.rglob("constants.safetensors"))
    assert own < (folder / "model.safetensors").stat().st_size / 2  # no weights twice
    hold_kernels(folder / "backends" / "compiled" / "float32" / KERNEL)
    hold_attention(folder / "backends" / "compiled" / "float32" / KERNEL)
    hold_encoder_kernels(folder / "backends" / "compiled" / "float32" / KERNEL)
    hold_release_of_lock(folder / "backends" / "compiled" / "float32" / KERNEL)


def hold_kernels(path: Path) -> None:
    """Products of any number of rows and outputs, in float32 and in int8."""
    library = ctypes.CDLL(str(path))
    torch.manual_seed(0)
    for rows, outputs, inputs in ((1, 64, 16), (5, 200, 36), (13, 7, 4), (64, 130, 256)):
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        bias = torch.randn(outputs)
        actual = _call(library.aoti_torch_cpu_heedful_float32_linear, x, pack(weight), bias)
        torch.testing.assert_close(actual, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
        whole = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
        scale, shift = torch.rand(outputs), 128 * whole.sum(1, dtype=torch.int32)
        function = library.aoti_torch_cpu_heedful_int8_linear
        actual = _call(function, x, pack_int8(whole), scale, shift, bias, 0)
        size = x.abs().amax(1, keepdim=True) / 127
        quotient = x.double() * (1 / size).double()  # as by a fused multiplication and addition
        exact = quotient.round() @ whole.double().t() * size * scale + bias
        torch.testing.assert_close(actual.double(), exact, rtol=1e-4, atol=1e-3)
    zeros = torch.zeros(2, 4)
    whole = whole[:, :4].contiguous()
    shift = 128 * whole.sum(1, dtype=torch.int32)
    actual = _call(function, zeros, pack_int8(whole), scale, shift, bias, 1)
    assert torch.equal(actual, bias.expand(2, -1))


def hold_attention(path: Path) -> None:
    """Attention over keys in the layout of a cache or by head, some of them masked."""
    function = ctypes.CDLL(str(path)).aoti_torch_cpu_heedful_attention
    torch.manual_seed(0)
    shapes = ((3, 4, 1, 20, 16), (1, 3, 4, 7, 5), (2, 1, 2, 1, 8), (2, 2, 1, 9, 40))
    for texts, heads, queries, slots, width in shapes:
        query = torch.randn(texts, queries, heads, width).transpose(1, 2)
        stores = torch.randn(texts, slots + 1, 2 * heads, width)[:, :slots].transpose(1, 2)
        bias = torch.randn(texts, heads, queries, slots)
        hidden = torch.rand(texts, 1, queries, slots) < 0.5
        hidden[..., 0] = False
        masked = bias.masked_fill(hidden, torch.finfo(torch.float32).min / 2)
        for held in (stores, stores.contiguous()):
            for added in (masked, masked[:1, :1, :1], torch.zeros(1, 1, 1, slots)):
                key, value = held.chunk(2, dim=1)
                expected = F.scaled_dot_product_attention(query, key, value, added, scale=1.0)
                actual = _call(function, query, key, value, added)
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    nothing = torch.full((1, 1, 1, slots), torch.finfo(torch.float32).min / 2)
    assert not _call(function, query, key, value, nothing).any()


def hold_encoder_kernels(path: Path) -> None:
    """Feed-forward networks and attention of packed texts equal their references."""
    library = ctypes.CDLL(str(path))
    torch.manual_seed(0)
    for rows, width, units, kind in (
        (1, 16, 16, "relu"),
        (100, 20, 48, "gelu"),
        (49, 64, 80, "gelu_tanh"),
        (7, 8, 32, "silu"),
        (50, 36, 96, "geglu"),
        (6, 12, 16, "swiglu"),
    ):
        module = FeedForward(width, units, kind)
        assert PackedFeedForward.can_replace(module)
        packed, x = PackedFeedForward(module), torch.randn(rows, width)
        expected = packed(x)  # by the reference
        layers = [*packed.up.buffers(), *packed.down.buffers()]
        function = library.aoti_torch_cpu_heedful_int8_feed_forward
        actual = _call(function, x, *layers, packed.activation)
        # A hidden unit between two steps of int8 may fall to either of them.
        assert (actual - expected).norm() < 3e-3 * expected.norm(), (kind, rows)
        assert (actual - module(x)).norm() < 3e-2 * module(x).norm(), (kind, rows)
    assert not PackedFeedForward.can_replace(FeedForward(16, 24))
    lengths = [5, 1, 37, 128, 17, 64, 90]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    for heads, kv_heads, width, window in ((3, 3, 64, 0), (4, 2, 16, 3), (2, 1, 20, 40)):
        joined = torch.randn(sum(lengths), heads + 2 * kv_heads, width)
        tensors = joined.split([heads, kv_heads, kv_heads], 1)
        expected = text_attention(*tensors, starts, 0.5, window)
        function = library.aoti_torch_cpu_heedful_text_attention
        actual = _call(function, *tensors, starts, 0.5, window)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def hold_release_of_lock(path: Path) -> None:
    """Kernels of encoders release Python's lock while they run, and those of decoders do not."""
    library = ctypes.PyDLL(str(path))  # calls keep the lock
    module = PackedFeedForward(FeedForward(64, 256, "gelu"))
    layers = [*module.up.buffers(), *module.down.buffers()]
    x, qkv = torch.randn(512, 64), torch.randn(512, 3, 2, 64)
    starts = torch.tensor([0, 512])
    linear = library.aoti_torch_cpu_heedful_int8_linear
    feed_forward = library.aoti_torch_cpu_heedful_int8_feed_forward
    attention = library.aoti_torch_cpu_heedful_text_attention
    cases: list[tuple[bool, Any]] = [
        (False, partial(_call, linear, x, *layers[:4], 0)),
        (True, partial(_call, linear, x, *layers[:4], 1)),
        (True, partial(_call, feed_forward, x, *layers, module.activation)),
        (True, partial(_call, attention, *qkv.unbind(1), starts, 1.0, 0)),
    ]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that only a release lets the other thread run
    try:
        for releases, call in cases:
            gate, passed = Lock(), Event()
            gate.acquire()

            def wait(gate: Any = gate, passed: Event = passed) -> None:
                gate.acquire()
                passed.set()

            thread = Thread(target=wait)
            thread.start()
            gate.release()
            for _ in range(1000 if releases else 3):
                call()
                if passed.is_set():
                    break
            assert passed.is_set() == releases, call
            thread.join()
    finally:
        sys.setswitchinterval(before)


def _call(function: Any, *arguments: torch.Tensor | int | float) -> torch.Tensor:
    """The result of a kernel."""
    tensors = [item for item in arguments if isinstance(item, torch.Tensor)]
    handles = iter(torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors))
    result = ctypes.c_void_p()
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    api.PyCapsule_New.restype = ctypes.py_object
    passed: list[Any] = []
    for item in arguments:
        if isinstance(item, torch.Tensor):
            passed.append(ctypes.c_void_p(api.PyCapsule_GetPointer(next(handles), None)))
        else:
            passed.append(ctypes.c_int64(item) if isinstance(item, int) else ctypes.c_double(item))
    assert function(*passed, ctypes.byref(result)) == 0
    capsule = api.PyCapsule_New(result, None, None)
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule)


def use(folder: Path) -> None:
    """Requests of any size are answered as the net does, and nothing is compiled."""
    model = heedful.load(folder, backend="compiled")
    assert model.backend is not None
    eager = heedful.load(folder, backend="eager", device="cpu")
    draw = random.Random(1)
    for number in range(REQUESTS):
        rows = compiled_encoders.random_rows(draw)
        options: dict[str, Any] = {"max_new_tokens": draw.randint(4, 24)}
        options |= {"min_new_tokens": draw.choice((0, 0, 4))}
        options |= draw.choice(({"beam_size": 1}, {"beam_size": draw.randint(2, 4)}))
        if number % 5 == 0:
            options |= {"beam_size": 1, "temperature": 1.0, "num_return": 2, "seed": number}
        ours, reference = (
            item.generate(rows, **options, return_details=True) for item in (model, eager)
        )
        ids = [[output.ids for output in one] for one in reference]
        without_scores = model.generate(rows, **options)
        assert without_scores == (ids if "num_return" in options else [best for best, *_ in ids])
        for one, other in zip(ours, reference, strict=True):
            assert [o.ids for o in one] == [o.ids for o in other], (number, options)
            for a, b in zip(one, other, strict=True):
                assert abs(a.log_prob - b.log_prob) < 1e-3, (a, b)
                assert a.finished == b.finished
    hold_options(model.backend, eager)
    hold_sentences(model, draw)
    hold_beside_ctranslate2(eager)


def hold_sentences(model: Any, draw: random.Random) -> None:
    """Thousands of prompts of random lengths in batches of any size need the graphs alone."""
    done = 0
    while done < SENTENCES:
        size = min(draw.randint(1, 128), SENTENCES - done)
        rows = [[draw.randrange(4, VOCAB) for _ in range(draw.randint(1, 14))] for _ in range(size)]
        options = {"beam_size": draw.choice((1, 1, 2)), "max_new_tokens": draw.randint(1, 6)}
        done += len(model.generate(rows, **options))
    assert model._net is None  # the net itself was not called


def hold_beside_ctranslate2(model: Any) -> None:
    """CTranslate2, imported later, has correct outputs in spite of kernels with torch's names."""
    if find_spec("ctranslate2") is None:
        return
    from heedful.backends.registry import open_conversion
    from heedful.deploy.convert import convert_model

    rows = [[5, 6, 7], [8, 9]]
    request = model.request(rows, beam_size=1, max_new_tokens=8)
    with tempfile.TemporaryDirectory() as place:
        facts = convert_model(model, Path(place), "float32")
        backend = open_conversion(
            Path(place), Path(place), "ctranslate2", "float32", facts, Settings(1)
        )
        actual = backend.outputs(rows, request)
    expected = model.eager.outputs(rows, request)
    assert [[o.ids for o in one] for one in actual] == [[o.ids for o in one] for one in expected]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    use(place / "writer")
    compiled_encoders.use(place / "reader")
    compilers = [name for name in sys.modules if name.startswith("torch._inductor")]
    assert compilers == [], compilers
