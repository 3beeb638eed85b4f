"""The bodies of requests, strictly typed: an unknown or unsupported parameter is an error."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TEXT = 1_000_000  # characters

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Texts = Annotated[list[Text], Field(min_length=1)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
ShortText = Annotated[str, Field(max_length=1_000)]  # without lone surrogates, as all with a limit
ModelName = Annotated[str, Field(max_length=200, description="Name of a model of this server.")]
Off = Literal[False] | None


class Body(BaseModel):
    """Base of the bodies of JSON requests."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


class Sampling(Body):
    """Parameters that completions and chat completions share."""

    model: ModelName
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = Field(
        None, description="An extension of OpenAI's API."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="An extension of OpenAI's API."
    )
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = Field(
        None, description="An extension of OpenAI's API."
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: ShortText | list[ShortText] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: ShortText | None = Field(None, description="Has no effect.")


class CompletionBody(Sampling):
    """The body of a request to `/v1/completions`."""

    prompt: Text | Texts | Ids | Annotated[list[Ids], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Off = None
    best_of: Literal[1] | None = None
    suffix: None = None


class ContentPart(Body):
    """A part of a message; only texts are supported."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[ContentPart], Field(min_length=1)]

    def plain(self) -> dict[str, Any]:
        """With its content as one text, and developer messages as system messages."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class TextFormat(Body):
    """The only response format."""

    type: Literal["text"]


class ChatBody(Sampling):
    """The body of a request to `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None


class EmbeddingBody(Body):
    """The body of a request to `/v1/embeddings`."""

    model: ModelName
    input: Text | Texts | Ids | Annotated[list[Ids], Field(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The model's own number alone."
    )
    user: ShortText | None = Field(None, description="Has no effect.")


class TranslateBody(Body):
    """The body of a request to `/translate`."""

    q: Text | Texts
    source: Annotated[str, Field(max_length=35)] = "auto"
    target: Annotated[str, Field(max_length=35)]
    format: Literal["text"] = "text"
    alternatives: Annotated[int, Field(ge=0)] = 0
    api_key: ShortText | None = None


class DetectBody(Body):
    """The body of a request to `/detect`."""

    q: Text
    api_key: ShortText | None = None


class ClassifyBody(Body):
    """The body of a request to `/classify`."""

    model: ModelName | None = None
    texts: Text | Texts
    pairs: Text | Texts | None = Field(
        None, description="The second text of each pair, for models of pairs."
    )


class FillBody(Body):
    """The body of a request to `/fill`."""

    model: ModelName | None = None
    texts: Text | Texts
    top_k: Annotated[int, Field(ge=1, le=100)] = 5


class ReloadBody(Body):
    """The body of a request to `/admin/reload`."""

    model: ModelName | None = Field(None, description="Default: all models.")
