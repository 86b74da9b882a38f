"""Moving emoji: a renderer animates the drawings of emoji.py, for video methods without videos.
Emoji scenes: single images of them, for methods without captions.

Pairs of verb and noun follow Zipf's law (weight 1 / rank each). val and test hold new pairs of
verbs and nouns that training shows in other pairs. Three captions of a clip state its noun, verb
and colour in different words.
"""

import dataclasses
import functools
import re
from typing import NamedTuple

from contrastive.core.processes import UserError
from contrastive.data.emoji import digest, list_drawings
from contrastive.data.registry import SPLITS
from contrastive.data.sound import RATE
from contrastive.data.table import Data, make_table, with_note
from contrastive.data.views import luma, shift_hue, uniforms

import numpy as np
import torch
import torch.nn.functional as F

DEFAULT_FRAMES = 4
DEFAULT_SIDE = 32  # pixels
SCENE_CLASSES = 60  # nouns of emoji-scenes
SCENES_AT_ONCE = 512  # scenes that are rendered together
CANVAS_NUMBERS = 2**20  # numbers of the clips that are rendered together: 4 MiB
# Seeds of the random numbers.
SCENE_SEED = [7, 1]
QUESTION_SEED = [7, 3]
CLIP_SEED = 7
EMOJI_SCENES_SEED = 8

MAX_REGIONS = 5  # boxes of a frame: around the drawing, and the quarters of the picture
COLOURS = {
    "white": (255, 255, 255),
    "grey": (150, 150, 150),
    "yellow": (250, 225, 120),
    "pink": (250, 190, 205),
    "blue": (150, 195, 245),
    "green": (165, 220, 165)}
# Drawings. With 24 verbs they make 2,880 pairs, an eighth of them for val and an eighth for test.
NOUNS = 120
TONE_SECONDS = 0.64  # length of the verb's tone, and then of the noun's
TONES = (200.0, 3200.0)  # Hz, the lowest and the highest
NOUN_CLASSES = re.compile(
    "animal|food|plant|transport|household|clothing|tool|music|sport|game|phone|computer|light|"
    "office|sky|place")
# Each template states noun, verb and colour, in its own words and order.
TEMPLATES = (
    "the {noun} {verb} on a {colour} background",
    "against a {colour} background {a} {noun} {verb}",
    "{a} {noun} that {verb}, with {colour} all around",
    "on {colour} ground one {noun} {verb}",
    "a {colour} scene in which the {noun} {verb}",
    "one {noun} {verb}, the rest is {colour}")
QUESTIONS = {
    "noun": "what is in the picture?",
    "verb": "what does it do?",
    "colour": "which colour is the background?"}


# ---- motions ----
class Pose(NamedTuple):
    """How a drawing is shown at times (T,): numbers or arrays (T,)."""

    x: object = 0.0  # to the right, in half widths of the picture
    y: object = 0.0  # down
    angle: object = 0.0  # radians
    sx: object = 1.0  # scales
    sy: object = 1.0
    alpha: object = 1.0  # 1 = as drawn
    bright: object = 1.0
    colour: object = 1.0


class Motion(NamedTuple):
    """What a verb means."""

    phrases: list  # three
    pose: object  # function of times (T,) in 0..1 -> Pose


def coin_width(t):
    """The width of a coin that flips; it is never seen from the edge alone."""
    width = np.cos(np.pi * t)
    return np.where(abs(width) < 0.1, 0.1, width)


def blink(t):
    """Two times visible and two times nearly invisible."""
    return np.where((4 * t).astype(int) % 2, 0.08, 1.0)


