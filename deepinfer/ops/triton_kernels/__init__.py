"""Triton kernels: they read quantised weights as they are stored and come close to the time the bytes take.

| file | what | plain twin |
|---|---|---|
| `packing.py` | the order in which weights lie in memory, and its inverse; pure PyTorch | `ops/formats.py` |
| `decode.py` | packed words to tensor-core operands, in registers | `ops/formats.py` |
| `quantize.py` | activations to FP8 values in channel order, also after the norm | `ops/quantize.py`, `ops/elementwise.py` |
| `launch.py`, `beside.py` | how kernels follow one another, and how they run side by side | |
| `fp8_linear.py` | `y = x W^T` for FP8 weights, with FP8 or bfloat16 activations | `ops/matmul.py` |
| `routing.py` | which tokens each expert gets, and the sum over a token's experts | `model/plain_forms.py` |
| `fp4_experts.py`, `wide_experts.py` | the routed experts with FP4 weights, for few and for many tokens | `model/plain_forms.py` |
| `expert_outputs.py` | what stands behind the products of both | `ops/elementwise.py`, `ops/quantize.py` |
| `shared_expert.py` | the shared expert beside the routed ones, and the sum of all | `model/moe.py` |
| `hyper_mix.py`, `residual_streams.py` | coefficients of the streams, and what they are for | `model/hyper_connection.py` |
| `norm_rotate_round.py` | what a vector goes through before it is stored or compared | `model/plain_forms.py` |
| `attention.py` | attention over lists that are not gathered | `ops/attend.py` |
| `index_scores.py`, `select.py` | scores of entries, and the choice among them | `ops/index_scores.py`, `ops/select.py` |
| `route.py` | which experts | `model/router.py` |
| `float32_linear.py` | products in float32 | `ops/matmul.py` |
| `block_scaled.py` | linears and experts where tensor cores take codes and scales as stored | the same |

The idea, in three steps.

1. *Operand order.* A tensor core takes its left operand from registers in a fixed pattern: each thread owns a few rows and
   channels. Weights are stored so that a thread's 16-byte loads are what it owns. Load, decode, multiply: nothing is exchanged
   between threads.
2. *Free channel order.* A sum over channels may run in any order as long as both operands agree. Within 128 channels each
   group of threads gets one whole block of 32, so it needs one scale for each row; activations are written in that order.
3. *Scales as exponents.* Scales are powers of two, so they go into the operands: a float16 operand is `code * 2^(scale - ref)`
   with one `ref` for each row, or 32 rows, or token, and `2^ref` is applied once at the end. Nothing is rescaled in the loop.

Products are exact and accumulated in float32, so a result differs from the plain twin by the order of its sums only. A row's
bits do not depend on the batch: everything that decides an order of sums depends on the weight's shape alone. Calls that need not
promise it (`invariant=False`: every mode but `batch_invariant`) have other tiles for many rows, which are faster and sum otherwise.

Importing this package does not import triton; its modules other than `packing` do.
"""
