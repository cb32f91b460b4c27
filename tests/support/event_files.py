"""TensorBoard's event files, read back."""

import io

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2


class Events:
    """What a log folder holds, by tag."""

    def __init__(self, folder):
        self.accumulator = EventAccumulator(
            str(folder), {"images": 0, "histograms": 0, "tensors": 0, "scalars": 0}
        )
        self.accumulator.Reload()
        tags = self.accumulator.Tags()
        self.scalars = {tag: self.accumulator.Scalars(tag) for tag in tags["scalars"]}
        self.histograms = {tag: self.accumulator.Histograms(tag) for tag in tags["histograms"]}
        self.images = {tag: self.accumulator.Images(tag) for tag in tags["images"]}
        self.texts = {
            tag.removesuffix("/text_summary"): [
                one.tensor_proto.string_val[0].decode() for one in self.tensors(tag)
            ]
            for tag in tags["tensors"]
            if tag.endswith("/text_summary")
        }

    def tensors(self, tag):
        return self.accumulator.Tensors(tag)

    def steps(self, tag):
        for kind in (self.scalars, self.histograms, self.images):
            if tag in kind:
                return [event.step for event in kind[tag]]
        raise KeyError(tag)

    def pictures(self, tag):
        """Bool arrays, white is True."""
        return [
            np.array(Image.open(io.BytesIO(one.encoded_image_string)).convert("L")) == 255
            for one in self.images[tag]
        ]

    def layout(self):
        """Regular expressions by category and chart."""
        (tensor,) = self.tensors("custom_scalars__config__")
        found = layout_pb2.Layout()
        found.ParseFromString(tensor.tensor_proto.string_val[0])
        return {
            part.title: {chart.title: list(chart.multiline.tag) for chart in part.chart}
            for part in found.category
        }

    def tags(self, start="nm/"):
        """Every tag of scalars, histograms, images and texts."""
        every = {*self.scalars, *self.histograms, *self.images, *self.texts}
        return {tag for tag in every if tag.startswith(start)}
