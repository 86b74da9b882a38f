"""Moving emoji: a renderer animates the drawings of emoji.py, for video methods without videos. Emoji scenes: single
images of them, for methods without captions.

Pairs of verb and noun follow Zipf's law (weight 1 / rank each). val and test hold new pairs of verbs and nouns that
training shows in other pairs. Three captions of a clip state its noun, verb and colour in different words.
"""

import functools
import re

from contrastive.data.emoji import digest, listed
from contrastive.data.table import Data, make_table, notes
from contrastive.data.views import luma, shift_hue, uniforms
from contrastive.engine.processes import UserError
from contrastive.engine.ranges import between, part

import numpy as np
import torch
import torch.nn.functional as F

CLIPS = (2000, 300, 300)  # of train, val and test, without --clips
SCENES, SCENE_CLASSES = (500, 10, 25), 60  # emoji-scenes: images per class of train, val and test; nouns
SETS = {"moving-emoji": {
    "drawn": True, "splits": {"train": None, "val": None, "test": None}, "licence": "CC-BY 4.0, credit Twemoji",
    "options": {
        "--clips": dict(type=between(2, 10**6, int), nargs=3, default=list(CLIPS), metavar=("TRAIN", "VAL", "TEST"),
                        help="clips of each split"),
        "--clip-law": dict(choices=["once", "zipf"], default="once",
                           help="val and test: once = each held-out pair in turn, none of them in training; zipf = "
                                "further draws from training's distribution (for NCL's queue of its queries)"),
        "--caption-noise": dict(type=part, default=0.0,
                                help="share of the training clips that get another clip's captions, 0..1")}},
    "emoji-scenes": {
        "drawn": True, "splits": {"train": None, "val": None, "test": None}, "licence": "CC-BY 4.0, credit Twemoji",
        "options": {
            "--scenes": dict(type=between(2, 10**5, int), nargs=3, default=list(SCENES),
                             metavar=("TRAIN", "VAL", "TEST"), help="images per class of each split")}}}
COLOURS = {"white": (255, 255, 255), "grey": (150, 150, 150), "yellow": (250, 225, 120),
           "pink": (250, 190, 205), "blue": (150, 195, 245), "green": (165, 220, 165)}
NOUNS = 120  # drawings; with 24 verbs they make 2,880 pairs, an eighth of them for val and an eighth for test
NOUN_CLASSES = re.compile("animal|food|plant|transport|household|clothing|tool|music|sport|game|phone|computer|light|"
                          "office|sky|place")
# each template states noun, verb and colour, in its own words and order
TEMPLATES = ("the {noun} {verb} on a {colour} background", "against a {colour} background {a} {noun} {verb}",
             "{a} {noun} that {verb}, with {colour} all around", "on {colour} ground one {noun} {verb}",
             "a {colour} scene in which the {noun} {verb}", "one {noun} {verb}, the rest is {colour}")
