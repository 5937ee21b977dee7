"""The probabilities of the masking process: forward kernel, posterior, and the network's side of it (SUBS).

States are the V tokens, one of which is the mask. Going forward in time a readable token turns into the mask and stays
there; so going back, a masked token stays masked or becomes the clean token, and a readable one never changes.
alpha_s and alpha_t are P(readable) at s < t, (B,); distributions are over the last dimension, (B, L, V).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def forward_probs(z_s_BL: Tensor, alpha_s: Tensor, alpha_t: Tensor, *, vocab_size: int, mask_id: int) -> Tensor:
    """q(z_t | z_s): stay with probability alpha_t / alpha_s, else become the mask (MDLM, section 3.1)."""
    stay_B11 = (alpha_t / alpha_s)[:, None, None]
    mask_V = F.one_hot(torch.tensor(mask_id, device=z_s_BL.device), vocab_size).to(alpha_t.dtype)
    return stay_B11 * F.one_hot(z_s_BL, vocab_size).to(alpha_t.dtype) + (1 - stay_B11) * mask_V


def stay_masked_prob(mask_prob_s: Tensor, mask_prob_t: Tensor) -> Tensor:
    """P(z_s is the mask | z_t is the mask) = (1 - alpha_s) / (1 - alpha_t)."""
    return mask_prob_s / mask_prob_t


def posterior_probs(z_t_BL: Tensor, x_BLV: Tensor, mask_prob_s: Tensor, mask_prob_t: Tensor, *, mask_id: int) -> Tensor:
    """q(z_s | z_t, x), MDLM equation 6; `x_BLV` is the one-hot token or, for p(z_s | z_t), the network's guess."""
    stay_B11 = stay_masked_prob(mask_prob_s, mask_prob_t)[:, None, None]
    vocab_size = x_BLV.shape[-1]
    mask_V = F.one_hot(torch.tensor(mask_id, device=z_t_BL.device), vocab_size).to(x_BLV.dtype)
    from_mask_BLV = stay_B11 * mask_V + (1 - stay_B11) * x_BLV
    return torch.where((z_t_BL == mask_id)[..., None], from_mask_BLV, F.one_hot(z_t_BL, vocab_size).to(x_BLV.dtype))


def subs_log_probs(logits_BLV: Tensor, z_BL: Tensor, *, mask_id: int) -> Tensor:
    """The network's log p(x | z): the mask is no answer, and a readable token is its own (MDLM, section 3.2.3)."""
    is_mask_V = F.one_hot(torch.tensor(mask_id, device=z_BL.device), logits_BLV.shape[-1]).bool()
    answer_BLV = torch.log_softmax(logits_BLV.masked_fill(is_mask_V, -torch.inf), dim=-1)
    readable_BLV = torch.where(F.one_hot(z_BL, logits_BLV.shape[-1]).bool(), 0.0, -torch.inf).to(answer_BLV.dtype)
    return torch.where((z_BL == mask_id)[..., None], answer_BLV, readable_BLV)
