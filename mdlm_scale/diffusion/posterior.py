"""Going back in time: a masked token stays masked or becomes the clean token, and a readable one never changes."""

from torch import Tensor


def stay_masked_prob(mask_prob_s: Tensor, mask_prob_t: Tensor) -> Tensor:
    """P(z_s is the mask | z_t is the mask) = (1 - alpha_s) / (1 - alpha_t)."""
    return mask_prob_s / mask_prob_t
