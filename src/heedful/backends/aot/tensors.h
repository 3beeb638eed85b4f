// Tensors of compiled graphs, which torch's C interface passes to kernels.
#pragma once
#include <cstdint>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "products.h"

namespace {
template <class T>
AOTITorchError data(AtenTensorHandle tensor, T*& pointer) {
  void* found;
  const auto error = aoti_torch_get_data_ptr(tensor, &found);
  pointer = static_cast<T*>(found);
  return error;
}

// A new float32 tensor (rows, width).
inline AOTITorchError new_matrix(int64_t rows, int64_t width, AtenTensorHandle* tensor) {
  const int64_t shape[] = {rows, width}, strides[] = {width, 1};
  return aoti_torch_empty_strided(2, shape, strides, aoti_torch_dtype_float32(),
                                  aoti_torch_device_type_cpu(), 0, tensor);
}

// The layer of the tensors of a `kernels.PackedInt8Linear`; K is four times the second size of the
// weight.
inline AOTITorchError read(AtenTensorHandle weight, AtenTensorHandle scale, AtenTensorHandle shift,
                           AtenTensorHandle bias, Int8Layer& layer) {
  if (auto error = aoti_torch_get_size(weight, 1, &layer.inputs)) return error;
  layer.inputs *= 4;
  if (auto error = aoti_torch_get_size(bias, 0, &layer.outputs)) return error;
  return data(weight, layer.weight) || data(scale, layer.scale) || data(shift, layer.shift) ||
         data(bias, layer.bias);
}
}  // namespace
