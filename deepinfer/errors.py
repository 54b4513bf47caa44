"""Every error that a user, a file or another rank can cause.

```
DeepInferError
├── ConfigError
│   └── UnsupportedModel
├── CheckpointError
│   ├── CorruptFile
│   └── TensorMismatch
├── TokenizerError
├── ShapeError
├── RequestError
│   ├── PromptTooLong
│   ├── RecipeError
│   └── Rejected
├── CapacityError
├── StepError
│   ├── PeerLost
│   ├── GrammarError
│   └── NothingToDraw
├── AgreementError
├── RecordingError
├── EngineClosed
├── PrefixFileError
└── MissingExtra
```

Each message says what was expected, what came, where, and what to do. `assert` is for what no input can cause.
This module imports nothing.
"""


class DeepInferError(Exception):
    """Base of everything this package raises on purpose.

    Attributes:
        prompt_index: which of the prompts handed in together cannot be served; None if it is about nothing of that kind.
        outputs: what all of them have given (`RequestOutput`s in their order) if some failed on the way; None if none has started.
    """

    prompt_index: int | None = None
    outputs: "list[object] | None" = None

    def __reduce__(self) -> tuple[object, ...]:
        # Copies are made without `__init__`, which may want more than the message.
        return _remake, (type(self), self.args), self.__dict__


def _remake(kind: type[DeepInferError], args: tuple[object, ...]) -> DeepInferError:
    """An error with that message, to be given its attributes."""
    return kind.__new__(kind, *args)


class ConfigError(DeepInferError):
    """A configuration value or key that cannot be honoured."""


class UnsupportedModel(ConfigError):
    """The checkpoint is of a model that this package does not implement."""


class CheckpointError(DeepInferError):
    """A checkpoint folder that cannot be read as a DeepSeek-V4.1-Flash model."""


class CorruptFile(CheckpointError):
    """A file that is truncated, not safetensors, or whose header contradicts its size."""


class TensorMismatch(CheckpointError):
    """Tensors that are missing, left over, or of another shape or dtype; all of them in one report.

    Attributes:
        missing: names the model needs and no file has.
        unexpected: names a file has and the model does not know.
        mismatched: `name: expected ..., got ...` for wrong shapes and dtypes.
    """

    def __init__(self, where: str, missing: list[str], unexpected: list[str], mismatched: list[str]) -> None:
        self.missing, self.unexpected, self.mismatched = missing, unexpected, mismatched
        lines = [f"{where} does not match its config.json:"]
        for title, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape or dtype", mismatched)):
            if names:
                lines.append(f"  {title} ({len(names)}):")
                lines += [f"    {name}" for name in names[:20]]
                if len(names) > 20:
                    lines.append(f"    ... and {len(names) - 20} more")
        super().__init__("\n".join(lines))


class TokenizerError(DeepInferError):
    """A tokenizer that is missing, unreadable or does not belong to the checkpoint."""


class ShapeError(DeepInferError):
    """A tensor or size handed to a public function that does not fit the others."""


class RequestError(DeepInferError):
    """One request that cannot be served; other requests go on."""


class PromptTooLong(RequestError):
    """The prompt does not fit the model or the cache."""


class RecipeError(RequestError):
    """A conversation, or a setting of it, that cannot be rendered.

    Attributes:
        place: where the fault is, as one would write it in Python: `messages[2].tool_calls[0].function.name`.
    """

    def __init__(self, place: str, problem: str) -> None:
        self.place, self._problem = place, problem
        super().__init__(f"{place}: {problem}")

    def within(self, part: str, whole: str) -> "RecipeError":
        """The same fault where `part`, with which the place begins, lies at `whole`."""
        return RecipeError(whole + self.place.removeprefix(part) if self.place.startswith(part) else self.place, self._problem)


class Rejected(RequestError):
    """The request is malformed or asks for something that is not supported."""


class CapacityError(DeepInferError):
    """Too little memory for what was asked; the message names the sizes."""


class StepError(DeepInferError):
    """A step failed on the device."""


class PeerLost(StepError):
    """Another rank did not come to a collective: it died, hangs, or runs something else.

    Attributes:
        rank: who noticed.
        missing: ranks that did not come, as far as is known.
    """

    def __init__(self, message: str, rank: int, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.rank, self.missing = rank, missing


class AgreementError(DeepInferError):
    """Ranks that must agree do not; the message gives what each of them says."""


class GrammarError(StepError):
    """A committed token that its grammar forbids. The engine ends that request with `NothingToDraw`; other requests go on."""


class NothingToDraw(StepError):
    """A request's logits are not finite, or what it forbids leaves no token; the message names it. Other requests go on."""


class RecordingError(DeepInferError):
    """A recording, or the output of another build, that cannot be read or does not fit what it is compared with."""


class EngineClosed(DeepInferError):
    """The engine was used after `close()`."""


class PrefixFileError(DeepInferError):
    """A file of stored prefixes that cannot be written, is damaged, or belongs to another model or setting."""


class MissingExtra(DeepInferError):
    """An optional dependency is needed; the message names the `pip install` to run."""
