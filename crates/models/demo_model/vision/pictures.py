"""Invented pictures: colored shapes and at most one digit on a grid of three by three places.

A `Scene` says what is in a picture; `Painter` draws a batch of them as 64 x 64 pixels. Sizes, positions within the
place, tints, backgrounds, proportions, softness and noise are random, so that drawings, screenshots and JPEG files of
such scenes look alike to a model that was trained on them.
"""

import colorsys
import math
import random
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

EDGE = 64
CELL = EDGE / 3
SHAPES = ["circle", "square", "triangle", "star"]
PLACES = ["at the top left", "at the top", "at the top right", "on the left", "in the middle", "on the right",
          "at the bottom left", "at the bottom", "at the bottom right"]
# Ranges of hue in degrees, saturation and value.
COLORS = {
    "red": ((-8, 8), (0.75, 1), (0.75, 1)),
    "orange": ((24, 39), (0.85, 1), (0.9, 1)),
    "yellow": ((50, 62), (0.75, 1), (0.88, 1)),
    "green": ((95, 145), (0.6, 1), (0.45, 1)),
    "blue": ((208, 242), (0.65, 1), (0.6, 1)),
    "purple": ((272, 302), (0.5, 1), (0.45, 0.85)),
    "black": ((0, 360), (0, 0.3), (0, 0.14)),
    "white": ((0, 360), (0, 0.04), (0.94, 1)),
}
COLOR_NAMES = list(COLORS)
# Sum of the differences of the channels between a thing and its background, at least.
CONTRAST_MIN = 0.55
GLYPH_EDGE = 40
GLYPH_HEIGHT = 32
# The corners of the seven segments of a digit, and the segments that each digit has.
CORNERS = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
SEGMENTS = {"a": (0, 1), "b": (1, 3), "c": (3, 5), "d": (4, 5), "e": (2, 4), "f": (0, 2), "g": (2, 3)}
DIGIT_SEGMENTS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "gfabcd"]
FONTS = ["DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono"]


@dataclass
class Thing:
    """A shape or the digit of a scene; lengths in pixels of the 64 x 64 picture."""

    kind: str
    color: str
    place: int
    center: tuple[float, float] = (0.0, 0.0)
    radii: tuple[float, float] = (0.0, 0.0)
    rgb: tuple[float, float, float] = (0.0, 0.0, 0.0)
    turn: float = 0.0

    @property
    def is_digit(self) -> bool:
        """Whether `kind` is a digit from 0 to 9."""
        return self.kind.isdigit()


@dataclass
class Scene:
    """What is in a picture, in the order of the places, and how it is drawn."""

    things: list[Thing] = field(default_factory=list)
    background: tuple[float, float, float] = (1.0, 1.0, 1.0)
    outline: float = 0.0
    softness: float = 1.0

    @property
    def shapes(self) -> list[Thing]:
        """The things that are no digit."""
        return [thing for thing in self.things if not thing.is_digit]

    @property
    def digit(self) -> Thing | None:
        """The digit, if there is one."""
        return next((thing for thing in self.things if thing.is_digit), None)


def tint(rng: random.Random, color: str) -> tuple[float, float, float]:
    """A color of this name; half of the time about the one that a paint program has."""
    (h0, h1), (s0, s1), (v0, v1) = COLORS[color]
    saturation, value = rng.uniform(s0, s1), rng.uniform(v0, v1)
    if rng.random() < 0.4:
        saturation, value = (s0, v0) if color == "black" else (s0 if color == "white" else s1, v1)
    return colorsys.hsv_to_rgb(rng.uniform(h0, h1) % 360 / 360, saturation, value)


def background(rng: random.Random) -> tuple[float, float, float]:
    """White in half of the pictures; else pale, gray or dark."""
    chance = rng.random()
    if chance < 0.5:
        return (1.0, 1.0, 1.0)
    if chance < 0.78:
        return colorsys.hsv_to_rgb(rng.random(), rng.uniform(0, 0.12), rng.uniform(0.85, 1))
    if chance < 0.86:
        return colorsys.hsv_to_rgb(rng.random(), rng.uniform(0, 0.05), rng.uniform(0.5, 0.8))
    return colorsys.hsv_to_rgb(rng.random(), rng.uniform(0, 0.3), rng.uniform(0, 0.22))