# The set of the poses tells verbs apart, whatever their order, since towers average over frames.
MOTIONS = {
    "slides left": Motion(
        ["slides to the left", "moves left", "glides leftwards"],
        lambda t: Pose(x=-0.6 * t)),
    "grows": Motion(
        ["grows", "gets bigger", "becomes larger"],
        lambda t: Pose(sx=0.8 + 0.9 * t, sy=0.8 + 0.9 * t)),
    "spins": Motion(
        ["spins around", "rotates", "turns in a circle"],
        lambda t: Pose(angle=2 * np.pi * t)),
    "falls": Motion(
        ["falls down", "drops", "sinks to the ground"],
        lambda t: Pose(y=0.6 * t)),
    "fades": Motion(
        ["fades away", "disappears", "becomes invisible"],
        lambda t: Pose(alpha=1 - 0.95 * t)),
    "slides right": Motion(
        ["slides to the right", "moves right", "glides rightwards"],
        lambda t: Pose(x=0.6 * t)),
    "bounces": Motion(
        ["bounces", "hops up and down", "jumps on the spot"],
        lambda t: Pose(y=0.35 - 0.75 * abs(np.sin(3 * np.pi * t)))),
    "shrinks": Motion(
        ["shrinks", "gets smaller", "becomes tiny"],
        lambda t: Pose(sx=1 - 0.65 * t, sy=1 - 0.65 * t)),
    "rises": Motion(
        ["rises", "floats up", "goes straight up"],
        lambda t: Pose(y=-0.6 * t)),
    "orbits": Motion(
        ["orbits the centre", "circles around", "goes round and round"],
        lambda t: Pose(x=0.45 * np.cos(2 * np.pi * t), y=0.45 * np.sin(2 * np.pi * t))),
    "turns grey": Motion(
        ["turns grey", "loses its colour", "becomes colourless"],
        lambda t: Pose(colour=1 - t)),
    "sways": Motion(
        ["sways", "rocks from side to side", "tilts back and forth"],
        lambda t: Pose(angle=0.7 * np.sin(2 * np.pi * t))),
    "stretches": Motion(
        ["stretches", "gets taller", "becomes long and thin"],
        lambda t: Pose(sx=1 - 0.35 * t, sy=1 + 0.8 * t)),
    "stands still": Motion(
        ["stands still", "does not move", "stays where it is"],
        lambda t: Pose()),
    "rolls left": Motion(
        ["rolls to the left", "tumbles left", "rolls over leftwards"],
        lambda t: Pose(x=-0.55 * t, angle=-2 * np.pi * t)),
    "climbs": Motion(
        ["climbs to the upper right", "flies up to the right", "goes up diagonally"],
        lambda t: Pose(x=0.5 * t, y=-0.5 * t)),
    "flattens": Motion(
        ["flattens", "is squashed", "gets pressed flat"],
        lambda t: Pose(sx=1 + 0.5 * t, sy=1 - 0.7 * t)),
    "darkens": Motion(
        ["darkens", "turns black", "becomes a shadow"],
        lambda t: Pose(bright=1 - 0.95 * t)),
    "rolls right": Motion(
        ["rolls to the right", "tumbles right", "rolls over rightwards"],
        lambda t: Pose(x=0.55 * t, angle=2 * np.pi * t)),
    "pulses": Motion(
        ["pulses", "beats like a heart", "grows and shrinks"],
        lambda t: Pose(sx=1 + 0.5 * np.sin(2 * np.pi * t), sy=1 + 0.5 * np.sin(2 * np.pi * t))),
    "flips": Motion(
        ["flips over", "turns its back", "flips like a coin"],
        lambda t: Pose(sx=coin_width(t))),
    "descends": Motion(
        ["descends to the lower left", "flies down to the left", "goes down diagonally"],
        lambda t: Pose(x=-0.5 * t, y=0.5 * t)),
    "blinks": Motion(
        ["blinks", "flashes on and off", "appears and disappears"],
        lambda t: Pose(alpha=blink(t))),
    "shakes": Motion(
        ["shakes", "trembles", "jitters"],
        lambda t: Pose(x=0.22 * np.sin(9 * np.pi * t), angle=0.25 * np.cos(7 * np.pi * t))),
}


# ---- one split ----
def load(name, split, options):
    """One split of moving-emoji, (M, T, 3, H, W), or of emoji-scenes, in memory."""
    if name == "emoji-scenes":
        return load_emoji_scenes(name, split, options)
    return load_moving_emoji(name, split, options)


