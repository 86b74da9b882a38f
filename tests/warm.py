"""What the server of tests/launch.py does once for all its processes: late imports, and the drawings of emoji."""

import accelerate.utils  # noqa: F401
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

torch.set_num_threads(1)

from contrastive.data import emoji

emoji.drawings()
