"""The compiled path on a GPU: layers through the compiler, our kernels, captured steps, against the plain reading and itself.

`mini` has real acceptance of drafts; the cut of the published widths has real shapes. Both are small enough to compile in a minute.
"""

import gc
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

# Read when the first product runs; without it the libraries refuse deterministic products.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer import EngineConfig, LLMEngine, SamplingParams, load_model
from deepinfer.backends import choose_backend
from deepinfer.bench.bench_model import bench_tokenizer, open_model, slice_config
from deepinfer.bench.steady_decode import SteadyDecode
from deepinfer.checkpoint.locate import locate_checkpoint
from deepinfer.model.cache import CacheSizes
from deepinfer.model.compiled import compilation_count, compile_model
from deepinfer.model.numerics import triton_ops
from deepinfer.model.rows import pack_rows
from deepinfer.model.transformer import Transformer
from tests.golden import CASES, GOLDEN, observing, poison, recorded, shared_model
from tests.layered import PARTS, drive_layers, far_layers
from tests.tolerances import difference, tolerance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    # A compiler warns of many things that are its own.
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]

CUT = "flash_slice:6:16"
BLOCK = 64
MOST_OTHER_CHOICES = 0.02  # share of rows in which near-equal scores of experts or entries change places
MOST_CHOSEN, LEAST_SAME_ROWS = 600, 8
COMPANY = (0, 1, 2, 3, 4, 6, 7, 8, 14, 15, 16)  # so that batches stand at the edges of the buckets and beside them
INVARIANT = EngineConfig(batch_invariant=True, compile=True, device="cuda", max_num_seqs=17, max_model_len=512)


@pytest.fixture(autouse=True)
def _as_in_production() -> Iterator[None]:
    """Compiled code is guarded by these settings: one value for all tests of this file."""
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


@pytest.fixture(scope="module")
def mini() -> Iterator[Transformer]:
    """Batch-invariant kernels, compiled."""
    model, backend = open_model("mini", INVARIANT)
    assert backend.name == "triton"
    assert backend.compiles
    yield model
    del model
    torch.compiler.reset()


@pytest.fixture(scope="module")
def cut() -> Iterator[Transformer]:
    """Published widths, six layers of every kind, 16 experts."""
    model, _ = open_model(CUT, INVARIANT)
    yield model
    del model
    torch.compiler.reset()


def open_engine(model: Transformer, **settings: object) -> LLMEngine:
    name = "mini" if model.config.dim < slice_config(CUT).dim else CUT
    return LLMEngine(model, bench_tokenizer(name, model.config), replace(INVARIANT, **settings))


def random_prompt(source: random.Random, low: int = 1, high: int = 120) -> list[int]:
    return [source.randrange(3, 250) for _ in range(source.randint(low, high))]


class Continued(NamedTuple):
    """A recorded prompt and the recorded tokens behind it, one step each, as a model continues them."""

    logits: Tensor  # [B, P + S, V]
    chosen: list[Tensor]  # [B, P + S, N] entries chosen by each layer that chooses