def stands_out(rgb: tuple[float, float, float], behind: tuple[float, float, float]) -> bool:
    """Whether a thing of this color can be seen on the background."""
    return sum(abs(a - b) for a, b in zip(rgb, behind, strict=True)) > CONTRAST_MIN


def draw_scene(rng: random.Random) -> Scene:
    """A random scene: one to five shapes, and a digit in two of five scenes."""
    scene = Scene(background=background(rng), softness=rng.uniform(0.8, 2.0))
    if rng.random() < 0.2:
        scene.outline = rng.uniform(0.7, 1.6)
    has_digit = rng.random() < 0.4
    least = 0 if has_digit and rng.random() < 0.3 else 1
    count = least and rng.choices([1, 2, 3, 4, 5], [22, 22, 22, 19, 15])[0]
    kinds = rng.sample(SHAPES, rng.choice([1, 2, 4, 4, 4]))
    colors = rng.sample(COLOR_NAMES, rng.choice([2, 3, 4, 8, 8]))
    aspect = math.exp(rng.uniform(-0.25, 0.25)) if rng.random() < 0.5 else 1.0
    is_big = count + has_digit == 1 and rng.random() < 0.3
    places = sorted(rng.sample(range(9), count + has_digit))
    digit_at = rng.choice(places) if has_digit else None
    for place in places:
        kind = str(rng.randrange(10)) if place == digit_at else rng.choice(kinds)
        scene.things.append(draw_thing(rng, scene, kind, colors, 4 if is_big else place, aspect, is_big))
    return scene


def draw_thing(rng: random.Random, scene: Scene, kind: str, colors: list[str], place: int, aspect: float,
               is_big: bool) -> Thing:
    """One thing of a scene, which does not touch the others."""
    color = rng.choice(colors)
    rgb = tint(rng, color)
    while not stands_out(rgb, scene.background):
        color = rng.choice(COLOR_NAMES)
        rgb = tint(rng, color)
    size = rng.uniform(12, 25) if is_big else rng.uniform(7.2, 9.4) if kind.isdigit() else rng.uniform(5.2, 8.8)
    radii = (size * aspect, size / aspect)
    if kind.isdigit():
        radii = (0.62 * radii[0] * rng.uniform(0.85, 1.15), radii[1])
    room = 30.0 if is_big else CELL / 2 - 0.3
    freedom = [max(0.0, min(5.0 if is_big else 4.0, room - radius)) for radius in radii]
    row, column = divmod(place, 3)
    center = ((column + 0.5) * CELL + rng.uniform(-1, 1) * freedom[0],
              (row + 0.5) * CELL + rng.uniform(-1, 1) * freedom[1])
    turn = rng.gauss(0, 0.06) if rng.random() < 0.5 else 0.0
    if kind == "triangle" and rng.random() < 0.15:
        turn += math.pi
    if kind == "star":
        turn += rng.uniform(-0.6, 0.6) if rng.random() < 0.3 else 0.0
    return Thing(kind, color, place, center, radii, rgb, turn)


def segment_glyph(rng: random.Random, digit: int) -> Image.Image:
    """A digit of straight strokes, as on a pocket calculator, of random weight."""
    scale = 64
    width, weight = rng.uniform(0.75, 1.1), rng.randint(9, 22)
    image = Image.new("L", (4 * scale, 4 * scale))
    pen = ImageDraw.Draw(image)
    for segment in DIGIT_SEGMENTS[digit]:
        ends = [(scale * (1 + width * CORNERS[i][0]), scale * (1 + CORNERS[i][1])) for i in SEGMENTS[segment]]
        pen.line(ends, fill=255, width=weight)
        for x, y in ends:
            pen.ellipse((x - weight / 2, y - weight / 2, x + weight / 2, y + weight / 2), fill=255)
    return image


