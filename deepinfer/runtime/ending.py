"""What a new token means for its sequence: whether it ends, and why; and what a step showed of its rows. No torch."""

from deepinfer.outputs import FinishReason
from deepinfer.runtime.plan import Observed
from deepinfer.runtime.sequence import Sequence


def observe(sequence: Sequence, observed: Observed) -> None:
    """Keep what a step showed of the rows from `confirmed` on, but for those that were seen before a preemption."""
    sequence.prompt_scores += observed.prompt_scores
    end = sequence.confirmed + observed.num_rows
    if end > sequence.num_observed:
        sequence.observed.append(observed.behind(sequence.num_observed - sequence.confirmed))
        sequence.num_observed = end


def finish_reason(sequence: Sequence, token: int) -> FinishReason | None:
    """Whether the newest token ends its sequence: a stop token, a stop string, its grammar, the length, in this order.

    Sets `stop_reason` and moves the grammar.
    """
    request, params, strings = sequence.request, sequence.request.params, sequence.stop_strings
    if sequence.grammar is not None:
        sequence.grammar.advance((token,))
    may_stop = sequence.num_output_tokens > params.first_free_stop
    is_stop = may_stop and token in request.stop_token_ids
    found = None
    # The text of a stop token counts only where it is shown.
    if strings is not None and (not is_stop or params.include_stop_str_in_output):
        found = strings.push(token, may_stop=may_stop and not is_stop)
    if is_stop:
        sequence.stop_reason = None if token == request.eos_token_id else token
        return "stop"
    if found is not None:
        sequence.stop_reason = found
        return "stop"
    if sequence.grammar is not None and sequence.grammar.is_complete:
        return "stop"
    return "length" if sequence.num_output_tokens >= request.max_new_tokens else None
