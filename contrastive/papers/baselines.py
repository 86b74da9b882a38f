"""Losses of other papers that the five papers compare with; scripts call them by name (--loss).

    TS        Kukleva et al. 2023: a temperature that follows the step     ts_temperature
    DySTReSS  Manna et al. 2025: InfoNCE, a temperature for each pair      dystress_temperature
    CWCL      Srinivasa et al. 2023: texts count by how alike images are   cwcl_loss
    VSE++     Faghri et al. 2018: triplets with the hardest negatives      hardest_negative_loss
    focal     Lin et al. 2017: a small weight for an easy pair             focal_weights
    SPL       Kumar et al. 2010: the easy pairs first                      spl_weights
    L2RW      Ren et al. 2018: weights from the gradient of meta-data      l2rw_weights

I, T: image and text (B, D), embeddings of this process; s_ij: their cosines. As in every script, a
loss gathers by itself and is the mean over the anchors of this process.
"""

import math

from contrastive.core.loss_inputs import fp32, per_anchor
from contrastive.core.metrics import normalize
from contrastive.core.processes import gather, positive_index
from contrastive.core.row_blocks import row_blocks

import torch
import torch.nn.functional as F


def ts_temperature(progress, tau_min=0.01, tau_max=0.05, periods=5):
    """TS: a cosine between tau_max and tau_min, `periods` times in a run; progress is 0..1."""
    return tau_min + (tau_max - tau_min) * (1 + math.cos(2 * math.pi * periods * progress)) / 2


def dystress_temperature(sim, tau_min=0.01, tau_max=0.04, shifted=False, detach=False, *,
                         highest_from=0.4, width=0.7):
    """DySTReSS: tau_min + (tau_max - tau_min) (1 + cos(pi (1 + s_ij))) / 2.

    Args:
        sim: cosines, any shape.
        tau_min, tau_max: temperatures at s = 0 and at s = -1 and 1.
        shifted: the phase is pi (s - highest_from) / width below s = highest_from and 0 above:
            tau_max for s >= 0.4, falling to tau_min at s = -0.3 and rising again to tau_max at -1.
        detach: stop the gradient through the temperature.
        highest_from, width: as there; 0.4 and 0.7 are those of TeMo's code.
    Returns: temperatures of sim's shape.
    """
    if detach:
        sim = sim.detach()
    if shifted:
        phase = math.pi * (sim - highest_from).clamp(max=0) / width
    else:
        phase = math.pi * (1 + sim)
    return tau_min + (tau_max - tau_min) * (1 + torch.cos(phase)) / 2


# ------------------------------------------------------- CWCL -------------------------------------
@row_blocks
def weighted_cross_entropy(image, tau, *, candidates, images):
    """L_I2T of each image: (b, D), tau, texts (N, D), images (N, D) -> (b,)."""
    weight = (1 + image.detach() @ images.T) / 2                           # (b, N) no gradient
    log_p = F.log_softmax(image @ candidates.T / tau, dim=1)               # (b, N)
    return -(weight * log_p).sum(1) / weight.sum(1)                        # (b,)


@row_blocks
def info_nce_per_anchor(anchor, target, tau, *, candidates):
    """InfoNCE of each anchor: (b, D), (b,), tau, (N, D) -> (b,)."""
    return F.cross_entropy(anchor @ candidates.T / tau, target, reduction="none")


@fp32
def cwcl_loss(image, text, tau):
    """CWCL, the mean of L_I2T and L_T2I.

    L_I2T = -1/B sum_i sum_j w_ij log softmax_j(s_ij / tau) / sum_j w_ij,  L_T2I is InfoNCE,
    w_ij = (1 + <I_i, I_j>) / 2. There is no public code: that w has no gradient is our choice.

    Args:
        image, text: (B, D) embeddings of this process.
        tau: temperature > 0: a number, () or (B,).
    Returns: (), float32.
    """
    image, text = normalize(image), normalize(text)                        # (B, D)
    images, texts = gather(image), gather(text)                            # (N, D)
    tau = per_anchor(tau, image)                                           # () or (B, 1)
    target = positive_index(text, image)                                   # (B,)
    image_to_text = weighted_cross_entropy(image, tau, candidates=texts, images=images.detach())
    text_to_image = info_nce_per_anchor(text, target, tau, candidates=images)
    return (image_to_text.mean() + text_to_image.mean()) / 2


