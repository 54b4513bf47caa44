"""Replays the recorded cases: what a replay returns carries the names and shapes of the recording.

The model is observed from outside, by forward hooks. `tests/data/golden/README.md` says how the recordings were driven.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deepinfer.checkpoint.load import load_model
from deepinfer.model.cache import CacheSizes, EntryPool, ModelCache
from deepinfer.model.draft import Proposal
from deepinfer.model.indexer import Indexer, IndexerOutput
from deepinfer.model.numerics import reference_ops
from deepinfer.model.rows import Rows, pack_rows
from deepinfer.model.transformer import Hidden, Transformer
from deepinfer.ops.matmul import matmul
from tests.tolerances import BITWISE, check_close, difference

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = ("swa_tiny", "smooth_full", "select_full", "bf16_full")
RECORDED_AS = {"float32": "f32", "float32_kv": "f32q", "native": "native"}  # precision -> how the files call it
PRECISIONS = tuple(RECORDED_AS)
DRAFT_LOGIT_STEPS = 8  # draft logits are recorded for the first steps only
RECORDED_SUMS = "6a7275f9182a8be47a1d8c46b2199c7899f3d4a1a4c42b6ebdfa2182b07e7e11"  # see `sums_as_recorded`


@cache
def recorded(case: str, precision: str) -> dict[str, Tensor]:
    """The tensors of one recording. Shared between tests: not to be changed."""
    return load_file(GOLDEN / case / f"golden_{RECORDED_AS[precision]}.safetensors")


@cache
def recorded_facts(case: str, precision: str) -> dict[str, Any]:
    """What `golden.json` says about one recording."""
    facts: dict[str, Any] = json.loads((GOLDEN / case / "golden.json").read_text())["modes"][RECORDED_AS[precision]]
    return facts


def fresh_model(
    case: str, precision: str, *, batch_invariant: bool = False, static_shapes: bool = False, **options: Any
) -> Transformer:
    """A model of its own, for tests that change it or hook it."""
    ops = reference_ops(batch_invariant=batch_invariant, static_shapes=static_shapes)
    return load_model(GOLDEN / case, precision, "cpu", ops=ops, **options)


@cache
def shared_model(case: str, precision: str, batch_invariant: bool = False) -> Transformer:
    """A model that tests share: not to be changed."""
    return fresh_model(case, precision, batch_invariant=batch_invariant)


class Step(NamedTuple):
    """One forward of packed rows and what came of it."""

    rows: Rows
    hidden: Hidden
    logits: Tensor  # [T, V]


class Session:
    """A cache with one place for each of several sequences; runs steps over any of them.

    Args:
        num_tokens: positions that every sequence can reach.
        order: of the block ids; ascending if None. Sequence i takes slot i + 1 and every `num_sequences`-th block.
    """

    def __init__(
        self,
        model: Transformer,
        num_sequences: int,
        num_tokens: int,
        *,
        block_size: int = 4,
        max_backtrack: int = 0,
        order: Sequence[int] | None = None,
    ) -> None:
        self.model, self.block_size = model, block_size
        num_blocks = num_sequences * -(-num_tokens // block_size)
        order = range(num_blocks) if order is None else order
        self.tables = [[1 + block for block in order[i::num_sequences]] for i in range(num_sequences)]
        sizes = CacheSizes(
            num_slots=num_sequences + 1, num_blocks=num_blocks + 1, block_size=block_size, max_backtrack=max_backtrack
        )
        self.cache = model.new_cache(sizes)

    def slots(self, sequences: Sequence[int]) -> list[int]:
        return [1 + sequence for sequence in sequences]

    def rows(self, chunks: Sequence[tuple[Any, int]], sequences: Sequence[int] | None = None) -> Rows:
        """Packed rows for `(token ids, first position)` of the given sequences, of the first ones if None."""
        sequences = range(len(chunks)) if sequences is None else sequences
        return pack_rows(chunks, self.slots(sequences), [self.tables[i] for i in sequences], self.block_size, self.model.device)

    @torch.no_grad()
    def step(self, chunks: Sequence[tuple[Any, int]], sequences: Sequence[int] | None = None) -> Step:
        """Run chunks through the backbone and show their features to the draft blocks."""
        rows = self.rows(chunks, sequences)
        hidden = self.model.forward_rows(rows, self.cache)
        if hidden.main_hidden is not None:
            self.model.observe_draft(hidden.main_hidden, rows, self.cache)
        return Step(rows, hidden, self.model.logits(hidden.final))

    @torch.no_grad()
    def propose(self, token_ids: Tensor, positions: Tensor, sequences: Sequence[int] | None = None) -> Proposal:
        """Drafts behind `token_ids`, which stand one after `positions`."""
        sequences = range(len(token_ids)) if sequences is None else sequences
        return self.model.propose_draft(token_ids, positions, torch.tensor(self.slots(sequences)), self.cache)


def poison(memory: ModelCache) -> None:
    """Fill a cache with what no result may show: NaN, and an id that no tokenizer has."""
    for tensor in memory.tensors():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 10**9)


@contextmanager
def observing(model: Transformer) -> Iterator[dict[str, Tensor]]:
    """A dict that every forward of the backbone fills with its intermediate results, rows first; overwritten by the next."""
    captured: dict[str, Tensor] = {}
    handles = []

    def watch(module: nn.Module | None, keep: Callable[[tuple[Any, ...], Any], dict[str, Tensor]]) -> None:
        if module is not None:
            handles.append(module.register_forward_hook(lambda _, args, output: captured.update(keep(args, output))))

    def watch_layer(index: int, layer: Any) -> None:
        def named(**tensors: Tensor) -> dict[str, Tensor]:
            return {f"layers.{index}.{name}": tensor for name, tensor in tensors.items()}

        watch(layer, lambda args, out: named(pre_mix_in=args[1], out=out[0]))
        watch(layer.attn, lambda _, out: named(attn_out=out[0]))
        watch(layer.ffn, lambda _, out: named(ffn_out=out))
        watch(layer.ffn.gate, lambda _, out: named(router_w=out.weights, router_idx=out.ids))
        watch(layer.engram, lambda _, out: named(engram_out=out))
        watch(layer.engram and layer.engram.hash, lambda _, out: named(engram_hash=out))
        watch(layer.attn.indexer, lambda _, out: named(index_scores=out.scores, index_topk=out.selected))
        if layer.attn.indexer is not None and layer.attn.indexer.is_candidate_source:
            watch(layer.attn.indexer, lambda _, out: named(candidates=out.candidates))

    def keep_embedding(args: tuple[Any, ...], output: Tensor) -> dict[str, Tensor]:
        return {"embed": output}

    watch(model.embed, keep_embedding)
    watch(model.norm, lambda args, out: {"final_hidden": args[0], "final_norm": out})
    for index, layer in enumerate(model.layers):
        watch_layer(index, layer)
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def pool_rows(pool: EntryPool, rows: Rows, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Entries and index keys of complete groups of the first `num_tokens` tokens, `[B, C, ...]`."""
    per_block = rows.block_size // pool.ratio
    ids = torch.arange(num_tokens // pool.ratio)
    address = rows.block_tables[:, ids // per_block] * per_block + ids % per_block
    return pool.entries[address], pool.index_keys[address]


def cache_contents(memory: ModelCache, rows: Rows, num_tokens: int, num_layers: int) -> dict[str, Tensor]:
    """What the cache holds of the sequences of `rows`, under the recording's names."""
    contents = {f"layers.{i}.window_kv": memory.rings[i][rows.slots] for i in range(num_layers)}
    for layer, pool in memory.pools.items():
        contents[f"layers.{layer}.compress_kv"], contents[f"layers.{layer}.index_k"] = pool_rows(pool, rows, num_tokens)
    return contents


def _score_of_choice(scores: Tensor, chosen: Tensor) -> Tensor:
    """Scores of the chosen entries of each row, worst first; equal for two choices that only break ties differently."""
    return scores.masked_fill(~chosen, float("-inf")).sort(dim=-1).values


def chosen_mask(selected: Tensor, width: int) -> Tensor:
    """Entry ids, -1 for none, as a mask over `width` entries."""
    mask = torch.zeros(*selected.shape[:-1], width + 1, dtype=torch.bool, device=selected.device)
    return mask.scatter(-1, selected.long().masked_fill(selected < 0, width), True)[..., :width]


def block_scores(scores: Tensor, block_size: int) -> Tensor:
    """The largest score of each candidate block."""
    padding = -scores.shape[-1] % block_size
    return nn.functional.pad(scores, (0, padding), value=float("-inf")).unflatten(-1, (-1, block_size)).amax(dim=-1)


def is_same_but_for_ties(scores: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
    """Rows whose two choices (masks over the entries) take the same scores, so that they may differ by ties only."""
    return (_score_of_choice(scores, chosen) == _score_of_choice(scores, other)).all(dim=-1)


@contextmanager
def choosing_as_recorded(model: Transformer, recording: dict[str, Tensor]) -> Iterator[Counter[str]]:
    """Index sources break ties as in the recording: rows are matched by position, so sequences must be the recorded ones.

    A choice is replaced only by one with the same scores. Candidates are recorded for the prompt only.
    Yields: how many rows each choice was replaced in.
    """
    handles = []
    replaced: Counter[str] = Counter()

    def recorded_rows(name: str, rows: Rows) -> Tensor | None:
        length = recording["input_ids"].shape[1]
        is_prompt = int(rows.positions.min()) < length
        table = recording.get(f"prefill.{name}" if is_prompt else f"decode.{name}")
        return None if table is None else table[rows.seq_ids, rows.positions - (0 if is_prompt else length)]

    def watch(layer: int, indexer: Indexer) -> None:
        def replace(_: nn.Module, args: tuple[Any, ...], out: IndexerOutput) -> IndexerOutput:
            rows, candidates, width = args[3], out.candidates, out.scores.shape[1]
            selected = recorded_rows(f"layers.{layer}.index_topk", rows)
            assert selected is not None
            selected = nn.functional.pad(selected, (0, out.selected.shape[1]), value=-1)[:, : out.selected.shape[1]].long()
            same = is_same_but_for_ties(out.scores.float(), chosen_mask(out.selected, width), chosen_mask(selected, width))
            selected = torch.where(same[:, None], selected, out.selected)
            replaced[f"layers.{layer}.index_topk"] += int((selected != out.selected).any(dim=1).sum())
            kept = recorded_rows(f"layers.{layer}.candidates", rows) if candidates is not None else None
            if kept is not None:
                kept = nn.functional.pad(kept.bool(), (0, width - kept.shape[1]))
                size = indexer.config.candidate_block_size
                ours, theirs = block_scores(candidates.float(), size) > 0, block_scores(kept.float(), size) > 0
                same = is_same_but_for_ties(block_scores(out.scores.float(), size), ours, theirs)
                kept = torch.where(same[:, None], kept, candidates)
                replaced[f"layers.{layer}.candidates"] += int((kept != candidates).any(dim=1).sum())
                candidates = kept
            return IndexerOutput(selected, candidates, out.scores)

        handles.append(indexer.register_forward_hook(replace))

    for index, layer in enumerate(model.layers):
        if layer.attn.indexer is not None:
            watch(index, layer.attn.indexer)
    try:
        yield replaced
    finally:
        for handle in handles:
            handle.remove()


def _joined_hashes(captured: dict[str, Tensor], layers: Sequence[int]) -> dict[str, Tensor]:
    return {"engram_hash": torch.stack([captured[f"layers.{i}.engram_hash"] for i in layers], dim=1)} if layers else {}


def replay(model: Transformer, recording: dict[str, Tensor], *, ties_as_recorded: bool = False) -> dict[str, Tensor]:
    """Drive a case as it was recorded: the prompt at once, then the recorded tokens one by one, and `short.*` likewise.

    Args:
        ties_as_recorded: where equal index scores leave a choice open, choose what the recording chose.
    """
    ids, fed = recording["input_ids"], recording["decode.input_ids"]
    with choosing_as_recorded(model, recording) if ties_as_recorded else nullcontext():
        observed = _replay_run(model, ids, fed, "decode.")
    if "short.input_ids" in recording:
        # The first 3 tokens at once, the next ones one by one.
        observed |= _replay_run(model, ids[:, :3], recording["short.input_ids"], "short.", with_prefill=False)
    return observed


def _replay_run(model: Transformer, prompt: Tensor, fed: Tensor, prefix: str, *, with_prefill: bool = True) -> dict[str, Tensor]:
    config, (batch, length), steps = model.config, prompt.shape, fed.shape[1]
    session = Session(model, batch, length + steps)
    observed: dict[str, Tensor] = {}
    series: dict[str, list[Tensor]] = {}
    with observing(model) as captured:
        step = session.step([(ids, 0) for ids in prompt])
        if with_prefill:
            result = captured | {"logits": step.logits} | _joined_hashes(captured, config.engram.layer_ids)
            if step.hidden.main_hidden is not None:
                result["main_hidden"] = step.hidden.main_hidden
            observed = {f"prefill.{name}": value.unflatten(0, (batch, length)) for name, value in result.items()}
            contents = cache_contents(session.cache, step.rows, length, config.n_layers)
            observed |= {f"prefill.{name}": value.clone() for name, value in contents.items()}
        for i in range(steps):
            step = session.step([(fed[b, i : i + 1], length + i) for b in range(batch)])
            sampled = step.logits.argmax(dim=-1)
            result = captured | {"logits": step.logits, "next_ids": sampled}
            result |= _joined_hashes(captured, config.engram.layer_ids)
            if step.hidden.main_hidden is not None:
                proposal = session.propose(sampled, step.rows.positions)
                result["dspark.main_hidden"] = step.hidden.main_hidden[:, None]
                result["dspark.ids"] = torch.cat((sampled[:, None], proposal.token_ids), dim=1)
                result["dspark.confidence"] = proposal.confidence
                if i < DRAFT_LOGIT_STEPS:
                    result["dspark.logits"] = proposal.logits
            for name, value in result.items():
                series.setdefault(name, []).append(value)
    # Entry counts grow from step to step: what is listed per entry is filled up on the right.
    for name, values in series.items():
        if name.endswith(("index_topk", "index_scores", "candidates")):
            width, empty = max(v.shape[1] for v in values), EMPTY_PLACE[name.rpartition(".")[2]]
            values = [nn.functional.pad(v, (0, width - v.shape[1]), value=empty) for v in values]
        observed[prefix + name] = torch.stack(values, dim=1)
    return observed


# What stands where a list has no entry.
EMPTY_PLACE = {"index_topk": -1, "index_scores": float("-inf"), "candidates": 0}


def as_recorded(observed: dict[str, Tensor], recording: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was observed, cut or filled up to the recorded widths: entry lists here cover whole cache blocks.

    Places beyond the recorded width must be empty.
    """
    fitted = {}
    for name, value in observed.items():
        kind, width = name.rpartition(".")[2], recording[name].shape[-1] if name in recording else value.shape[-1]
        if kind in EMPTY_PLACE and value.shape[-1] != width:
            # The newest candidate block may mark entries that do not exist yet.
            assert kind == "candidates" or (value[..., width:] == EMPTY_PLACE[kind]).all(), (
                f"{name}: entries beyond the recorded ones"
            )
            value = nn.functional.pad(value, (0, max(0, width - value.shape[-1])), value=EMPTY_PLACE[kind])[..., :width]
        fitted[name] = value
    return fitted


@cache
def sums_as_recorded() -> bool:
    """Whether this machine's products and elementary functions give the bits that the recordings were made with.

    Libraries choose kernels by the processor. Recordings of rounded arithmetic can be met bit for bit only with the same ones.
    """
    draw = torch.Generator().manual_seed(0)
    digest = hashlib.sha256()
    for rows in (1, 2, 6, 12, 25, 47):
        results = []
        for k, n in ((32, 64), (64, 320), (96, 32), (256, 24), (384, 24)):
            x, w = torch.rand(rows, k, generator=draw) - 0.5, torch.rand(n, k, generator=draw) - 0.5
            results += [matmul(x, w), matmul(x.bfloat16(), w.bfloat16())]
        results.append(torch.bmm(torch.rand(rows, 4, 32, generator=draw) - 0.5, torch.rand(rows, 32, 64, generator=draw)))
        x = 8 * torch.rand(rows, 4, 64, generator=draw) - 4
        results += [torch.sigmoid(x), torch.exp(x), nn.functional.silu(x), nn.functional.softplus(x), x.square().mean(-1)]
        results.append(torch.view_as_real(torch.polar(torch.ones_like(x), 10 * x)))
        for result in results:
            digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() == RECORDED_SUMS


@cache
def recorded_unit(group: str) -> dict[str, Tensor]:
    """The fields of one group of `units.safetensors`."""
    fields = {tuple(name.split(".")): value for name, value in load_file(GOLDEN / "units" / "units.safetensors").items()}
    return {field: value for (name, field), value in fields.items() if name == group}


@cache
def published_numbers() -> dict[str, Any]:
    """`numeric.json`: tables, constants and examples of the published model."""
    numbers: dict[str, Any] = json.loads((GOLDEN.parent / "published" / "numeric.json").read_text())
    return numbers


def check_bits(observed: Tensor, expected: Tensor, subject: str) -> None:
    """Fail unless two tensors are equal bit for bit; on a machine with other sums, unless they are as close as the table says."""
    if sums_as_recorded():
        found = difference(subject, observed, expected, BITWISE)
        assert found.is_allowed, str(found)
    else:
        check_close(observed, expected, subject, "other sums")
