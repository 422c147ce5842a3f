// SPDX-License-Identifier: Apache-2.0
// Converts between Python's tensors and our arrays, by DLPack. All of it needs the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "array.h"
#include "nest.h"

namespace torchbeast {

// Arrays that share the memory of torch tensors (or of other objects with __dlpack__, such as
// NumPy's arrays) in a nest of tuples, lists and dicts. Tensors that are not in C order are copied;
// gradients are dropped. Raises TypeError for other leaves, ValueError for other devices and
// dtypes.
Nest<Array> from_python(pybind11::handle nest);

// Torch tensors that share the memory of the arrays.
pybind11::object to_python(const Nest<Array>& nest);

// A pool of pinned memory, which GPUs copy from faster. Raises RuntimeError without a GPU.
std::shared_ptr<MemoryPool> make_pinned_pool();

}  // namespace torchbeast
