"""Draws scenes as a paint program would, by Pillow, and writes the picture of the demonstration.

This is another way to draw than that of the training (pictures.py), so a score on these pictures says how the model
does on those of other programs.

    python drawing.py      writes picture.png and picture.json
"""

import json
import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from pictures import Scene, Thing

HERE = Path(__file__).parent
# Drawn so many times larger, and then reduced, for smooth edges.
FINE = 4
PLAIN = {"red": (220, 30, 35), "orange": (245, 140, 20), "yellow": (250, 210, 20), "green": (30, 150, 60),
         "blue": (30, 90, 220), "purple": (130, 50, 170), "black": (20, 20, 20), "white": (250, 250, 250)}
EXAMPLE_EDGE = 240
EXAMPLE = [("circle", "red", 0), ("star", "yellow", 2), ("square", "blue", 4), ("square", "green", 6), ("7", "black", 8)]
EXAMPLE_DESCRIPTION = "a circle, a star, two squares and a digit on white"
EXAMPLE_QUESTIONS = [
    ("What colour is the star?", "The star is yellow."),
    ("How many squares are there?", "There are 2 squares."),
    ("What is in the middle?", "A blue square is in the middle."),
    ("Which digit is shown?", "The digit is 7."),
    ("Point at the circle.", "x=0.15 y=0.15"),
    ("What do you see?", "A red circle at the top left, a yellow star at the top right, a blue square in the middle, "
                         "a green square at the bottom left and the digit 7 at the bottom right."),
]


def corners(thing: Thing) -> list[tuple[float, float]]:
    """The corners of a thing that has some, around 0, with radii of 1."""
    if thing.kind == "square":
        return [(-1, -1), (1, -1), (1, 1), (-1, 1)]
    if thing.kind == "triangle":
        return [(0, -1), (1, 1), (-1, 1)]
    reach = [1 if index % 2 == 0 else 0.42 for index in range(10)]
    return [(r * math.sin(index * math.pi / 5), -r * math.cos(index * math.pi / 5)) for index, r in enumerate(reach)]


def draw(scene: Scene, size: tuple[int, int], colors: dict[str, tuple[int, int, int]] | None) -> Image.Image:
    """A picture of a scene, which is 64 x 64, in another size. Without `colors`, things have their own tints."""
    width, height = size[0] * FINE, size[1] * FINE
    across, down = width / 64, height / 64
    byte = lambda rgb: tuple(round(255 * channel) for channel in rgb)
    image = Image.new("RGB", (width, height), byte(scene.background))
    pen = ImageDraw.Draw(image)
    for thing in scene.things:
        color = colors[thing.color] if colors else byte(thing.rgb)
        (x, y), (rx, ry) = thing.center, thing.radii
        box = [(x - rx) * across, (y - ry) * down, (x + rx) * across, (y + ry) * down]
        if thing.is_digit:
            font = ImageFont.load_default(round(2.2 * ry * down))
            pen.text((x * across, y * down), thing.kind, font=font, fill=color, anchor="mm")
        elif thing.kind == "circle":
            pen.ellipse(box, fill=color)
        else:
            pen.polygon([((x + u * rx) * across, (y + v * ry) * down) for u, v in corners(thing)], fill=color)
    return image.resize(size, Image.Resampling.BOX)


def example() -> Scene:
    """The scene of the demonstration."""
    third = 64 / 3
    scene = Scene()
    for kind, color, place in EXAMPLE:
        row, column = divmod(place, 3)
        # The star is a little larger, because most of its box is empty.
        radius = 8.6 if kind == "star" else 7.6
        scene.things.append(Thing(kind, color, place, ((column + 0.5) * third, (row + 0.5) * third), (radius, radius)))
    return scene


def main() -> None:
    """Writes the files of the demonstration."""
    image = draw(example(), (EXAMPLE_EDGE, EXAMPLE_EDGE), PLAIN)
    image.save(HERE / "picture.png", optimize=True)
    questions = [{"q": question, "a": answer} for question, answer in EXAMPLE_QUESTIONS]
    example_json = {"description": EXAMPLE_DESCRIPTION, "questions": questions}
    (HERE / "picture.json").write_text(json.dumps(example_json, indent=2) + "\n")


if __name__ == "__main__":
    main()
