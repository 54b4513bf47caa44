"""Structured output in the running loop: the text of the lone plain run, whatever is drafted, preempted or late beside it."""

import json
import re
from collections.abc import Callable
from dataclasses import replace

import jsonschema
import pytest

from deepinfer.dims import Tensor
from deepinfer.runtime import loop as loop_module
from deepinfer.runtime.device import InlineDevice
from deepinfer.runtime.fuzz_device import FuzzDevice
from deepinfer.runtime.grammar_masks import build_masks, unpack
from deepinfer.runtime.plan import SchedulerOutputs
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.step_sampler import StepSampler
from deepinfer.runtime.step_state import WorkerStepState
from deepinfer.runtime.worker import Worker
from deepinfer.sampling_params import SamplingParams
from deepinfer.structured.grammar import GrammarState, Mask
from tests.runtime.foresight import tokens_ahead
from tests.runtime.harness import Harness, make_request, reference_outcome, tiny_tokenizer

K = 5
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}, "s": {"type": "string", "minLength": 4, "maxLength": 9}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
THINK_END = (66, 67)


def structured(seed: int, temperature: float = 1.0, max_tokens: int = 30, **form: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, structured_outputs=form, logprobs=0)


# Every seed once: it names the request to the drafts below.
REQUESTS = [
    (tuple(3 + (11 * i + 3 * seed) % 310 for i in range(length)), params)
    for seed, (length, params) in enumerate(
        [
            (5, structured(0, json=SCHEMA, disable_any_whitespace=True)),
            (13, structured(1, regex="([abc]d?){8,12}")),
            (9, SamplingParams(max_tokens=12, temperature=1.0, seed=2, logprobs=0)),
            (22, structured(3, choice=["a rather long answer", "a rather short one", "no"])),
            (2, structured(4, temperature=0, regex="[ab]{3}(cd|ef)?gh")),
            (7, structured(5, grammar='start: "(" start ")" | "[" start "]" | "xyz"')),
            (11, replace(structured(6, regex="[de]{4,9}", reasoning_end=THINK_END), logit_bias={i: 12.0 for i in THINK_END})),
        ]
    )
]


def lone_runs() -> dict[int, list[int]]:
    """Prompt and output of each request alone, by its seed."""
    return {params.seed or 0: [*prompt, *reference_outcome(prompt, params).token_ids] for prompt, params in REQUESTS}


def run(seed: int, depth: int, k: int, *, most_steps: int = 600) -> tuple[list[str], Harness]:
    """What goes wrong when the requests share a tight pool, with forced preemptions on top."""
    harness = Harness(
        FuzzDevice(seed, eagerness=0.4), depth=depth, num_blocks=30, budget=16, max_num_seqs=4, num_speculative_tokens=k
    )
    found = []
    try:
        for index, (prompt, params) in enumerate(REQUESTS):
            harness.add(make_request(str(index), prompt, params))
        for count in range(most_steps):
            if not harness.step():
                break
            if count % 3 == 2 and harness.scheduler.running:
                harness.scheduler._preempt(harness.scheduler.running[-1])
        else:
            found.append("did not finish")
    except Exception as error:
        return [f"{type(error).__name__}: {error}"], harness
    for sequence, (prompt, params) in zip(harness.sequences, REQUESTS, strict=True):
        if harness.outcome(sequence) != reference_outcome(prompt, params):
            found.append(f"request {sequence.seq_id} differs")
    return found, harness


def check_forms(outputs: list[list[int]]) -> None:
    """Raise unless the output of every request has the form that was asked for."""
    texts = [tiny_tokenizer().decode(ids) for ids in outputs]
    jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert re.fullmatch("([abc]d?){8,12}", texts[1])
    assert texts[3] in ("a rather long answer", "a rather short one", "no")
    assert re.fullmatch("[ab]{3}(cd|ef)?gh", texts[4])
    assert re.fullmatch(r"[(\[]*xyz[)\]]*", texts[5])
    ids = outputs[6]
    answer = next(i for i in range(2, len(ids)) if tuple(ids[i - 2 : i]) == THINK_END)
    assert re.fullmatch("[de]{4,9}", tiny_tokenizer().decode(ids[answer:]))


def test_the_lone_runs_have_the_forms() -> None:
    outcomes = [reference_outcome(prompt, params) for prompt, params in REQUESTS]
    check_forms([outcome.token_ids for outcome in outcomes])
    ends = [(outcome.finish_reason, outcome.stop_reason) for outcome in outcomes]
    assert ends == [("length", None) if params.form is None else ("stop", None) for _, params in REQUESTS]


def test_rejection_sampling_keeps_to_the_form_too() -> None:
    harness = Harness(FuzzDevice(2), depth=1, num_blocks=60, num_speculative_tokens=3, verification="rejection")
    for index, (prompt, params) in enumerate(REQUESTS):
        harness.add(make_request(str(index), prompt, params))
    harness.run()
    check_forms([sequence.output_token_ids for sequence in harness.sequences])


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("depth", [0, 1])
def test_every_loop_gives_the_lone_text(depth: int, k: int) -> None:
    found, harness = run(depth, depth, k)
    assert found == []
    assert harness.scheduler.counters.preemptions > 3


@pytest.mark.parametrize("depth", [0, 1])
def test_accepted_runs_keep_to_the_form(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepSampler, "propose", tokens_ahead(lone_runs()))
    found, harness = run(7, depth, K, most_steps=50)
    assert found == []
    counters = harness.scheduler.counters
    assert counters.accepted > 40
    assert counters.drafted - counters.accepted > 10
    assert counters.preemptions > 3


