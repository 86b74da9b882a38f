"""RandAugment as the CC3M trainer of TeMo's authors has it; opened by common.Augment."""

import torch
from torchvision.transforms import v2

KEPT = ("Identity", "AutoContrast", "Equalize", "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX",
        "TranslateY", "Rotate")


def randaugment(image, u, operations, magnitude):
    """(..., 3, H, W) uint8 after `operations` random ones of KEPT, each with probability 1/2, from the sample's own
    draws u (DRAWS,); magnitude: of 30."""
    transform = v2.RandAugment(num_ops=1, magnitude=magnitude)
    transform._AUGMENTATION_SPACE = {k: v for k, v in transform._AUGMENTATION_SPACE.items() if k in KEPT}
    with torch.random.fork_rng(devices=[]):
        # of the CPU alone: torch.manual_seed would reseed the GPU as well, which nothing puts back
        torch.default_generator.manual_seed(int(u[12] * 2**24) * 2**24 + int(u[13] * 2**24))
        for _ in range(operations):
            image = transform(image) if torch.rand(()) < 0.5 else image
    return image
