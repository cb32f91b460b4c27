"""Run the program of a Core ML package by torch, for the few operators of the tests' models: no Mac is needed."""

import torch
import torch.nn.functional as F

from lightning_nm.export import CoreMLPackage


class Program:
    """The operators of a package in their order."""

    def __init__(self, path):
        import coremltools  # an extra, without which this module is imported, too

        self.package = CoreMLPackage(path)
        spec = coremltools.models.utils.load_spec(str(path))
        (function,) = spec.mlProgram.functions.values()
        (self.block,) = function.block_specializations.values()
        (self.input,) = [each.name for each in spec.description.input]

    def __call__(self, x):
        values = {self.input: x}
        for operation in self.block.operations:
            (output,) = operation.outputs
            if operation.type in ("const", "constexpr_sparse_to_dense"):
                values[output.name] = self.constant(output.name, operation)
            else:
                arguments = {
                    name: self.argument(each.arguments[0], values)
                    for name, each in operation.inputs.items()
                }
                values[output.name] = OPERATORS[operation.type](**arguments)
        (result,) = self.block.outputs
        return values[result]

    def constant(self, name, operation):
        if name in self.package.weights:
            return self.package.read(name)
        return self.value(operation.attributes["val"])

    def argument(self, binding, values):
        is_name = binding.WhichOneof("binding") == "name"
        return values[binding.name] if is_name else self.value(binding.value)

    def value(self, value):
        """A vector of weights, or the plain value of an option."""
        if value.HasField("blobFileValue"):
            return self.package._tensor(value)
        tensor = value.immediateValue.tensor
        content = list(getattr(tensor, tensor.WhichOneof("value")).values)
        if tensor.HasField("floats"):
            return torch.tensor(content)
        # A scalar has no dimensions.
        return content if value.type.tensorType.rank else content[0]


def conv(x, weight, bias, strides, pad_type, pad, dilations, groups):
    assert pad_type == "custom"
    top, bottom, left, right = pad
    assert (top, left) == (bottom, right)
    return F.conv2d(x, weight, bias, strides, (top, left), dilations, groups)


OPERATORS = {
    "conv": conv,
    "linear": lambda x, weight, bias: F.linear(x, weight, bias),
    "matmul": lambda x, y, transpose_x, transpose_y: torch.matmul(
        x.mT if transpose_x else x, y.mT if transpose_y else y
    ),
    "relu": lambda x: F.relu(x),
    "reshape": lambda x, shape: x.reshape(shape),
}
