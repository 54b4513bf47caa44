"""The letters that shape annotations and einops patterns use, everywhere in the package.

| letter | meaning | letter | meaning |
|---|---|---|---|
| `T` | query rows of a step, all sequences packed | `M` | residual streams (`hc_mult`) |
| `B` | sequences in the step | `E` / `K` | experts / experts per token |
| `S` | key positions of one list | `F` | expert hidden width |
| `C` | compressed entries | `Hi` / `Di` | indexer heads / width |
| `W` | sliding window | `N` | selected entries per query |
| `D` | model width | `G` | output groups |
| `H` | query heads | `Rq` / `Ro` | query / output low rank |
| `Dh` / `Dr` | head width / its rotary part | `Q` | draft block length |
| `V` | vocabulary | `Rm` | Markov head rank |
| `Ng` / `He` / `De` | n-gram order / hash heads / table row width | `Bs` | tokens per cache block |

A one-dimensional annotation starts with a space (`" T"`).
"""

from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Shaped", "Tensor", "UInt8"]
