"""What was asked: immutable, without any running state."""

from dataclasses import dataclass

from deepinfer.sampling_params import SamplingParams
from deepinfer.structured.grammar import Grammar, GrammarState


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt with its parameters, validated.

    Attributes:
        max_new_tokens: `params.max_tokens`, cut to what the model's length leaves.
        seed: the request's own seed, or the one drawn for it.
        stop_token_ids: ids that end the text: end-of-sequence (unless ignored) and the request's own.
        bad_words: token sequences that the output shall not hold.
        grammar: what `params.structured_outputs` ask for, compiled.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int
    seed: int
    eos_token_id: int
    stop_token_ids: frozenset[int]
    arrival_s: float
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    def start_grammar(self) -> GrammarState | None:
        """The state of a new completion in the request's grammar, if it has one."""
        form = self.params.form
        return None if self.grammar is None or form is None else self.grammar.start(form.reasoning_end)