QUESTIONS = {"noun": "what is in the picture?", "verb": "what does it do?", "colour": "which colour is the background?"}
PI, sin, cos, where = np.pi, np.sin, np.cos, np.where
# verb: (three phrases, pose at times t (T,) in 0..1): x (right) and y (down) in half widths, angle in radians, scales
# sx, sy; alpha, bright, colour (1 = as drawn). The *set* of poses tells verbs apart: towers average over frames.
MOTIONS = {verb: (phrases.split(", "), pose) for verb, phrases, pose in (
    ("slides left", "slides to the left, moves left, glides leftwards", lambda t: dict(x=-0.6 * t)),
    ("grows", "grows, gets bigger, becomes larger", lambda t: dict(sx=0.8 + 0.9 * t, sy=0.8 + 0.9 * t)),
    ("spins", "spins around, rotates, turns in a circle", lambda t: dict(angle=2 * PI * t)),
    ("falls", "falls down, drops, sinks to the ground", lambda t: dict(y=0.6 * t)),
    ("fades", "fades away, disappears, becomes invisible", lambda t: dict(alpha=1 - 0.95 * t)),
    ("slides right", "slides to the right, moves right, glides rightwards", lambda t: dict(x=0.6 * t)),
    ("bounces", "bounces, hops up and down, jumps on the spot", lambda t: dict(y=0.35 - 0.75 * abs(sin(3 * PI * t)))),
    ("shrinks", "shrinks, gets smaller, becomes tiny", lambda t: dict(sx=1 - 0.65 * t, sy=1 - 0.65 * t)),
    ("rises", "rises, floats up, goes straight up", lambda t: dict(y=-0.6 * t)),
    ("orbits", "orbits the centre, circles around, goes round and round",
     lambda t: dict(x=0.45 * cos(2 * PI * t), y=0.45 * sin(2 * PI * t))),
    ("turns grey", "turns grey, loses its colour, becomes colourless", lambda t: dict(colour=1 - t)),
    ("sways", "sways, rocks from side to side, tilts back and forth", lambda t: dict(angle=0.7 * sin(2 * PI * t))),
    ("stretches", "stretches, gets taller, becomes long and thin", lambda t: dict(sx=1 - 0.35 * t, sy=1 + 0.8 * t)),
    ("stands still", "stands still, does not move, stays where it is", lambda t: {}),
    ("rolls left", "rolls to the left, tumbles left, rolls over leftwards",
     lambda t: dict(x=-0.55 * t, angle=-2 * PI * t)),
    ("climbs", "climbs to the upper right, flies up to the right, goes up diagonally",
     lambda t: dict(x=0.5 * t, y=-0.5 * t)),
    ("flattens", "flattens, is squashed, gets pressed flat", lambda t: dict(sx=1 + 0.5 * t, sy=1 - 0.7 * t)),
    ("darkens", "darkens, turns black, becomes a shadow", lambda t: dict(bright=1 - 0.95 * t)),
    ("rolls right", "rolls to the right, tumbles right, rolls over rightwards",
     lambda t: dict(x=0.55 * t, angle=2 * PI * t)),
    ("pulses", "pulses, beats like a heart, grows and shrinks",
     lambda t: dict(sx=1 + 0.5 * sin(2 * PI * t), sy=1 + 0.5 * sin(2 * PI * t))),
    ("flips", "flips over, turns its back, flips like a coin",
     lambda t: dict(sx=where(abs(cos(PI * t)) < 0.1, 0.1, cos(PI * t)))),
    ("descends", "descends to the lower left, flies down to the left, goes down diagonally",
     lambda t: dict(x=-0.5 * t, y=0.5 * t)),
    ("blinks", "blinks, flashes on and off, appears and disappears",
     lambda t: dict(alpha=where((4 * t).astype(int) % 2, 0.08, 1.0))),
    ("shakes", "shakes, trembles, jitters", lambda t: dict(x=0.22 * sin(9 * PI * t), angle=0.25 * cos(7 * PI * t))))}
REST = {"x": 0.0, "y": 0.0, "angle": 0.0, "sx": 1.0, "sy": 1.0, "alpha": 1.0, "bright": 1.0, "colour": 1.0}


