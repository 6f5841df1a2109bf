"""Tests `stolon serve` with Moondream's Python client: python moondream_client.py path/to/stolon

Needs the packages `moondream` and `openai`. Uses random models of the structures of Moondream 2
and 3 and needs no network. Fails with an exception at the first reply that differs from what Moondream's API
specifies.
"""

import json
import sys
import urllib.error

import moondream
from openai_client import start
from PIL import Image

SETTINGS = {"temperature": 0, "max_tokens": 9}


def picture(width, height):
    image = Image.new("RGB", (width, height))
    places = ((x, y) for y in range(height) for x in range(width))
    image.putdata([(x * 5 % 256, y * 3 % 256, x * y % 256) for x, y in places])
    return image


def check_query(model):
    image = picture(90, 60)
    whole = model.query(image, "What is this?", settings=SETTINGS)
    assert set(whole) == {"answer"} and isinstance(whole["answer"], str), whole
    pieces = list(model.query(image, "What is this?", stream=True, settings=SETTINGS)["answer"])
    assert "".join(pieces) == whole["answer"], pieces
    # An image that was encoded by the client is the same one.
    again = model.query(model.encode_image(image), "What is this?", settings=SETTINGS)
    assert again == whole, again
    places = [[0.5, 0.25], [0.1, 0.2, 0.3, 0.9]]
    about = model.query(image, "What is this?", settings=SETTINGS, spatial_refs=places)
    assert isinstance(about["answer"], str), about
    alone = model.query(question="What is this?", settings=SETTINGS)
    assert isinstance(alone["answer"], str)
    assert isinstance(model.query(image, "What is this?")["answer"], str)


def check_caption(model):
    image = picture(30, 80)
    for length in ("short", "normal", "long"):
        whole = model.caption(image, length=length, settings=SETTINGS)
        ask = dict(length=length, settings=SETTINGS)
        pieces = list(model.caption(image, stream=True, **ask)["caption"])
        assert "".join(pieces) == whole["caption"], (length, whole, pieces)


def check_regions(model):
    image = picture(120, 80)
    points = model.point(image, "cat", settings={"max_objects": 5})["points"]
    assert 0 < len(points) <= 5, points
    for point in points:
        assert set(point) == {"x", "y"} and all(0 <= value <= 1 for value in point.values()), point
    objects = model.detect(image, "cat", settings={"max_objects": 5})["objects"]
    assert 0 < len(objects) <= 5, objects
    for region in objects:
        assert set(region) == {"x_min", "y_min", "x_max", "y_max"}, region
        assert 0 <= region["x_min"] <= region["x_max"] <= 1, region
        assert 0 <= region["y_min"] <= region["y_max"] <= 1, region
    assert model.detect(image, "cat", settings={"max_objects": 5})["objects"] == objects
    assert isinstance(model.point(image, "dog")["points"], list)


def refusal(request):
    try:
        request()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]
    raise AssertionError("the request was not refused")


def check_reasoning(model):
    ask = dict(reasoning=True, settings={"temperature": 0, "max_tokens": 99})
    for image in (picture(90, 60), None):
        whole = model.query(image, "Where?", **ask)
        assert set(whole) == {"answer", "reasoning"} and isinstance(whole["answer"], str), whole
        reasoning = whole["reasoning"]
        assert set(reasoning) == {"text", "grounding"} and reasoning["text"], reasoning
        for part in reasoning["grounding"]:
            assert 0 <= part["start_idx"] <= part["end_idx"] <= len(reasoning["text"]), part
            assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in part["points"]), part
        pieces = list(model.query(image, "Where?", stream=True, **ask)["answer"])
        assert "".join(pieces) == whole["answer"], pieces


def check_refusals(url, model):
    code, error = refusal(lambda: model.query(picture(9, 9), " "))
    assert (code, error["param"]) == (400, "question"), error
    other = moondream.vl(endpoint=url + "/v1", api_key="secret", model="another")
    assert other.query(question="What?")["answer"], "any name stands for the only model"
    for key in (None, "wrong"):
        stranger = moondream.vl(endpoint=url + "/v1", api_key=key)
        assert refusal(lambda: stranger.query(question="What?"))[0] == 401, key


def check(binary, name):
    server, url = start(binary, ["--model", name, "--api-key", "secret"])
    try:
        model = moondream.vl(endpoint=url + "/v1", api_key="secret")
        check_query(model)
        check_caption(model)
        check_regions(model)
        if "moondream3" in name:
            check_reasoning(model)
        else:
            code, error = refusal(lambda: model.query(question="Where?", reasoning=True))
            assert (code, error["param"]) == (400, "reasoning"), error
        check_refusals(url, model)
    finally:
        server.terminate()
        server.wait(timeout=60)


def main():
    for name in ("random:moondream2-tiny", "random:moondream3-tiny"):
        check(sys.argv[1], name)
    print("moondream", moondream.__version__, "works")


if __name__ == "__main__":
    main()
