// SPDX-License-Identifier: Apache-2.0
#include "python_arrays.h"

#include <pybind11/gil_safe_call_once.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dlpack.h"
#include "python_nest.h"

namespace py = pybind11;

namespace torchbeast {

namespace {

struct Dtypes {
  DType dtype;
  dlpack::DataType type;
};

constexpr Dtypes kDtypes[] = {
    {DType::kBool, {dlpack::kBool, 8, 1}},       {DType::kUInt8, {dlpack::kUInt, 8, 1}},
    {DType::kUInt16, {dlpack::kUInt, 16, 1}},    {DType::kUInt32, {dlpack::kUInt, 32, 1}},
    {DType::kUInt64, {dlpack::kUInt, 64, 1}},    {DType::kInt8, {dlpack::kInt, 8, 1}},
    {DType::kInt16, {dlpack::kInt, 16, 1}},      {DType::kInt32, {dlpack::kInt, 32, 1}},
    {DType::kInt64, {dlpack::kInt, 64, 1}},      {DType::kFloat16, {dlpack::kFloat, 16, 1}},
    {DType::kFloat32, {dlpack::kFloat, 32, 1}},  {DType::kFloat64, {dlpack::kFloat, 64, 1}},
    {DType::kBFloat16, {dlpack::kBfloat, 16, 1}}};

// Torch's functions, imported once: a module's attributes are slow to look up.
struct Torch {
  py::object tensor_type;
  py::object to_dlpack;
  py::object from_dlpack;
};

const Torch& torch() {
  // Not a C++ static: its lock would be held while the import waits for the GIL.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> functions;
  return functions
      .call_once_and_store_result([] {
        const py::module_ module = py::module_::import("torch");
        const py::module_ dlpack = py::module_::import("torch.utils.dlpack");
        return Torch{module.attr("Tensor"), dlpack.attr("to_dlpack"), dlpack.attr("from_dlpack")};
      })
      .get_stored();
}

py::object export_dlpack(py::handle object) {
  if (!py::isinstance(object, torch().tensor_type)) {
    if (!py::hasattr(object, "__dlpack__")) {
      throw py::type_error("a leaf should be a tensor, but is " +
                           std::string(py::str(py::type::of(object))));
    }
    try {
      return object.attr("__dlpack__")();
    } catch (py::error_already_set& error) {
      // NumPy does not export read-only arrays.
      if (!error.matches(PyExc_BufferError) || !py::hasattr(object, "copy")) throw;
      return object.attr("copy")().attr("__dlpack__")();
    }
  }
  // DLPack knows no lazy negation, as x.conj().imag has it; resolve_neg returns most as they are.
  if (object.attr("requires_grad").cast<bool>()) {
    return torch().to_dlpack(object.attr("detach")().attr("resolve_neg")());
  }
  return torch().to_dlpack(object.attr("resolve_neg")());
}

Array import_dlpack(py::handle object) {
  py::object capsule;
  try {
    capsule = export_dlpack(object);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_BufferError) && !error.matches(PyExc_RuntimeError)) throw;
    throw py::value_error("a leaf cannot be used: " + py::str(error.value()).cast<std::string>());
  }
  auto* managed =
      static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  // From here on we own the tensor.
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  const std::shared_ptr<dlpack::ManagedTensor> owner(managed, [](dlpack::ManagedTensor* tensor) {
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
  });

  const dlpack::Tensor& tensor = managed->tensor;
  if (tensor.device.type != dlpack::kCPU && tensor.device.type != dlpack::kCUDAHost) {
    throw py::value_error("a tensor is on another device than the CPU; call .cpu() on it");
  }
  const Dtypes* found = nullptr;
  for (const Dtypes& entry : kDtypes) {
    if (entry.type.code == tensor.dtype.code && entry.type.bits == tensor.dtype.bits &&
        tensor.dtype.lanes == 1) {
      found = &entry;
    }
  }
  if (found == nullptr) throw py::value_error("a tensor has a dtype that is not supported");

  const Shape shape(tensor.shape, tensor.shape + tensor.ndim);
  auto* data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  Array array{found->dtype, shape, MemoryPool::Block(owner, data)};
  if (tensor.strides != nullptr) {
    const std::vector<int64_t> strides(tensor.strides, tensor.strides + tensor.ndim);
    int64_t expected = 1;
    bool c_order = true;
    for (size_t d = shape.size(); d-- > 0;) {
      c_order = c_order && (shape[d] == 1 || strides[d] == expected);
      expected *= shape[d];
    }
    if (!c_order && expected > 0) {
      static const auto* const pool = new auto(std::make_shared<MemoryPool>());
      return copy_strided(found->dtype, shape, strides, data, **pool);
    }
  }
  return array;
}

// The data that an exported tensor keeps alive.
struct Export {
  dlpack::ManagedTensor managed;
  Array array;
  std::vector<int64_t> strides;
};

py::object export_array(const Array& array) {
  auto* exported = new Export{{}, array, std::vector<int64_t>(array.shape.size())};
  int64_t stride = 1;
  for (size_t d = array.shape.size(); d-- > 0;) {
    exported->strides[d] = stride;
    stride *= std::max<int64_t>(array.shape[d], 1);
  }
  dlpack::ManagedTensor& managed = exported->managed;
  managed.tensor.data = array.data.get();
  managed.tensor.device = {dlpack::kCPU, 0};
  managed.tensor.ndim = static_cast<int32_t>(array.shape.size());
  managed.tensor.dtype = kDtypes[static_cast<size_t>(array.dtype)].type;
  managed.tensor.shape = exported->array.shape.data();
  managed.tensor.strides = exported->strides.data();
  managed.context = exported;
  managed.deleter = [](dlpack::ManagedTensor* tensor) {
    delete static_cast<Export*>(tensor->context);
  };
  const py::object capsule =
      py::reinterpret_steal<py::object>(PyCapsule_New(&managed, "dltensor", [](PyObject* unused) {
        if (PyCapsule_IsValid(unused, "dltensor")) {
          auto* tensor =
              static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(unused, "dltensor"));
          tensor->deleter(tensor);
        }
      }));
  if (!capsule) {
    delete exported;
    throw py::error_already_set();
  }
  return torch().from_dlpack(capsule);
}

// Pinned memory, allocated by torch.
MemoryPool::Block allocate_pinned(size_t num_bytes) {
  py::gil_scoped_acquire gil;
  const py::module_ torch = py::module_::import("torch");
  auto* tensor = new py::object(torch.attr("empty")(
      num_bytes, py::arg("dtype") = torch.attr("uint8"), py::arg("pin_memory") = true));
  auto* pointer = reinterpret_cast<std::byte*>(tensor->attr("data_ptr")().cast<uintptr_t>());
  return MemoryPool::Block(pointer, [tensor](std::byte*) {
    py::gil_scoped_acquire gil;
    delete tensor;
  });
}

}  // namespace

Nest<Array> from_python(py::handle nest) { return nest_from_python<Array>(nest, import_dlpack); }

py::object to_python(const Nest<Array>& nest) { return nest_to_python(nest, export_array); }

std::shared_ptr<MemoryPool> make_pinned_pool() {
  allocate_pinned(1);
  return std::make_shared<MemoryPool>(allocate_pinned);
}

}  // namespace torchbeast