def load_moving_emoji(name, split, options):
    """One split of moving-emoji, (M, T, 3, H, W) in memory.

    Columns: the classes label (the verb), noun and colour; group, equal for the same verb, noun and
    colour; noisy, False; question, answer, five choices and question_type; boxes if there are
    regions; subtitle if the modalities have it.
    Raises: UserError for too few training clips, or too many regions.
    """
    frames = options.frames or DEFAULT_FRAMES
    size = options.image_size or DEFAULT_SIDE
    if options.regions > MAX_REGIONS:
        raise UserError(f"--regions {options.regions}: a frame of moving-emoji has {MAX_REGIONS}")
    sprites = draw_sprites(size)
    clips = draw_clips(split, options.clips)
    classes = {
        "verb": list(MOTIONS),
        "noun": [names[0] for names in sprites.names],
        "colour": list(COLOURS)}
    captions = [captions_of(clips, row, sprites.names) for row in range(len(clips))]
    columns = {"label": clips.verbs, "verb": clips.verbs, "noun": clips.nouns,
               "colour": clips.colours, "group": clips.groups,
               "noisy": np.zeros(len(clips), bool)}
    columns.update(question_columns(clips, classes))
    if options.regions:
        boxes = find_boxes(clips, frames, size)                                 # (M, T, 5, 4)
        columns["boxes"] = boxes[:, :, :options.regions].tolist()
    if "s" in options.modalities:
        columns["subtitle"] = [
            subtitle_of(clips, row, sprites.names) for row in range(len(clips))]
    table = make_table(
        captions, [f"{split} {row}" for row in range(len(clips))],
        classes={**classes, "label": classes["verb"]}, **columns)
    data = Data(name, split, table, pixels=render(clips, frames, size))
    if "a" in options.modalities:
        data = dataclasses.replace(data, draw_sound=functools.partial(draw_tones, clips))
    num_descriptions = len(np.unique(clips.groups))
    return with_note(data, f"{num_descriptions} descriptions")


def load_emoji_scenes(name, split, options):
    """One split of emoji-scenes, images (M, 3, H, W).

    Each shows one of 60 drawings, its class, at a random place, size, tilt and hue on a random
    colour, so that pixels and colours alone do not tell the class. Captions are the drawing's
    names.
    """
    size = options.image_size or DEFAULT_SIDE
    number = SPLITS.index(split)
    sprites = draw_sprites(size)
    labels = np.repeat(np.arange(SCENE_CLASSES), options.scenes[number])        # (M,)
    u = uniforms(EMOJI_SCENES_SEED, number, np.arange(len(labels)), 8)          # (M, 8)
    x = 0.8 * (u[:, 0] - 0.5)
    y = 0.8 * (u[:, 1] - 0.5)
    angle = u[:, 2] - 0.5
    scale = 0.35 + 0.3 * u[:, 3]
    theta = canvas_to_drawing(Pose(x, y, angle), scale)                         # (M, 2, 3)
    u = torch.from_numpy(u)
    labels_tensor = torch.from_numpy(labels)
    images = []
    for rows in torch.arange(len(labels)).split(SCENES_AT_ONCE):
        drawings = sprites.drawings[labels_tensor[rows]]                        # (n, 4, h, h)
        rgb, alpha = drawings.split([3, 1], 1)                 # (n, 3, h, h) and (n, 1, h, h)
        turns = u[rows, 4].view(-1, 1, 1, 1) - 0.5
        plain_rgb = (rgb / alpha.clamp(min=1e-6)).clamp(0, 1)
        rgb = shift_hue(plain_rgb, turns) * alpha
        canvas = place_on_canvas(torch.cat([rgb, alpha], 1), theta[rows], size)  # (n, 4, 2S, 2S)
        images.append(add_background(canvas[:, :3], canvas[:, 3:], u[rows, 5:]))
    captions = [sprites.names[label] for label in labels]
    keys = [f"{split} {row}" for row in range(len(labels))]
    class_names = [names[0] for names in sprites.names[:SCENE_CLASSES]]
    table = make_table(captions, keys, None, {"label": class_names}, label=labels)
    return Data(name, split, table, pixels=torch.cat(images))