# ------------------------------------------------------- VSE++ ------------------------------------
def triplet_loss(anchor, candidates, target, margin):
    """Mean triplet loss of anchors with their hardest negatives, in one direction.

    Args:
        anchor, candidates: (B, D), (N, D).
        target: (B,) column of each anchor's own candidate.
        margin: a number, () or (B, 1).
    Returns: ()
    """
    sim = anchor @ candidates.T                                            # (B, N)
    target_column = target[:, None]                                        # (B, 1)
    negatives = sim.scatter(1, target_column, -math.inf)                   # (B, N)
    hardest = negatives.amax(dim=1, keepdim=True)                          # (B, 1)
    return (margin - sim.gather(1, target_column) + hardest).relu().mean()


@fp32
def hardest_negative_loss(text, video, margin=0.2, *, terms=None):
    """Triplets with the hardest negative of the global batch: the sum of both directions.

    SSB trains with it, too; NCL replaces it.

    Args:
        text, video: (B, D) embeddings of this process; row i of both is a positive pair.
        margin: >= 0, in units of the cosine: a number, () or (B,) for each anchor.
        terms: a dict, which receives "L_t2v" and "L_v2t", means over the anchors.
    Returns: (), float32. With equal cosines it is 2 margin.
    """
    text, video = normalize(text), normalize(video)                        # (B, D)
    all_texts, all_videos = gather(text), gather(video)                    # (N, D)
    margin = per_anchor(margin, text, "margin", positive=False)            # () or (B, 1)
    target = positive_index(text, video)                                   # (B,)
    t2v = triplet_loss(text, all_videos, target, margin)
    v2t = triplet_loss(video, all_texts, target, margin)
    if terms is not None:
        terms.update({"L_t2v": t2v, "L_v2t": v2t})
    return t2v + v2t


# ------------------------------------------------------- weights of pairs (MAMA, Table 6) ---------
def focal_weights(losses, gamma=2.0):
    """Focal loss: (1 - p_i)^gamma, (B,) -> (B,).

    p_i = exp(-L_i / 2) is the geometric mean of the pair's probability in both directions.
    """
    return (-torch.expm1(-losses / 2)).clamp(min=0) ** gamma


def spl_weights(losses, progress, start=0.5):
    """Self-paced learning: 1 for the easiest pairs of the global batch, else 0: (B,) -> (B,).

    Args:
        progress: of training, 0..1.
        start: fraction of the batch, 0..1, that has weight 1 at first, at least one pair; it grows
            to 1.
    """
    fraction = start + (1 - start) * progress
    sorted_losses = gather(losses).sort().values                           # (N,)
    num_easiest = max(1, round(fraction * len(sorted_losses)))
    return (losses <= sorted_losses[num_easiest - 1]).to(losses)           # (B,)


def l2rw_weights(gain):
    """L2RW: in proportion to how far a step on each pair lowers the meta loss: (B,) -> (B,).

    Negative gains are clipped to 0; weights are normalised to mean 1 over the global batch (all are
    0 where no step helps).

    Args: gain: (B,) <grad L^meta, grad L_j> at the present parameters.
    """
    gain = gain.clamp(min=0)                                               # (B,)
    all_gains = gather(gain)                                               # (N,)
    total = all_gains.sum()                                                # ()
    # an `if` would wait for the GPU
    return torch.where(total > 0, len(all_gains) * gain / total, gain)     # (B,)