def load(name, split, options):
    """One split of moving-emoji, (M, T, 3, H, W) in memory.

    Options: frames (4), image_size (32 px), those of SETS, and regions (boxes per frame). Columns: label = verb, noun,
    colour (classes), group (same verb, noun and colour), noisy (another's captions), question, answer, choices (five),
    question_type, with regions boxes.   Raises: UserError for too few training clips, or too many regions."""
    if name == "emoji-scenes":
        return _scenes_of_classes(name, split, options)
    frames, size, regions = options.get("frames") or 4, options.get("image_size") or 32, options.get("regions") or 0
    if regions > 5:
        raise UserError(f"--regions {regions}: a frame of moving-emoji has 5")
    law, noise = options.get("clip_law") or "once", options.get("caption_noise") or 0.0
    names = sprites(size)[0]
    pairs, colours, draws = _scenes(split, options.get("clips") or CLIPS, law)  # (M,), (M,), (M, 8)
    verbs, nouns = np.divmod(pairs, NOUNS)
    classes = {"verb": list(MOTIONS), "noun": [n[0] for n in names], "colour": list(COLOURS)}
    shown = {"verb": verbs, "noun": nouns, "colour": colours}  # numbers of the classes
    groups = pairs * len(COLOURS) + colours  # (M,)
    own = [_captions(names[n], classes["verb"][v], classes["colour"][c], u)
           for n, v, c, u in zip(nouns, verbs, colours, draws)]
    giver = _givers(pairs, noise if split == "train" else 0.0)  # (M,)
    noisy = groups != groups[giver]  # (M,) captions that are wrong
    questions = [_question(row, classes, shown) for row in range(len(pairs))]
    columns = {c: [q[c] for q in questions] for c in questions[0]}
    if regions:
        columns["boxes"] = boxes_of(verbs, draws, frames, size)[:, :, :regions].tolist()
    table = make_table([own[i] for i in giver], [f"{split} {row}" for row in range(len(pairs))],
                       classes=classes | {"label": classes["verb"]}, label=verbs, **shown, group=groups, noisy=noisy,
                       **columns)
    step = max(1, 2**20 // (4 * frames * (2 * size) ** 2))  # clips at a time: 4 MiB of canvas
    parts = [slice(i, i + step) for i in range(0, len(pairs), step)]
    pixels = torch.cat([render(verbs[i], nouns[i], colours[i], draws[i], frames, size) for i in parts])
    note = notes(f"{int(noisy.sum())} clips with another's captions" if noisy.any() else "",
                 f"{len({*groups})} descriptions; law of val and test: {law}")
    return Data(name, split, table, pixels=pixels, note=note)


def _scenes_of_classes(name, split, options):
    """One split of emoji-scenes, images (M, 3, H, W). Each shows one of 60 drawings, its class, at a random place,
    size, tilt and hue on a random colour, so that pixels and colours alone do not tell the class.

    Options: image_size (32 px); scenes: images per class. Captions are the drawing's names."""
    size, number = options.get("image_size") or 32, ("train", "val", "test").index(split)
    names, drawn = sprites(size)
    classes = [n[0] for n in names[:SCENE_CLASSES]]
    nouns = np.repeat(np.arange(SCENE_CLASSES), (options.get("scenes") or SCENES)[number])  # (M,)
    u = uniforms(8, number, np.arange(len(nouns)), 8)  # (M, 8): place, tilt, size, hue, background
    theta = _maps(0.8 * (u[:, 0] - 0.5), 0.8 * (u[:, 1] - 0.5), u[:, 2] - 0.5, 0.35 + 0.3 * u[:, 3])  # (M, 2, 3)
    u, images = torch.from_numpy(u), []
    for rows in torch.arange(len(nouns)).split(512):
        rgb, alpha = drawn[torch.from_numpy(nouns)[rows]].split([3, 1], 1)  # (n, 3, h, h) premultiplied, (n, 1, h, h)
        hue = u[rows, 4].view(-1, 1, 1, 1) - 0.5  # turns
        rgb = shift_hue((rgb / alpha.clamp(min=1e-6)).clamp(0, 1), hue) * alpha
        x = _seen(torch.cat([rgb, alpha], 1), theta[rows], size)  # (n, 4, 2S, 2S)
        images.append(_on_ground(x[:, :3], x[:, 3:], u[rows, 5:]))
    keys = [f"{split} {row}" for row in range(len(nouns))]
    table = make_table([names[n] for n in nouns], keys, None, {"label": classes}, label=nouns)
    return Data(name, split, table, pixels=torch.cat(images))


# ---- scenes, captions and questions ----
def _scenes(split, clips, law):
    """What the clips of a split show: pairs (M,), verb * NOUNS + noun; colours (M,); and draws (M, 8) in [0, 1).

    law: that of val and test; zipf draws from the same pairs as training, of which most, but not all, occur there."""
    rng, once = np.random.default_rng([7, 1]), law == "once"
    weight = np.outer(1 / np.arange(1, len(MOTIONS) + 1), 1 / np.arange(1, NOUNS + 1)).flatten()  # (pairs,)
    part = rng.integers(8, size=len(weight))  # 0 val, 1 test, others train
    p = np.where(part > 1, weight, 0)
    pairs = [rng.choice(len(p), clips[0], p=p / p.sum())]  # of train, val and test
    verbs, nouns = np.divmod(np.arange(len(p)), NOUNS)
    known = np.isin(verbs, pairs[0] // NOUNS) & np.isin(nouns, pairs[0] % NOUNS)  # (pairs,)
    for number, wanted in enumerate(clips[1:]):
        p = np.where(known & (part == number if once else part > 1), weight, 0)
        if not p.any():
            raise UserError(f"--clips {' '.join(map(str, clips))}: too few training clips to leave val and test a pair")
        drawn = rng.choice(len(p), np.count_nonzero(p) if once else wanted, replace=not once, p=p / p.sum())
        pairs.append(np.resize(drawn, wanted))  # every pair once, then again
    number = ("train", "val", "test").index(split)
    shown, rows = pairs[number], np.arange(clips[number])
    draws = uniforms(7, number, rows, 8)
    colours = (draws[:, 4] * len(COLOURS)).astype(int)
    if split != "train" and once:  # when the pairs repeat, each takes its next colour
        again, first = np.divmod(rows, len({*shown}))
        colours = (colours[first] + again) % len(COLOURS)
    return shown, colours, draws


def _captions(names, verb, colour, u):
    """Three captions of one clip that mean the same in different words; u (8,) picks template, name and phrase."""
    captions, many = [], (TEMPLATES, names, MOTIONS[verb][0])
    for k in range(3):
        template, noun, phrase = (words[(int(x * len(words)) + k) % len(words)] for words, x in zip(many, u[:4:-1]))
        article = "an" if noun[0] in "aeiou" else "a"
        captions.append(template.format(a=article, noun=noun, verb=phrase, colour=colour))
    return captions


def _givers(pairs, share):
    """(M,) whose captions each clip gets: its own, or, for a share of them, those of another pair (if any is left)."""
    givers = np.arange(len(pairs))
    chosen = np.random.default_rng([7, 2]).permutation(len(pairs))[:round(share * len(pairs))]
    giver = np.roll(chosen, 1)
    for k in np.flatnonzero(pairs[chosen] == pairs[giver]):  # this giver shows the same pair
        useful = (pairs[giver] != pairs[chosen[k]]) & (pairs[chosen] != pairs[giver[k]])
        for other in np.flatnonzero(useful)[:1]:  # swap givers with the first clip for which both then differ
            giver[[k, other]] = giver[[other, k]]
    givers[chosen] = giver
    return givers


def _question(row, classes, shown):
    """Columns of a row.   classes: {kind: names of all classes}; shown: {kind: (M,) the class number of each clip}."""
    rng, kind = np.random.default_rng([7, 3, row]), list(QUESTIONS)[row % 3]
    answers, right = classes[kind], shown[kind][row]
    choices = [k for k in rng.permutation(len(answers)) if k != right][:4] + [right]
    return {"question": QUESTIONS[kind], "answer": answers[right], "question_type": kind,
            "choices": [answers[choices[k]] for k in rng.permutation(5)]}


# ---- the renderer ----
@functools.lru_cache(maxsize=4)
def sprites(size):
    """NOUNS lists of names (the first is the noun's), and their drawings (NOUNS, 4, h, h) float, premultiplied by
    alpha, of about the size that clips of `size` px show."""
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2 import functional as V
    names, images, seen = [], [], set()
    for item in sorted(listed(), key=lambda i: digest(i["key"].encode())):
        captions = [c for c in item["captions"] if c.replace(" ", "").isalpha()]  # no tiger2, no man-juggling
        plain = captions[:1] == item["captions"][:1] and len(captions[0].split()) <= 2
        if len(names) < NOUNS and NOUN_CLASSES.search(item["label"]) and plain and not seen & {*item["captions"]}:
            seen |= {*item["captions"]}
            names.append(captions)
            images.append(decode_image(str(item["path"]), mode=ImageReadMode.RGB_ALPHA))
    x = torch.stack(images).float() / 255  # (NOUNS, 4, 72, 72)
    x[:, :3] *= x[:, 3:]
    side = min(72, round(1.2 * size))
    return names, (V.resize(x, [side, side], antialias=True) if side < 72 else x)


def boxes_of(verbs, draws, frames, size):
    """(M, T, 5, 4) x1 y1 x2 y2 in pixels: around the drawing's square, and the quarters of the picture."""
    theta = _poses(verbs, draws, frames)[0]  # (MT, 2, 3), canvas -> drawing
    back = torch.linalg.inv(theta[:, :, :2])  # (MT, 2, 2), drawing -> canvas
    middle, half = -(back @ theta[:, :, 2:])[..., 0], back.abs().sum(-1)  # (MT, 2) each, x and y in half widths
    drawing = torch.cat([middle - half, middle + half], 1).clamp(-1, 1)  # (MT, 4)
    quarters = torch.tensor([[-1, -1, 0, 0], [0, -1, 1, 0], [-1, 0, 0, 1], [0, 0, 1, 1]])  # (4, 4)
    found = torch.cat([drawing[:, None], quarters.expand(len(theta), -1, -1)], 1)  # (MT, 5, 4)
    return ((found + 1) * size / 2).unflatten(0, (-1, frames))


def render(verbs, nouns, colours, draws, frames, size):
    """Clips (n, T, 3, H, W) uint8, rendered at twice the size and averaged down, each from its own numbers alone.
    verbs, nouns, colours: (n,) class numbers; draws (n, 8): place, size, tilt."""
    palette = torch.tensor(list(COLOURS.values())) / 255  # (6, 3)
    theta, alpha, bright, colour = _poses(verbs, draws, frames)  # (nT, 2, 3), (nT, 1, 1, 1)
    drawn = sprites(size)[1][torch.as_tensor(nouns)]  # (n, 4, h, h)
    x = _seen(drawn.repeat_interleave(frames, 0), theta, size)  # (nT, 4, 2S, 2S)
    grey = luma(x[:, :3])  # (nT, 1, 2S, 2S)
    rgb = torch.lerp(grey.expand(-1, 3, -1, -1), x[:, :3], colour) * bright * alpha  # (nT, 3, 2S, 2S)
    ground = palette[torch.as_tensor(colours)].repeat_interleave(frames, 0)  # (nT, 3)
    return _on_ground(rgb, x[:, 3:] * alpha, ground).unflatten(0, (-1, frames))


def _seen(drawn, theta, size):
    """Drawings (n, 4, h, h) seen by the maps theta (n, 2, 3), at twice the size: (n, 4, 2S, 2S)."""
    grid = F.affine_grid(theta, (len(theta), 4, 2 * size, 2 * size), align_corners=False)  # (n, 2S, 2S, 2)
    return F.grid_sample(drawn, grid, align_corners=False)


def _on_ground(rgb, cover, ground):
    """Premultiplied rgb (n, 3, 2S, 2S), its alpha (n, 1, 2S, 2S) and a colour (n, 3) -> (n, 3, S, S) uint8."""
    x = F.avg_pool2d(rgb + (1 - cover) * ground[:, :, None, None], 2)
    return (x * 255).round().clamp_(0, 255).to(torch.uint8)


def _maps(x, y, angle, scale, sx=1.0, sy=1.0):
    """Affine maps canvas -> drawing (n, 2, 3) of drawings at x, y (half widths), turned (radians) and scaled."""
    cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
    theta = np.stack([cos / sx, sin / sx, -(cos * x + sin * y) / sx,
                      -sin / sy, cos / sy, (sin * x - cos * y) / sy], -1)
    return torch.from_numpy(theta).float().view(-1, 2, 3)


def _poses(verbs, draws, frames):
    """For n clips: affine maps canvas -> sprite (n * T, 2, 3), and alpha, bright, colour, (n * T, 1, 1, 1) each."""
    t = (np.arange(frames) + 0.5) / frames  # (T,)
    motions = [REST | motion(t) for _, motion in MOTIONS.values()]
    pose = {k: np.stack([np.broadcast_to(m[k], frames) for m in motions])[verbs] for k in REST}  # (n, T) each
    u = draws[:, :, None]  # (n, 8, 1)
    x, y = pose["x"] + 0.24 * (u[:, 0] - 0.5), pose["y"] + 0.24 * (u[:, 1] - 0.5)  # (n, T)
    angle, scale = pose["angle"] + 0.5 * (u[:, 2] - 0.5), 0.42 + 0.14 * u[:, 3]  # (n, T), (n, 1)
    theta = _maps(x, y, angle, scale, pose["sx"], pose["sy"])
    looks = [torch.from_numpy(pose[k]).float().view(-1, 1, 1, 1) for k in ("alpha", "bright", "colour")]
    return theta, *looks