# ---- what the clips show ----
@dataclasses.dataclass
class ClipTable:
    """What M clips show."""

    pairs: np.ndarray  # (M,) verb * NOUNS + noun
    colours: np.ndarray  # (M,)
    draws: np.ndarray  # (M, 8) in [0, 1): place, size, tilt, colour, and three of the captions

    def __post_init__(self):
        self.verbs, self.nouns = np.divmod(self.pairs, NOUNS)
        self.groups = self.pairs * len(COLOURS) + self.colours  # same verb, noun and colour

    def __len__(self):
        return len(self.pairs)

    def chunk(self, rows):
        """These rows alone."""
        return ClipTable(self.pairs[rows], self.colours[rows], self.draws[rows])


def draw_clips(split, counts):
    """The ClipTable of a split.

    Args:
        counts: clips of train, val and test.
    """
    number = SPLITS.index(split)
    pairs = draw_pairs(counts)[number]
    rows = np.arange(counts[number])
    draws = uniforms(CLIP_SEED, number, rows, 8)
    colours = (draws[:, 4] * len(COLOURS)).astype(int)
    if split != "train":  # when the pairs repeat, each takes its next colour
        turn, first_row = np.divmod(rows, len(np.unique(pairs)))
        colours = (colours[first_row] + turn) % len(COLOURS)
    return ClipTable(pairs, colours, draws)


