"""Batches of a step, read, corrupted and cut into this rank's micro-batches ahead of time by one thread.

`at(step)` is a function of the step number alone, so the loader has no state to save: a run resumes by asking for
another step. The thread only computes earlier what `at` would compute.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from mdlm_scale.config import BatchConfig, DiffusionConfig
from mdlm_scale.data.order import sample_ids
from mdlm_scale.data.source import Source
from mdlm_scale.diffusion import noise, schedule
from mdlm_scale.diffusion.corrupt import Batch, corrupted
from mdlm_scale.errors import DataError
from mdlm_scale.layout import Layout

TIMEOUT_SECONDS = 600.0


@dataclass
class Loader:
    source: Source
    layout: Layout
    batch: BatchConfig
    diffusion: DiffusionConfig
    seed: int
    mask_id: int
    vocab_size: int
    dropout_sites: int
    prefetch: int = 2
    pin_memory: bool = False
    waited_seconds: float = 0.0  # by the step, for data that was not ready
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "loader"), repr=False)
    _error: Exception | None = field(default=None, repr=False)
    _ahead: dict[int, "Future[list[Batch]]"] = field(default_factory=dict, repr=False)

    def at(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step; the following steps are begun meanwhile."""
        wanted = range(step, step + self.prefetch + 1)
        for k in [k for k in self._ahead if k not in wanted]:  # left over after a jump
            self._ahead.pop(k).cancel()
        for k in wanted:
            if k not in self._ahead:
                self._ahead[k] = self._thread.submit(self._make_ahead, k)
        future = self._ahead.pop(step)
        start = time.monotonic()
        if not wait([future], TIMEOUT_SECONDS).done:
            raise DataError(f"The data of step {step} did not come within {TIMEOUT_SECONDS:.0f} s.")
        self.waited_seconds += time.monotonic() - start
        return future.result()

    def make(self, step: int) -> list[Batch]:
        """The same, computed here and now: noise and sample ids are functions of (seed, step, slot)."""
        num_slots = self.batch.global_batch_size
        shape = schedule.from_config(self.diffusion)
        t_N = noise.times(self.diffusion, self.seed, step, num_slots)
        own = self.layout.slots(num_slots)
        self.source.prepare(self.seed, step, num_slots)
        ids = sample_ids(self.seed, step, own, num_slots, self.source.index)
        x_BL, is_token_BL = self.source.rows(ids)
        batches = []
        for slots in self.layout.micro_slots(num_slots, self.batch.micro_batch_size):
            here = slice(slots.start - own.start, slots.stop - own.start)
            made = corrupted(
                x_BL[here], is_token_BL[here], t_N[slots.start : slots.stop],
                config=self.diffusion, schedule=shape, seed=self.seed, step=step, slots=slots,
                mask_id=self.mask_id, vocab_size=self.vocab_size, dropout_sites=self.dropout_sites,
            )  # fmt: skip
            batches.append(made.pin_memory() if self.pin_memory else made)
        return batches

    def _make_ahead(self, step: int) -> list[Batch]:
        """In the thread: after a failure nothing more is tried, which could take as long to fail."""
        if self._error is not None:
            raise self._error
        try:
            return self.make(step)
        except Exception as error:
            self._error = error
            raise

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


def balance_note(layout: Layout, batch: BatchConfig, diffusion: DiffusionConfig) -> str | None:
    """A sentence if the ranks of a step get noticeably uneven numbers of masked rows."""
    if layout.dp_size == 1:
        return None
    num_parts = batch.global_batch_size // batch.micro_batch_size
    ratio = noise.worst_over_mean(diffusion, schedule.from_config(diffusion), batch.global_batch_size, num_parts)
    if ratio < 1.02:
        return None
    return f"masked work is uneven: the worst micro-batch has {ratio:.2f} times the mean (time_sampling, schedule)"
