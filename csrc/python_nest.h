// SPDX-License-Identifier: Apache-2.0
// Converts between Python's nests (tuples, lists and dicts) and ours. All of it needs the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "nest.h"

namespace torchbeast {

// A nest of what `leaf_of` makes of each Python object that is no tuple, list or dict. Raises
// ValueError for a nest that is too deep, TypeError for a key that is no string.
template <class T, class LeafOf>
Nest<T> nest_from_python(pybind11::handle object, LeafOf&& leaf_of, int depth = 1) {
  namespace py = pybind11;
  constexpr int kMaxDepth = 100;
  if (depth > kMaxDepth) {
    throw py::value_error("a nest is more than " + std::to_string(kMaxDepth) +
                          " levels deep; does it hold itself?");
  }
  if (py::isinstance<py::tuple>(object) || py::isinstance<py::list>(object)) {
    typename Nest<T>::Tuple tuple;
    for (py::handle item : object) tuple.push_back(nest_from_python<T>(item, leaf_of, depth + 1));
    return tuple;
  }
  if (py::isinstance<py::dict>(object)) {
    typename Nest<T>::Dict dict;
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(object)) {
      if (!py::isinstance<py::str>(key)) throw py::type_error("the keys of a nest must be strings");
      dict.emplace(py::cast<std::string>(key), nest_from_python<T>(value, leaf_of, depth + 1));
    }
    return dict;
  }
  return leaf_of(object);
}

// Tuples and dicts of what `to_object` makes of each leaf.
template <class T, class ToObject>
pybind11::object nest_to_python(const Nest<T>& nest, ToObject&& to_object) {
  namespace py = pybind11;
  if (nest.is_leaf()) return to_object(nest.leaf());
  if (nest.is_tuple()) {
    py::tuple tuple(nest.tuple().size());
    for (size_t i = 0; i < nest.tuple().size(); ++i) {
      tuple[i] = nest_to_python(nest.tuple()[i], to_object);
    }
    return tuple;
  }
  py::dict dict;
  for (const auto& [key, value] : nest.dict()) {
    dict[py::str(key)] = nest_to_python(value, to_object);
  }
  return dict;
}

}  // namespace torchbeast