def font_glyph(font: ImageFont.FreeTypeFont, digit: int) -> Image.Image:
    """A digit of a font."""
    image = Image.new("L", (256, 256))
    ImageDraw.Draw(image).text((64, 32), str(digit), font=font, fill=255)
    return image


def fitted(glyph: Image.Image) -> np.ndarray:
    """The glyph, GLYPH_HEIGHT pixels high, in the middle of a square of GLYPH_EDGE; a narrow one stays narrow."""
    glyph = glyph.crop(glyph.getbbox())
    width = min(GLYPH_HEIGHT, max(6, round(GLYPH_HEIGHT * glyph.width / glyph.height)))
    square = Image.new("L", (GLYPH_EDGE, GLYPH_EDGE))
    square.paste(glyph.resize((width, GLYPH_HEIGHT), Image.Resampling.BOX),
                 ((GLYPH_EDGE - width) // 2, (GLYPH_EDGE - GLYPH_HEIGHT) // 2))
    return np.asarray(square, dtype=np.float32) / 255


@cache
def glyphs() -> torch.Tensor:
    """[10, styles, GLYPH_EDGE, GLYPH_EDGE]: the digits in the fonts of Pillow and Matplotlib, and as segments."""
    rng = random.Random(0)
    fonts = [ImageFont.truetype(f"{get_data_path()}/fonts/ttf/{name}.ttf", 160) for name in FONTS]
    fonts += [ImageFont.load_default(160)] * 2
    rows = [[fitted(font_glyph(font, digit)) for font in fonts] + [fitted(segment_glyph(rng, digit)) for _ in range(6)]
            for digit in range(10)]
    return torch.from_numpy(np.array(rows))


class Painter:
    """Draws scenes."""

    def __init__(self, seed: int):
        self.glyphs = glyphs()
        self.random = torch.Generator().manual_seed(seed)
        line = torch.arange(EDGE) + 0.5
        self.x, self.y = line[None, None, :], line[None, :, None]

    def uniform(self, *shape: int) -> torch.Tensor:
        """Random numbers from 0 to 1."""
        return torch.rand(*shape, generator=self.random)

    def paint(self, scenes: list[Scene]) -> torch.Tensor:
        """The pictures, [scenes, 3, EDGE, EDGE], whose values are multiples of 1/255 from 0 to 1."""
        pictures = torch.tensor([scene.background for scene in scenes])[:, :, None, None].expand(-1, -1, EDGE, EDGE)
        shade = (self.uniform(len(scenes), 1, 1, 1) < 0.1) * 0.1 * (self.uniform(len(scenes), 1, 1, 1) - 0.5)
        pictures = (pictures + shade * (self.y / EDGE - 0.5)).clone()
        layers = [(index, scene, thing) for index, scene in enumerate(scenes) for thing in scene.things]
        masks, edges = self.masks(layers)
        colors = torch.tensor([thing.rgb for _, _, thing in layers])[:, :, None, None]
        for (index, _, _), mask, edge, color in zip(layers, masks, edges, colors, strict=True):
            inner = color * (1 - edge) + 0.08 * edge
            pictures[index] += mask * (inner - pictures[index])
        return self.spoil(pictures)

    def masks(self, layers: list[tuple[int, Scene, Thing]]) -> tuple[torch.Tensor, torch.Tensor]:
        """How much of each pixel each thing covers, and its outline, both [things, EDGE, EDGE]."""
        things = [thing for _, _, thing in layers]
        masks = torch.zeros(len(things), EDGE, EDGE)
        edges = torch.zeros(len(things), EDGE, EDGE)
        for kind in SHAPES:
            chosen = [i for i, thing in enumerate(things) if thing.kind == kind]
            if chosen:
                distance = self.distances(kind, [things[i] for i in chosen])
                soft = torch.tensor([layers[i][1].softness for i in chosen])[:, None, None]
                outline = torch.tensor([layers[i][1].outline for i in chosen])[:, None, None]
                masks[chosen] = (0.5 - distance / soft).clamp(0, 1)
                edges[chosen] = (0.5 + (distance + outline) / soft).clamp(0, 1) * (outline > 0)
        chosen = [i for i, thing in enumerate(things) if thing.is_digit]
        if chosen:
            masks[chosen] = self.digits([things[i] for i in chosen])
        return masks, edges

    def local(self, things: list[Thing]) -> tuple[torch.Tensor, ...]:
        """The pixels' x and y in the frame of each thing, in pixels, and the thing's radii."""
        numbers = torch.tensor([(*t.center, *t.radii, math.cos(t.turn), math.sin(t.turn)) for t in things])
        cx, cy, rx, ry, cos, sin = numbers.T[:, :, None, None]
        x, y = self.x - cx, self.y - cy
        return x * cos + y * sin, y * cos - x * sin, rx, ry

    def distances(self, kind: str, things: list[Thing]) -> torch.Tensor:
        """Distance of each pixel from the edge of each thing, negative inside; about right outside of corners."""
        x, y, rx, ry = self.local(things)
        if kind == "square":
            return torch.maximum(x.abs() - rx, y.abs() - ry)
        if kind == "circle":
            return ((x / rx) ** 2 + (y / ry) ** 2).sqrt().sub(1) * torch.minimum(rx, ry)
        if kind == "triangle":
            slope = (rx ** 2 + 4 * ry ** 2).sqrt()
            return torch.maximum(y - ry, (2 * ry * x.abs() - rx * (y + ry)) / slope)
        # A fifth of the star, from the tip to the corner between two tips, mirrored.
        step = math.pi / 5
        u, v = x / rx, y / ry
        radius = (u ** 2 + v ** 2).sqrt()
        angle = torch.atan2(u, -v).remainder(2 * step)
        angle = torch.minimum(angle, 2 * step - angle)
        inner = 0.36 + 0.14 * self.uniform(len(things), 1, 1)
        side_x, side_y = inner * math.sin(step), inner * math.cos(step) - 1
        length = (side_x ** 2 + side_y ** 2).sqrt()
        across = (side_x * (radius * torch.cos(angle) - 1) - side_y * radius * torch.sin(angle)) / length
        return across * torch.minimum(rx, ry)

    def digits(self, things: list[Thing]) -> torch.Tensor:
        """The digits' masks, in random styles and slants."""
        x, y, rx, ry = self.local(things)
        style = torch.randint(self.glyphs.shape[1], (len(things),), generator=self.random)
        glyphs = self.glyphs[torch.tensor([int(thing.kind) for thing in things]), style]
        slant = 0.3 * (self.uniform(len(things), 1, 1) - 0.5) * (self.uniform(len(things), 1, 1) < 0.5)
        scale = GLYPH_HEIGHT / GLYPH_EDGE
        # `rx` is that of a digit of usual width, 0.62 of its height; glyphs keep their own.
        grid = torch.stack([(x / (rx / 0.62) + slant * y / ry) * scale, y / ry * scale], -1)
        return F.grid_sample(glyphs[:, None], grid, align_corners=False)[:, 0].clamp(0, 1)

    def spoil(self, pictures: torch.Tensor) -> torch.Tensor:
        """Blurs some of the pictures, adds noise and changes of contrast to some, and rounds to 255 steps."""
        count = len(pictures)
        blur = (self.uniform(count, 1, 1, 1) < 0.25) * self.uniform(count, 1, 1, 1) * 0.9
        pictures = pictures + blur * (F.avg_pool2d(F.pad(pictures, (1, 1, 1, 1), mode="replicate"), 3, 1) - pictures)
        contrast = 1 - 0.12 * self.uniform(count, 1, 1, 1) * (self.uniform(count, 1, 1, 1) < 0.4)
        deviation = 0.03 * self.uniform(count, 1, 1, 1) * (self.uniform(count, 1, 1, 1) < 0.5)
        noise = torch.randn(pictures.shape, generator=self.random)
        return ((pictures * contrast + deviation * noise).clamp(0, 1) * 255).round() / 255
