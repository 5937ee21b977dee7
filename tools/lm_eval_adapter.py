"""lm-evaluation-harness over a folder that tools/convert_ckpt.py exported.

    python tools/lm_eval_adapter.py run --model mdlm_scale --model_args pretrained=exported,draws=64 --tasks arc_easy

The harness asks for log P(continuation | context). A masked diffusion model bounds it: of the C tokens of the
continuation, k are masked, k uniform on 1 .. C, and their log probabilities count C / k, averaged over `draws` (one is
exact for a single token). Numbers of masked tokens are stratified over the draws. A text begins with BOS, and is cut at
its left to the length of training rows. Models with time conditioning are refused: k tells no time.
Needs lm_eval, torch and transformers, not mdlm_scale.
"""

from collections.abc import Sequence

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoTokenizer


@register_model("mdlm_scale")
class MaskedDiffusion(LM):
    def __init__(
        self,
        pretrained: str,
        draws: int = 32,
        batch_size: int | str | None = 16,
        seed: int = 0,
        sampler: str = "first_hitting",
        num_steps: int = 128,
        device: str | None = None,
        max_batch_size: int | None = None,  # the harness gives it; batches have a fixed size here
    ) -> None:
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(pretrained, trust_remote_code=True)
        model = AutoModelForMaskedLM.from_pretrained(pretrained, trust_remote_code=True)
        if model.config.time_conditioning:
            raise ValueError(f"{pretrained} has time conditioning: masks by count have no time to tell it.")
        # the harness names a GPU also where there is none
        self.model = model.to((device or "cuda") if torch.cuda.is_available() else "cpu").eval()
        self.draws, self.seed, self.sampler, self.num_steps = int(draws), int(seed), sampler, int(num_steps)
        self.batch = int(batch_size) if str(batch_size).isdecimal() else 16
        self.mask_id, self.length = model.config.mask_token_id, model.config.model_length

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        found = []
        for request in requests:
            context, continuation = request.args
            before, answer = [self._bos, *self._ids(context)], self._ids(continuation)
            found.append((self._log_prob(before, answer), self._is_greedy(before, answer)))
        return found

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Each token once, in windows of a row."""
        found = []
        for request in requests:
            ids, room = self._ids(request.args[0]), self.length - 1
            windows = [ids[first : first + room] for first in range(0, len(ids), room)]
            found.append(sum(self._log_prob([self._bos], window) for window in windows))
        return found

    def generate_until(self, requests: list[Instance]) -> list[str]:
        found = []
        for request in requests:
            context, options = request.args
            room = min(int(options.get("max_gen_toks", 256)), self.length - 2)
            prompt = [self._bos, *self._ids(context)][-(self.length - room) :]
            ids = self.model.generate(
                torch.tensor([prompt]), length=len(prompt) + room, sampler=self.sampler, num_steps=self.num_steps,
                seed=self.seed,
            )  # fmt: skip
            text = self.tokenizer.decode(ids[0, len(prompt) :])
            until = options.get("until") or []
            for stop in [until] if isinstance(until, str) else until:
                text = text.split(stop)[0] if stop else text
            found.append(text)
        return found

    @property
    def _bos(self) -> int:
        return self.model.config.bos_token_id

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _row(self, before: Sequence[int], answer: Sequence[int]) -> tuple[Tensor, int]:
        """Both as one row that fits, and where the answer begins."""
        answer = list(answer)[: self.length - 1]
        before = list(before)[-(self.length - len(answer)) :]
        return torch.tensor([*before, *answer]), len(before)

    @torch.inference_mode()
    def _log_prob(self, before: Sequence[int], answer: Sequence[int]) -> float:
        """Minus the bound, in nats."""
        if not answer:
            return 0.0
        row_L, start = self._row(before, answer)
        count = len(row_L) - start
        draws = 1 if count == 1 else self.draws
        generator = torch.Generator().manual_seed(self.seed)
        total = 0.0
        for first in range(0, draws, self.batch):
            draw_B = torch.arange(first, min(first + self.batch, draws))
            u_B = (draw_B + torch.rand(len(draw_B), generator=generator, dtype=torch.float64)) / draws
            k_B = 1 + (u_B * count).long()
            rank_BC = torch.rand(len(draw_B), count, generator=generator).argsort(1).argsort(1)
            is_masked_BC = rank_BC < k_B[:, None]
            z_BL = row_L.repeat(len(draw_B), 1)
            z_BL[:, start:][is_masked_BC] = self.mask_id
            log_probs_BCV = self._log_probs(z_BL)[:, start:]
            log_prob_BC = log_probs_BCV.gather(-1, row_L[start:].expand(len(draw_B), -1)[..., None])[..., 0]
            total += float((log_prob_BC * is_masked_BC * (count / k_B)[:, None]).sum())
        return total / draws

    @torch.inference_mode()
    def _is_greedy(self, before: Sequence[int], answer: Sequence[int]) -> bool:
        """Whether the likeliest token, from left to right with the rest masked, is the answer's each time."""
        row_L, start = self._row(before, answer)
        for at in range(start, len(row_L)):
            z_BL = torch.cat([row_L[:at], torch.full((len(row_L) - at,), self.mask_id)])[None]
            if int(self._log_probs(z_BL)[0, at].argmax()) != int(row_L[at]):
                return False
        return True

    def _log_probs(self, z_BL: Tensor) -> Tensor:
        """Without the mask, which is no answer, float64."""
        logits_BLV = self.model(input_ids=z_BL.to(self.model.device)).logits.double().cpu()
        logits_BLV[..., self.mask_id] = -torch.inf
        return logits_BLV.log_softmax(-1)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
