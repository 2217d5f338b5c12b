"""What moves the weights of a head: Muon for the matrices of a new one, AdamW for all else."""

from __future__ import annotations

from torch.optim import AdamW, Muon, Optimizer

from forerun.train.head import Head
from forerun.train.settings import Settings

BETAS = (0.9, 0.95)


def optimisers(head: Head, settings: Settings) -> list[Optimizer]:
    """Every weight of the head belongs to one of them.

    Muon moves all directions of a matrix alike, which brings a new head further in the same minutes
    (docs/benchmarks.md). A trained head goes on with AdamW: nobody has measured Muon there.
    """
    matrices, vectors = list(head.matrices()), list(head.vectors())
    fused = head.target.device.type == "cuda"
    still = {"params": vectors, "weight_decay": 0.0}
    if settings.continues:
        decayed = {"params": matrices, "weight_decay": settings.weight_decay}
        return [AdamW([decayed, still], lr=settings.peak, betas=BETAS, fused=fused)]
    muon = Muon(
        matrices, lr=settings.peak, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
    )  # steps as long as AdamW's at the same rate
    return [muon, AdamW([still], lr=settings.peak, betas=BETAS, fused=fused)]
