"""The bodies of requests, strictly typed: an unknown or unsupported parameter is an error."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from heedful.options import Options

MAX_TEXT = 1_000_000  # characters

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Texts = Annotated[list[Text], Field(min_length=1)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # a key of a JSON object
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
ShortText = Annotated[str, Field(max_length=1_000)]  # without lone surrogates, as all with a limit
ModelName = Annotated[str, Field(max_length=200, description="Name of a model of this server.")]
Language = Annotated[str, Field(max_length=35)]
Terms = Annotated[dict[ShortText, ShortText], Field(max_length=1_000)]
Off = Literal[False] | None
_OPENAI = "An extension of OpenAI's API."
_API_KEY = "A key of the server, in place of a header."
_NO_EFFECT = "Has no effect."
_ONLY_MODEL = "Name of a model; default: the only one for this route."

_GLOSSARY: Any = Field(
    None,
    description="Terms and their translations, at most 1,000, in place of the server's glossary; "
    "alternatives are separated by |. In a form it is the JSON of an object. An extension of "
    "LibreTranslate's API.",
)


def _example(**body: Any) -> ConfigDict:
    """The configuration of a body with an example; MODEL is a placeholder for a model's name."""
    return ConfigDict(json_schema_extra={"examples": [body]})


def _declared(name: str, note: str = "") -> Any:
    """A field that is an option of generation, with its description there."""
    text = Options.__dataclass_fields__[name].metadata["help"]
    return Field(None, description=f"{text} {note}".rstrip())


class Body(BaseModel):
    """Base of the bodies of JSON requests."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = Field(
        None, description="Add an event with the numbers of tokens at the end."
    )
    include_obfuscation: Off = Field(None, description="Random padding of events: not supported.")
    continuous_usage_stats: Off = Field(
        None, description="Numbers of tokens in each event: not supported."
    )


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonFormat(Body):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A JSON schema, and its name, which has no effect."""

    model_config = ConfigDict(validate_by_name=True)

    schema_: dict[str, Any] = Field(alias="schema", description="The schema.")
    name: ShortText | None = Field(None, description=_NO_EFFECT)
    description: Text | None = Field(None, description=_NO_EFFECT)
    strict: bool | None = Field(None, description="Answers match the schema in any case.")


class SchemaFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class Sampling(Body):
    """Parameters that completions and chat completions share."""

    model: ModelName
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Most new tokens of an output."
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = _declared(
        "temperature", "Default: the model's, or 1."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = _declared("top_p")
    top_k: Annotated[int, Field(ge=1)] | None = _declared("top_k", _OPENAI)
    min_p: Annotated[float, Field(ge=0, le=1)] | None = _declared("min_p", _OPENAI)
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = _declared(
        "repetition_penalty", _OPENAI
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = _declared("presence_penalty")
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = _declared("frequency_penalty")
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None,
        max_length=1_000,
        description="Added to the logits of tokens: an id -> a number.",
    )
    response_format: (
        Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = Field(
        None,
        description="Text (default), a JSON object, or JSON of a schema. An output that ends at "
        "its limit of tokens is incomplete.",
    )
    n: Annotated[int, Field(ge=1)] | None = Field(None, description="Outputs of each prompt.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        None, description="With a seed, samples can be repeated."
    )
    stop: ShortText | list[ShortText] | None = Field(
        None, description="Texts that end an output, in which they are not contained."
    )
    stream: bool | None = Field(None, description="Answer in server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Options of a stream.")
    user: ShortText | None = Field(None, description=_NO_EFFECT)
    safety_identifier: ShortText | None = Field(None, description=_NO_EFFECT)
    prompt_cache_key: ShortText | None = Field(None, description=_NO_EFFECT)
    metadata: dict[ShortText, ShortText] | None = Field(None, max_length=16, description=_NO_EFFECT)
    store: Off = Field(None, description="Storage of answers: not supported.")
    service_tier: Literal["auto", "default"] | None = Field(
        None, description="There is a single tier."
    )


class CompletionBody(Sampling):
    """The body of a request to `/v1/completions`."""

    model_config = _example(
        model="MODEL", prompt="Once upon a time", max_tokens=32, temperature=0.8
    )

    prompt: Text | Texts | Ids | Annotated[list[Ids], Field(min_length=1)] = Field(
        description="A text or its token ids, or a list of them."
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Most new tokens of an output; 0 only with echo."
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = Field(
        None,
        description="Add the log-probability of each token, and of this number of most probable "
        "tokens.",
    )
    echo: bool | None = Field(
        None,
        description="Begin the text with the prompt, and log-probabilities with those of its "
        "tokens; then max_tokens may be 0.",
    )
    best_of: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The value of n: outputs are not selected among more of them."
    )
    suffix: Literal[""] | None = Field(
        None, description="Text after the completion: not supported."
    )


class ContentPart(Body):
    """A part of a message; only texts are supported."""

    type: Literal["text"]
    text: Text


class CalledFunction(Body):
    """A function that a message of the assistant calls; its arguments are a JSON object."""

    name: ShortText
    arguments: Text


class ToolCall(Body):
    """A call of a tool by the assistant."""

    id: ShortText
    type: Literal["function"]
    function: CalledFunction


class Message(Body):
    """A message of a chat; None in further fields is what answers have there."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[ContentPart], Field(min_length=1)] | None = None
    name: ShortText | None = Field(None, description="Of its author, for the chat template.")
    tool_calls: list[ToolCall] | None = Field(
        None, description="Of the assistant, for chat templates that write them."
    )
    tool_call_id: ShortText | None = Field(None, description="The call that a tool answers.")
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    def plain(self) -> dict[str, Any]:
        """With its content as one text."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        message = {"role": self.role, "content": content}
        more: dict[str, Any] = {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.tool_calls:
            more["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message | {key: value for key, value in more.items() if value is not None}


class Tool(Body):
    """A tool that the model may not call."""

    type: Literal["function"]
    function: dict[str, Any]


class ChatBody(Sampling):
    """The body of a request to `/v1/chat/completions`."""

    model_config = _example(
        model="MODEL",
        messages=[{"role": "user", "content": "Name three rivers."}],
        max_completion_tokens=64,
    )

    messages: Annotated[list[Message], Field(min_length=1)] = Field(
        description="The conversation; its last message is answered."
    )
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Most new tokens; default: 512, or what the context leaves."
    )
    logprobs: bool | None = Field(None, description="Add the log-probability of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Number of most probable tokens to add; needs logprobs."
    )
    tools: list[Tool] | None = Field(
        None, description="Tools, which are not supported: with tool_choice none alone."
    )
    tool_choice: Literal["none", "auto"] | None = Field(
        None, description="none, if there are tools."
    )
    parallel_tool_calls: bool | None = Field(None, description=_NO_EFFECT)
    modalities: list[Literal["text"]] | None = Field(None, description="Text alone.")
    reasoning_effort: Literal["none"] | None = Field(None, description="Not supported.")
    verbosity: Literal["medium"] | None = Field(None, description="Not supported.")
    prediction: None = Field(None, description="Not supported.")
    audio: None = Field(None, description="Not supported.")
    functions: None = Field(None, description="Not supported.")
    function_call: Literal["none"] | None = Field(None, description="Not supported.")
    web_search_options: None = Field(None, description="Not supported.")


class EmbeddingBody(Body):
    """The body of a request to `/v1/embeddings`."""

    model_config = _example(model="MODEL", input=["a red bicycle", "a blue car"])

    model: ModelName
    input: Text | Texts | Ids | Annotated[list[Ids], Field(min_length=1)] = Field(
        description="A text or its token ids, or a list of them."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Lists of numbers (default), or little-endian 32-bit floats in base64."
    )
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The model's own number alone."
    )
    user: ShortText | None = Field(None, description=_NO_EFFECT)


class TranslateBody(Body):
    """The body of a request to `/translate`."""

    model_config = _example(q="Guten Morgen", source="de", target="en")

    q: Text | Texts = Field(description="A text, or a list of texts, which are one batch.")
    source: Language | None = Field(
        None,
        description="Language of the texts; auto (default, where translators name theirs): that of "
        "each text is detected.",
    )
    target: Language | None = Field(
        None,
        description="Language of the translations; not needed where a translator names none.",
    )
    format: Literal["text", "html"] = Field(
        "text", description="html: texts of blocks are translated, tags are kept."
    )
    alternatives: Annotated[int, Field(ge=0)] = Field(
        0, description="Further hypotheses of each text, by beam search."
    )
    scores: bool = Field(
        False,
        description="Add the scores by which the search ranks a translation and its alternatives: "
        "log-probabilities, normalized for the length. An extension of LibreTranslate's API.",
    )
    alignments: Literal["words", "tokens"] | None = Field(
        None,
        description="Add for a translation and its alternatives the words (between spaces) or "
        "tokens of both sides, and `links`, pairs of indices from 0: for each word of the "
        "translation the word of the text on which its cross-attention is largest. "
        "An extension of LibreTranslate's API.",
    )
    quality: bool = Field(
        False,
        description="Add an estimated quality of each translation from 0 to 100, that of its worst "
        "sentence. An extension of LibreTranslate's API.",
    )
    glossary: Terms | None = _GLOSSARY
    model: ModelName | None = Field(
        None,
        description="Name of a translator; default: the first for these languages. An extension of "
        "LibreTranslate's API.",
    )
    api_key: ShortText | None = Field(None, description=_API_KEY)


class TranslateFileBody(Body):
    """The body of a request to `/translate_file`; a form has the file itself."""

    model_config = _example(file="R3V0ZW4gTW9yZ2Vu", filename="a.txt", source="de", target="en")

    file: Annotated[str, Field(max_length=1 << 30)] = Field(
        description="The document: the file of a form, or its content in Base64."
    )
    filename: ShortText = Field(description="Its name, whose ending says its format.")
    source: Language | None = Field(
        None, description="Language of the document; auto (default): it is detected."
    )
    target: Language | None = Field(
        None,
        description="Language of the translation; not needed where a translator names none.",
    )
    quality: bool = Field(
        False,
        description="Write an estimated quality from 0 to 100 beside each translation (a comment "
        "in PO, a note in XLIFF and TMX), and in `reviews`. An extension of LibreTranslate's API.",
    )
    glossary: Terms | None = _GLOSSARY
    model: ModelName | None = Field(
        None,
        description="Name of a translator; default: the first for these languages. An extension of "
        "LibreTranslate's API.",
    )
    stream: bool = Field(
        False,
        description="Send server-sent events: `done` and `segments`, numbers of texts, and at last "
        "the answer. An extension of LibreTranslate's API.",
    )
    api_key: ShortText | None = Field(None, description=_API_KEY)


class DetectBody(Body):
    """The body of a request to `/detect`."""

    model_config = _example(q="Guten Morgen, wie geht es Ihnen?")

    q: Text = Field(description="A text.")
    api_key: ShortText | None = Field(None, description=_API_KEY)


class ClassifyBody(Body):
    """The body of a request to `/classify`."""

    model_config = _example(model="MODEL", texts=["a warm and funny film", "a dull story"])

    model: ModelName | None = Field(None, description=_ONLY_MODEL)
    texts: Text | Texts = Field(description="A text, or a list of texts.")
    pairs: Text | Texts | None = Field(
        None, description="The second text of each pair, for models of pairs."
    )


class FillBody(Body):
    """The body of a request to `/fill`."""

    model_config = _example(model="MODEL", texts="A <mask> barks.", top_k=3)

    model: ModelName | None = Field(None, description=_ONLY_MODEL)
    texts: Text | Texts = Field(description="A text with masks, or a list of texts.")
    top_k: Annotated[int, Field(ge=1, le=100)] = Field(
        5, description="The most probable tokens for each mask."
    )


class ReloadBody(Body):
    """The body of a request to `/admin/reload`."""

    model_config = _example(model="MODEL")

    model: ModelName | None = Field(None, description="Name of a model; default: all models.")