def draw_pairs(counts):
    """Pairs of verb and noun of the clips of train, val and test, three arrays. Val and test have
    each held-out pair in turn.

    Args:
        counts: as of draw_clips.
    """
    rng = np.random.default_rng(SCENE_SEED)
    verb_weight = 1 / np.arange(1, len(MOTIONS) + 1)
    noun_weight = 1 / np.arange(1, NOUNS + 1)
    weight = np.outer(verb_weight, noun_weight).flatten()                       # (pairs,)
    eighth = rng.integers(8, size=len(weight))  # 0 val, 1 test, others train
    p = np.where(eighth > 1, weight, 0)
    pairs = [rng.choice(len(p), counts[0], p=p / p.sum())]
    verbs, nouns = np.divmod(np.arange(len(p)), NOUNS)
    in_training = np.isin(verbs, pairs[0] // NOUNS) & np.isin(nouns, pairs[0] % NOUNS)
    for number, count in enumerate(counts[1:]):
        p = np.where(in_training & (eighth == number), weight, 0)
        if not p.any():
            words = " ".join(str(count) for count in counts)
            raise UserError(f"--clips {words}: too few training clips to leave val and test a pair")
        order = rng.choice(len(p), np.count_nonzero(p), replace=False, p=p / p.sum())
        pairs.append(np.resize(order, count))  # every pair once, then again
    return pairs


# ---- captions and questions ----
def captions_of(clips, row, names):
    """Three captions of one clip that mean the same in different words.

    Args:
        names: of all nouns.
    """
    verb = list(MOTIONS)[clips.verbs[row]]
    colour = list(COLOURS)[clips.colours[row]]
    u = clips.draws[row]                                                        # (8,)
    captions = []
    for k in range(3):
        template = choose(TEMPLATES, u[7], k)
        noun = choose(names[clips.nouns[row]], u[6], k)
        phrase = choose(MOTIONS[verb].phrases, u[5], k)
        article = "a"
        if noun[0] in "aeiou":
            article = "an"
        captions.append(template.format(a=article, noun=noun, verb=phrase, colour=colour))
    return captions


def subtitle_of(clips, row, names):
    """What is said in one clip: its noun and verb, in words of its second and third caption."""
    verb = list(MOTIONS)[clips.verbs[row]]
    u = clips.draws[row]                                                        # (8,)
    noun = choose(names[clips.nouns[row]], u[6], 1)
    phrase = choose(MOTIONS[verb].phrases, u[5], 2)
    return f"now look at the {noun}, it {phrase}"


def draw_tones(clips, row):
    """The sound of one clip: a tone for its verb, then one for its noun, (samples,) at 16 kHz."""
    low, high = TONES
    places = np.array([
        clips.verbs[row] / (len(MOTIONS) - 1), clips.nouns[row] / (NOUNS - 1)])
    pitches = low * (high / low) ** places                                      # (2,) Hz
    seconds = np.arange(round(TONE_SECONDS * RATE)) / RATE
    return 0.3 * np.sin(2 * np.pi * pitches[:, None] * seconds).flatten()


def choose(words, u, k):
    """The k-th of words that are read from a random place on, by u in 0..1."""
    return words[(int(u * len(words)) + k) % len(words)]


def question_columns(clips, classes):
    """{column: values} of a question about each clip, by turns its noun, verb and colour.

    Args:
        classes: {kind: class names}.
    """
    labels = {"verb": clips.verbs, "noun": clips.nouns, "colour": clips.colours}
    columns = {"question": [], "answer": [], "question_type": [], "choices": []}
    kinds = list(QUESTIONS)
    for row in range(len(clips)):
        rng = np.random.default_rng([*QUESTION_SEED, row])
        kind = kinds[row % len(kinds)]
        answers = classes[kind]
        label = labels[kind][row]
        choices = [k for k in rng.permutation(len(answers)) if k != label][:4]
        choices.append(label)
        columns["question"].append(QUESTIONS[kind])
        columns["answer"].append(answers[label])
        columns["question_type"].append(kind)
        columns["choices"].append([answers[choices[k]] for k in rng.permutation(5)])
    return columns


# ---- the renderer ----
class Sprites(NamedTuple):
    """The NOUNS drawings that move."""

    names: list  # lists of names, the first of which is the noun's
    drawings: torch.Tensor  # (NOUNS, 4, h, h) float, premultiplied by alpha


@functools.lru_cache(maxsize=4)
def draw_sprites(size):
    """The Sprites, about as large as clips of `size` pixels show them."""
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2 import functional as V

    sprite_names = []
    images = []
    used_names = set()
    for drawing in sorted(list_drawings(), key=drawing_order):
        if len(sprite_names) == NOUNS:
            break
        # no tiger2, no man-juggling
        names = [name for name in drawing.captions if name.replace(" ", "").isalpha()]
        is_noun = NOUN_CLASSES.search(drawing.label)
        is_plain = names[:1] == drawing.captions[:1] and len(names[0].split()) <= 2
        if is_noun and is_plain and not used_names & set(drawing.captions):
            used_names.update(drawing.captions)
            sprite_names.append(names)
            images.append(decode_image(str(drawing.path), mode=ImageReadMode.RGB_ALPHA))
    drawings = torch.stack(images).float() / 255                                # (NOUNS, 4, 72, 72)
    drawings[:, :3] *= drawings[:, 3:]
    side = round(1.2 * size)
    if side < drawings.shape[-1]:
        drawings = V.resize(drawings, [side, side], antialias=True)
    return Sprites(sprite_names, drawings)


def drawing_order(drawing):
    """What drawings are sorted by, to mix their classes: a hash."""
    return digest(drawing.key.encode())


def find_boxes(clips, frames, size):
    """(M, T, 5, 4) x1 y1 x2 y2 in pixels: around the drawing's square, and the quarters of the
    picture."""
    theta, _ = find_poses(clips, frames)                                        # (MT, 2, 3)
    inverse = torch.linalg.inv(theta[:, :, :2])             # (MT, 2, 2), from drawing to canvas
    centre = -(inverse @ theta[:, :, 2:])[..., 0]                           # (MT, 2), half widths
    half_size = inverse.abs().sum(-1)                                           # (MT, 2)
    box = torch.cat([centre - half_size, centre + half_size], 1).clamp(-1, 1)   # (MT, 4)
    quarters = torch.tensor(
        [[-1, -1, 0, 0], [0, -1, 1, 0], [-1, 0, 0, 1], [0, 0, 1, 1]])           # (4, 4)
    quarters = quarters.expand(len(theta), -1, -1)                              # (MT, 4, 4)
    boxes = torch.cat([box[:, None], quarters], 1)                              # (MT, 5, 4)
    return ((boxes + 1) * size / 2).unflatten(0, (-1, frames))


def render(clips, frames, size):
    """Clips (M, T, 3, H, W) uint8, rendered at twice the size and averaged down, each from its own
    numbers alone."""
    numbers_per_clip = 4 * frames * (2 * size) ** 2
    at_once = max(1, CANVAS_NUMBERS // numbers_per_clip)
    chunks = []
    for start in range(0, len(clips), at_once):
        chunk = clips.chunk(slice(start, start + at_once))
        chunks.append(render_chunk(chunk, frames, size))
    return torch.cat(chunks)


def render_chunk(clips, frames, size):
    """As `render`, all clips at once."""
    palette = torch.tensor(list(COLOURS.values())) / 255                        # (6, 3)
    theta, pose = find_poses(clips, frames)                                     # (nT, 2, 3)
    alpha = as_column(pose.alpha)                                               # (nT, 1, 1, 1)
    drawings = draw_sprites(size).drawings[torch.as_tensor(clips.nouns)]        # (n, 4, h, h)
    drawings = drawings.repeat_interleave(frames, 0)                            # (nT, 4, h, h)
    canvas = place_on_canvas(drawings, theta, size)                             # (nT, 4, 2S, 2S)
    rgb = canvas[:, :3]
    grey = luma(rgb).expand(-1, 3, -1, -1)                                      # (nT, 3, 2S, 2S)
    rgb = torch.lerp(grey, rgb, as_column(pose.colour)) * as_column(pose.bright) * alpha
    background = palette[torch.as_tensor(clips.colours)]                        # (n, 3)
    background = background.repeat_interleave(frames, 0)                        # (nT, 3)
    images = add_background(rgb, canvas[:, 3:] * alpha, background)             # (nT, 3, S, S)
    return images.unflatten(0, (-1, frames))


def place_on_canvas(drawings, theta, size):
    """Drawings (n, 4, h, h) seen by the maps theta (n, 2, 3), at twice the size: (n, 4, 2S, 2S)."""
    shape = (len(theta), 4, 2 * size, 2 * size)
    grid = F.affine_grid(theta, shape, align_corners=False)                     # (n, 2S, 2S, 2)
    return F.grid_sample(drawings, grid, align_corners=False)


def add_background(rgb, alpha, colour):
    """Images of drawings on a colour, at half their size.

    Args:
        rgb: (n, 3, 2S, 2S) premultiplied by alpha (n, 1, 2S, 2S).
        colour: (n, 3) in 0..1.
    Returns: (n, 3, S, S) uint8.
    """
    x = rgb + (1 - alpha) * colour[:, :, None, None]                            # (n, 3, 2S, 2S)
    x = F.avg_pool2d(x, 2)                                                      # (n, 3, S, S)
    return (x * 255).round().clamp_(0, 255).to(torch.uint8)


def canvas_to_drawing(pose, scale):
    """Affine maps from the canvas to drawings in these poses, whose arrays have the shape of
    `scale`: (n, 2, 3)."""
    cos = np.cos(pose.angle) / scale
    sin = np.sin(pose.angle) / scale
    theta = np.stack([
        cos / pose.sx, sin / pose.sx, -(cos * pose.x + sin * pose.y) / pose.sx,
        -sin / pose.sy, cos / pose.sy, (sin * pose.x - cos * pose.y) / pose.sy], -1)
    return torch.from_numpy(theta).float().view(-1, 2, 3)


def find_poses(clips, frames):
    """How the drawings of n clips are shown: affine maps from canvas to drawing (nT, 2, 3), and
    the Pose that their verbs give them at the times, of arrays (n, T)."""
    t = (np.arange(frames) + 0.5) / frames                                      # (T,)
    motions = [motion.pose(t) for motion in MOTIONS.values()]
    fields = {}
    for name in Pose._fields:
        values = [np.broadcast_to(getattr(pose, name), frames) for pose in motions]
        fields[name] = np.stack(values)[clips.verbs]                            # (n, T)
    u = clips.draws[:, :, None]                                                 # (n, 8, 1)
    pose = Pose(**fields)
    moved = pose._replace(
        x=pose.x + 0.24 * (u[:, 0] - 0.5),
        y=pose.y + 0.24 * (u[:, 1] - 0.5),
        angle=pose.angle + 0.5 * (u[:, 2] - 0.5))
    return canvas_to_drawing(moved, 0.42 + 0.14 * u[:, 3]), pose


def as_column(values):
    """An array (n, T) as a float tensor (nT, 1, 1, 1)."""
    return torch.from_numpy(values).float().view(-1, 1, 1, 1)
