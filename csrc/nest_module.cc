// SPDX-License-Identifier: Apache-2.0
// The module `nest`: functions on nests of Python objects. Bindings only.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "nest.h"
#include "python_nest.h"

namespace py = pybind11;
using torchbeast::Nest;

namespace {

using PyNest = Nest<py::object>;

PyNest to_nest(const py::object& object) {
  return torchbeast::nest_from_python<py::object>(
      object, [](py::handle leaf) { return py::reinterpret_borrow<py::object>(leaf); });
}

py::object from_nest(const PyNest& nest) {
  return torchbeast::nest_to_python(nest, [](const py::object& leaf) { return leaf; });
}

py::object map(const py::function& f, const py::object& n) {
  return from_nest(to_nest(n).map([&](const py::object& leaf) { return f(leaf); }));
}

// A nest like the given ones; each leaf is `combine(list of their leaves at that place)`.
template <class Combine>
py::object map_together(const std::vector<py::object>& objects, Combine&& combine) {
  if (objects.empty()) throw py::value_error("map_many needs at least one nest");
  std::vector<PyNest> nests;
  std::vector<std::vector<py::object>> leaves;
  for (const py::object& object : objects) {
    nests.push_back(to_nest(object));
    leaves.push_back(nests.back().flatten());
    if (!nests.back().same_structure(nests[0])) {
      throw py::value_error("the nests differ in structure: " + std::string(py::repr(objects[0])) +
                            " and " + std::string(py::repr(object)));
    }
  }
  size_t place = 0;
  return from_nest(nests[0].map([&](const py::object&) -> py::object {
    py::list together;
    for (const auto& flat : leaves) together.append(flat[place]);
    ++place;
    return combine(together);
  }));
}

}  // namespace

PYBIND11_MODULE(nest, m) {
  m.doc() =
      "Functions on nests: tuples, lists and dicts (with strings as keys) of leaves, which may be "
      "anything else. Lists come back as tuples, dicts as new dicts, in the order of their keys.";
  m.def("map", &map, py::arg("f"), py::arg("n"), "A nest like n with f(leaf) for each leaf.");
  m.def(
      "map_many",
      [](const py::function& f, const py::args& n) {
        std::vector<py::object> objects;
        for (py::handle object : n) objects.push_back(py::reinterpret_borrow<py::object>(object));
        return map_together(objects, [&](const py::list& leaves) { return f(leaves); });
      },
      py::arg("f"),
      "A nest like the given ones with f([leaf of the first nest, leaf of the second, ...]).");
  m.def(
      "map_many2",
      [](const py::function& f, const py::object& n1, const py::object& n2) {
        return map_together({n1, n2},
                            [&](const py::list& leaves) { return f(*py::tuple(leaves)); });
      },
      py::arg("f"), py::arg("n1"), py::arg("n2"),
      "A nest like n1 and n2 with f(leaf of n1, leaf of n2).");
  m.def(
      "flatten", [](const py::object& n) { return to_nest(n).flatten(); }, py::arg("n"),
      "The leaves as a list.");
  m.def(
      "pack_as",
      [](const py::object& n, std::vector<py::object> flat) {
        return from_nest(to_nest(n).pack(std::move(flat)));
      },
      py::arg("n"), py::arg("flat"), "A nest like n with the leaves in the list flat.");
  m.def(
      "front", [](const py::object& n) { return to_nest(n).front(); }, py::arg("n"),
      "The first leaf.");
}