@torch.inference_mode()
def continued(model: Transformer, case: str) -> Continued:
    recording = recorded(case, "native")
    prompt, fed = recording["input_ids"], recording["decode.input_ids"]
    (batch, length), steps = prompt.shape, fed.shape[1]
    each = -(-(length + steps) // BLOCK)
    tables = [range(1 + i * each, 1 + (i + 1) * each) for i in range(batch)]
    cache = model.new_cache(CacheSizes(num_slots=batch + 1, num_blocks=batch * each + 1, block_size=BLOCK))

    def step(chunks: list[tuple[Tensor, int]]) -> tuple[Tensor, list[Tensor]]:
        rows = pack_rows(chunks, range(1, batch + 1), tables, BLOCK, model.device)
        with observing(model) as captured:
            logits = model.logits(model.forward_rows(rows, cache).final)
        chosen = [value for name, value in captured.items() if name.endswith("index_topk")]
        return logits.unflatten(0, (batch, -1)).cpu(), [F.pad(c, (0, MOST_CHOSEN - c.shape[1]), value=-1).cpu() for c in chosen]

    done = [step([(ids, 0) for ids in prompt])]
    done += [step([(fed[b, i : i + 1], length + i) for b in range(batch)]) for i in range(steps)]
    per_layer = zip(*(chosen for _, chosen in done), strict=True)
    return Continued(
        torch.cat([logits for logits, _ in done], dim=1),
        [torch.cat([chosen.unflatten(0, (batch, -1)) for chosen in layer], dim=1) for layer in per_layer],
    )


def kernels(case: str, compiles: bool = False) -> Transformer:
    model = load_model(GOLDEN / case, "native", "cuda", ops=triton_ops())
    if compiles:
        torch.compiler.reset()
        compile_model(model)
    return model


@pytest.mark.parametrize("case", CASES)
def test_every_layer_of_the_kernels_stays_near_its_recorded_output(case: str) -> None:
    driven = drive_layers(case, kernels(case))
    wrong = [line for part in PARTS for line in far_layers(case, driven, part)]
    assert not wrong, "\n".join(wrong)
    other = torch.stack([~same for same in driven.same_choices.values()]).double().mean()
    assert float(other) <= MOST_OTHER_CHOICES


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_stay_near_the_plain_reading_of_the_recordings(case: str) -> None:
    """Up to the first row that chooses other entries because two scores are nearly equal; what follows it is another text."""
    observed, plain = continued(kernels(case), case), continued(shared_model(case, "native"), case)
    differs = torch.zeros(plain.logits.shape[1], dtype=torch.bool)
    for ours, theirs in zip(observed.chosen, plain.chosen, strict=True):
        differs |= (ours != theirs).any(dim=-1).any(dim=0)
    first = int(differs.nonzero()[0]) if differs.any() else len(differs)
    found = difference(
        "logits", observed.logits[:, :first], plain.logits[:, :first], tolerance("logits", "native, other sums", case)
    )
    print(f"{case}: {first} of {len(differs)} rows with the same entries; {found}")
    assert first > LEAST_SAME_ROWS
    assert found.is_allowed, f"{found}\n{found.allowed.reason}"


@pytest.mark.parametrize("case", ["swa_tiny", "select_full"])
def test_compiled_layers_give_the_bits_of_those_that_are_not(case: str) -> None:
    compiled, written = continued(kernels(case, compiles=True), case), continued(kernels(case), case)
    assert torch.equal(compiled.logits, written.logits)


@pytest.mark.parametrize("name", ["mini", "cut"])
@pytest.mark.parametrize("drafts", [0, 5])
def test_a_captured_step_gives_the_bits_of_one_that_is_not(name: str, drafts: int, request: pytest.FixtureRequest) -> None:
    model, source = request.getfixturevalue(name), random.Random(1)
    prompts = [random_prompt(source) for _ in range(11)]
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)
    found = []
    for cuda_graphs in (False, True):
        with open_engine(model, cuda_graphs=cuda_graphs, num_speculative_tokens=drafts) as engine:
            found.append(
                [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in engine.generate(prompts, params, use_tqdm=False)]
            )
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "batches"), [("mini", 17), ("cut", 6)])
def test_a_request_does_not_notice_its_company(name: str, batches: int, request: pytest.FixtureRequest) -> None:
    """One request among random others: any batch, any cut of the prompts, with drafts and without, to the bit."""
    model, source = request.getfixturevalue(name), random.Random(2)
    needle = random_prompt(source, 90, 90)
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=11, logprobs=3, ignore_eos=True)
    expected = None
    for drafts in range(6):
        # Chunks of other lengths with each number of drafts; a decode step of the largest batch must fit.
        chunk = (2048, 128, 103, 110, 144, 301)[drafts]
        settings = {"num_speculative_tokens": drafts, "max_num_batched_tokens": chunk, "adaptive_verification": drafts % 2 == 1}
        with open_engine(model, **settings) as engine:
            for number in range(batches + (drafts == 0)):
                # The first batch of all is the request alone.
                count = 0 if expected is None else COMPANY[number % len(COMPANY)]
                prompts = [random_prompt(source) for _ in range(count)]
                place = source.randint(0, count)
                prompts.insert(place, needle)
                all_params = [
                    params if i == place else SamplingParams(max_tokens=source.randint(1, 20), temperature=source.choice((0, 1)))
                    for i in range(count + 1)
                ]
                completion = engine.generate(prompts, all_params, use_tqdm=False)[place].outputs[0]
                found = completion.token_ids, completion.logprobs
                expected = expected or found
                assert found == expected, f"{drafts} drafts, chunks of {chunk}, batch {number} with {count} others"
            if name == "mini" and drafts > 1:
                assert engine.stats().accepted_tokens > 0


def test_nothing_is_compiled_after_the_warm_up(mini: Transformer) -> None:
    with open_engine(mini, num_speculative_tokens=3) as engine:
        engine.flush()
        warm = compilation_count()
        assert warm > 0
        source = random.Random(4)
        for count in (1, 2, 5, 17):
            prompts = [random_prompt(source) for _ in range(count)]
            for params in (SamplingParams(max_tokens=6, temperature=0), SamplingParams(max_tokens=6, top_p=0.9, logprobs=2)):
                engine.generate(prompts, params, use_tqdm=False)
        assert compilation_count() == warm


@pytest.mark.parametrize("drafts", [0, 3])
def test_schedule_and_submit_never_wait_for_the_device(mini: Transformer, drafts: int) -> None:
    run = SteadyDecode(mini, 4, 1, 20, num_drafts=drafts)
    run.warm_up()
    run.steps(20, check_sync=True)


def test_memory_returns_after_close(mini: Transformer) -> None:
    def allocated() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    params = SamplingParams(max_tokens=8, temperature=0)

    def serve() -> None:
        with open_engine(mini, num_speculative_tokens=2) as engine:
            engine.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)

    serve()  # what libraries keep for themselves
    before = allocated()
    for _ in range(3):
        serve()
    assert allocated() <= before + 2**20


@pytest.mark.parametrize("name", ["select_full", "mini"])
def test_what_was_never_written_does_not_show(name: str) -> None:
    """Fresh memory holds NaN, and so do the cache and its trash: a kernel that forgets or oversteps a place would show it."""
    folder = locate_checkpoint("mini") if name == "mini" else GOLDEN / name
    backend = choose_backend(replace(INVARIANT, compile=True), torch.device("cuda"))
    model = load_model(folder, "native", "cuda", ops=backend.ops)
    tokens = torch.randint(3, 250, (3, 70), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def logits(with_nan: bool) -> Tensor:
        cache = model.new_cache(CacheSizes(num_slots=4, num_blocks=7, block_size=BLOCK))
        if with_nan:
            poison(cache)
        found = []
        for start, end in ((0, 40), (40, 41), (41, 70)):
            chunks = [(row[start:end], start) for row in tokens]
            rows = pack_rows(chunks, (1, 2, 3), [(1, 2), (3, 4), (5, 6)], BLOCK, "cuda")
            found.append(model.logits(model.forward_rows(rows, cache).final).unflatten(0, (3, -1)))
        return torch.cat(found, dim=1)

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        expected = logits(with_nan=False)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    observed = logits(with_nan=True)
    assert not observed.isnan().any()
    assert torch.equal(observed, expected)
