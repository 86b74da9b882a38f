"""AVION's released weights (LaViLa's training of its video ViT) under our names, for init_from (weights.py)."""

from contrastive.engine.processes import UserError

import torch.nn.functional as F

# AVION's names -> ours, replaced in this order; attn.Wqkv, mlp.fc1 and mlp.fc2 are its names with flash attention
VISION = {"class_embedding": "cls_token", "positional_embedding": "pos_embed", "conv1": "patch_embed.proj",
          "ln_pre": "norm_pre", "ln_post": "norm", "transformer.resblocks": "blocks", "ln_": "norm",
          "in_proj_": "qkv.", "Wqkv": "qkv", "out_proj": "proj", "c_fc": "fc1", "c_proj": "fc2"}
TEXT = {"token_embedding": "embeddings.token_embedding",
        "positional_embedding": "embeddings.position_embedding.weight", "ln_final": "final_layer_norm",
        "transformer.resblocks": "encoder.layers", "ln_": "layer_norm", "attn.": "self_attn.", "c_fc": "fc1",
        "c_proj": "fc2"}


def released_weights(model, weights):
    """{our name: tensor} of AVION's state dict.

    AVION's shapes differ: the first layer is a matrix, q, k and v are one tensor, projections are (width, D), and
    `temporal` is interpolated linearly to the frames of the model.
    Raises: UserError if the text encoder is a CLIP without the GELU that AVION trained with.
    """
    own, out = model.state_dict(), {}
    if model.text and model.text.is_clip and model.text.body.config.hidden_act != "gelu":
        raise UserError(f"--init-from: AVION's text tower has GELU, {model.text.name} has not (LAION's CLIPs have it)")
    for name, x in weights.items():
        tower, _, rest = name.partition(".")
        if rest == "temporal_embedding":
            size = len(model.vision.body.temporal), x.shape[1]
            out["vision.body.temporal"] = F.interpolate(x[None, None].float(), size, mode="bilinear")[0, 0]
        elif rest in ("image_projection", "text_projection"):
            out[f"{'vision' if tower == 'visual' else 'text'}.projection.weight"] = x.T
        elif tower == "visual":
            ours = "vision.body.vit." + replaced(rest, VISION)
            out[ours] = x.reshape(own[ours].shape) if ours in own and x.numel() == own[ours].numel() else x
        elif "in_proj_" in rest:
            for k, part in zip("qkv", x.chunk(3)):
                out["text.body." + replaced(rest.replace("in_proj_", f"{k}_proj."), TEXT)] = part
        elif tower == "textual":
            out["text.body." + replaced(rest, TEXT)] = x
    return out


def replaced(name, table):
    """A name with each key of a table replaced."""
    for theirs, ours in table.items():
        name = name.replace(theirs, ours)
    return name
