"""A program of a user, which mypy checks and nobody runs: its types follow from the library's.

A line with `type: ignore` must have the error that it names: mypy reports an ignored error that
does not exist.
"""

from pathlib import Path

import heedful
from heedful.zoo import gpt2

model = heedful.load_translator(Path("model"))
text: str = model.translate("a")
texts: list[str] = model.translate(["a", "b"], beam_size=5)
score: float = model.generate("a", return_details=True)[0].score
score = model.translate(["a"], return_details=True, beam_size=2, stop_rule="optimal")[0][0].score
model = heedful.load_translator("model", backend="eager", threads=1)
lm = heedful.load_language_model("lm")
ids: list[int] = lm.generate([1, 2])
many: list[list[int]] = lm.generate([[1, 2], [3]])
pieces: list[str] = list(lm.stream("a", temperature=0.5, seed=1, stop=["."]))
answer: str = lm.chat([{"role": "user", "content": "a"}], top_p=0.9)
answers: list[str] = lm.chat([[{"role": "user", "content": "a"}]], max_new_tokens=9)
label: str = heedful.load_classifier("classifier").classify("a").label
label = heedful.load_classifier("classifier").classify(["a"], too_long="error")[0].label
heedful.load_encoder("encoder").embed("a")
heedful.train("recipe.yaml")
tokenizer = heedful.train_tokenizer(["a"], kind="char")
config = gpt2.Config(tokenizer.vocab_size)
text = heedful.from_net(gpt2.build(config), config, tokenizer).generate("a")
passed: str = heedful.verify(lm.net).summary()

heedful.laod("model")  # type: ignore[attr-defined]
model.trnslate("a")  # type: ignore[attr-defined]
heedful.load("model").trnslate("a")  # type: ignore[union-attr]
number: int = model.translate("a")  # type: ignore[assignment]
lm.translate("a")  # type: ignore[attr-defined]
heedful.from_net(gpt2.build(config), config).translate("a")  # type: ignore[attr-defined]
model.translate("a", beam_sise=5)  # type: ignore[call-overload]
model.translate("a", beam_size="5")  # type: ignore[call-overload]
lm.generate("a", stop_rule="best")  # type: ignore[call-overload]
lm.chat([{"role": "user", "content": "a"}], temprature=1.0)  # type: ignore[call-overload]
lm.stream("a", num_retrun=2)  # type: ignore[call-arg]
heedful.load_translator("model", device=0)  # type: ignore[arg-type]
heedful.load_language_model("model", thread=1)  # type: ignore[call-arg]