def test_a_preemption_in_the_middle_of_a_string_changes_nothing() -> None:
    prompt, params = REQUESTS[0]
    for after in range(2, 14, 3):
        harness = Harness(FuzzDevice(after), depth=1, num_blocks=40)
        sequence = harness.add(make_request("0", prompt, params))
        while sequence.num_output_tokens < after:
            harness.step()
        harness.scheduler._preempt(sequence)
        harness.run()
        assert harness.outcome(sequence) == reference_outcome(prompt, params)
        assert sequence.num_preemptions == 1


def test_a_text_ends_as_soon_as_nothing_can_follow_it_without_an_end_token() -> None:
    params = structured(0, choice=["yes"], max_tokens=3)
    outcome = reference_outcome((5, 6), params)
    assert tiny_tokenizer().decode(outcome.token_ids) == "yes"
    assert (outcome.finish_reason, outcome.stop_reason) == ("stop", None)


def test_rows_of_sequences_with_different_numbers_of_drafts_get_their_own_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks as built, against each sequence's own state: `n_drafts` of a step differ where a sequence nears its limit."""
    monkeypatch.setattr(StepSampler, "propose", tokens_ahead(lone_runs()))
    shapes = set()

    def checked(plan: SchedulerOutputs, sequences: list[Sequence], drafts: list[list[int]], vocab_size: int) -> Tensor | None:
        masks = build_masks(plan, sequences, drafts, vocab_size)
        rows = iter([] if masks is None else unpack(masks.flatten(0, 1), vocab_size).view(*masks.shape[:2], -1).numpy())
        for seq, sequence in zip(plan.sequences, sequences, strict=True):
            if masks is None or not seq.is_sampling:
                continue
            own = next(rows)
            if sequence.grammar is None or sequence.epoch != seq.epoch:
                assert own.all()
            else:
                fed = drafts[seq.remap][: seq.n_drafts] if seq.n_drafts else []
                assert (own[: 1 + seq.n_drafts] == sequence.grammar.masks(fed)).all()
        shapes.add(tuple(seq.n_drafts for seq in plan.sequences if seq.request.grammar is not None))
        return masks

    monkeypatch.setattr(loop_module, "build_masks", checked)
    found, _ = run(3, 1, K)
    assert found == []
    assert any(len(set(shape)) > 1 and len(shape) > 2 for shape in shapes), shapes


def no_advance_on_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarState, "advance", lambda self, token_ids: None)


def no_mask_behind_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    write = GrammarState.write_masks

    def only_first(self: GrammarState, rows: Mask, draft_ids: list[int]) -> None:
        write(self, rows[:1], ())
        rows[1:] = 0xFF

    monkeypatch.setattr(GrammarState, "write_masks", only_first)


def drafts_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts found by the place in this step instead of the one before."""
    monkeypatch.setattr(Worker, "drafts", lambda self, state: (rows := state.box.drafts.tolist())[1:] + rows[:1])


def drafts_read_before_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(self: Worker, state: WorkerStepState) -> None:
        state.box.drafts_copied = state.box.copied

    monkeypatch.setattr(Worker, "_submit_drafts_copy", early)
    monkeypatch.setattr(Worker, "drafts", lambda self, state: state.outputs.drafts.tolist())


def masks_from_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of the step before, as if they were built when the forward was submitted."""
    write = GrammarState.write_masks
    last: dict[int, Mask] = {}

    def late(self: GrammarState, rows: Mask, draft_ids: list[int]) -> None:
        write(self, rows, draft_ids)
        newest = rows[0].copy()
        rows[0] = last.get(id(self), newest)
        last[id(self)] = newest

    monkeypatch.setattr(GrammarState, "write_masks", late)


def marker_not_found_within_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    write = GrammarState.write_masks

    def blind(self: GrammarState, rows: Mask, draft_ids: list[int]) -> None:
        write(self, rows, draft_ids)
        if self.is_reasoning:
            rows[1:] = self.grammar.all_but_eos

    monkeypatch.setattr(GrammarState, "write_masks", blind)


@pytest.mark.parametrize(
    "mutation",
    [
        no_advance_on_commit,
        no_mask_behind_drafts,
        drafts_moved,
        drafts_read_before_their_copy,
        masks_from_before_the_commit,
        marker_not_found_within_a_run,
    ],
    ids=lambda m: m.__name__,
)
def test_taking_a_mechanism_out_is_noticed(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepSampler, "propose", tokens_ahead(lone_runs()))  # the lone runs are made before the mutation
    mutation(monkeypatch)
    assert any(run(seed, 1, K, most_steps=50)[0] for seed in range(3)), "nothing failed without it"


def test_every_completion_of_a_request_keeps_to_the_form() -> None:
    params = replace(structured(9, max_tokens=14, regex="(ab|[abc]d?){6,9}"), n=3)
    harness = Harness(InlineDevice(), depth=0, num_blocks=60)
    request = make_request("0", (13, 20), params)
    sequences = [harness.open(request, index) for index in range(params.n)]
    harness.scheduler.add(sequences[0], sequences[1:])
    harness.run()
    for sequence in sequences:
        alone = reference_outcome((13, 20), replace(params, n=1, seed=9 + sequence.index))
        assert sequence.output_token_ids == alone.token_ids
