"""Run the program of a Core ML package by torch, for the few operators of the tests' models: no Mac is needed."""

import torch
import torch.nn.functional as F

from lightning_nm.export import CoreMLPackage


class Program:
    """The operators of a package in their order."""

    def __init__(self, path):
        import coremltools  # an extra, without which this module is imported, too
        from coremltools.converters.mil.frontend.milproto.load import load

        self.package = CoreMLPackage(path)
        model = coremltools.models.MLModel(str(path), skip_model_load=True)
        spec = model.get_spec()
        program = load(spec, spec.specificationVersion, model.weights_dir)
        (self.block,) = program.functions.values()
        (self.input,) = self.block.inputs

    def __call__(self, x):
        values = {self.input: x}
        for operation in self.block.operations:
            (output,) = operation.outputs
            if output.name in self.package.weights:
                values[output.name] = self.package.read(output.name)
            elif operation.op_type == "const":
                value = output.val
                is_float = getattr(value, "dtype", None) == "float32"
                values[output.name] = torch.tensor(value) if is_float else value
            elif not operation.op_type.startswith("constexpr"):
                arguments = {name: values[each.name] for name, each in operation.inputs.items()}
                values[output.name] = OPERATORS[operation.op_type](**arguments)
        (result,) = self.block.outputs
        return values[result.name]


def conv(x, weight, bias, strides, pad_type, pad, dilations, groups):
    assert pad_type == "custom"
    top, bottom, left, right = map(int, pad)
    assert (top, left) == (bottom, right)
    strides, dilations = (tuple(map(int, each)) for each in (strides, dilations))
    return F.conv2d(x, weight, bias, strides, (top, left), dilations, int(groups))


OPERATORS = {
    "conv": conv,
    "linear": lambda x, weight, bias: F.linear(x, weight, bias),
    "matmul": lambda x, y, transpose_x, transpose_y: torch.matmul(
        x.mT if transpose_x else x, y.mT if transpose_y else y
    ),
    "relu": lambda x: F.relu(x),
    "reshape": lambda x, shape: x.reshape(tuple(map(int, shape))),
}
