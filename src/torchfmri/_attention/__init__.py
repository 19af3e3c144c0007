"""Attention patterns: read where they are computed, scored per token and head.

`reader` sees every attention that runs while its block is open, and says which layer called it;
`fused` recomputes a pattern that a fused kernel never writes down, `flash` reads what kernels of
flash-attention were handed; `head_scores` reduces patterns to entropy, distance, and the shares of
the first, the previous and the repeated token.
"""

from torchfmri._attention.fused import FusedAttention, masked_logits
from torchfmri._attention.head_scores import HEAD_SCORES, score_heads
from torchfmri._attention.reader import AttentionCall, AttentionReader
