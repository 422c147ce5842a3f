// SPDX-License-Identifier: Apache-2.0
// Nests: tuples and dicts of leaves or of further nests.
#pragma once

#include <cstddef>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace torchbeast {

// A leaf, a tuple or a dict. Dicts are ordered by their keys, so flattening has one order.
template <class T>
class Nest {
 public:
  using Tuple = std::vector<Nest>;
  using Dict = std::map<std::string, Nest>;

  Nest() : value_(Tuple()) {}
  Nest(T leaf) : value_(std::move(leaf)) {}        // NOLINT: a leaf is a nest
  Nest(Tuple tuple) : value_(std::move(tuple)) {}  // NOLINT
  Nest(Dict dict) : value_(std::move(dict)) {}     // NOLINT

  bool is_leaf() const { return std::holds_alternative<T>(value_); }
  bool is_tuple() const { return std::holds_alternative<Tuple>(value_); }
  bool is_dict() const { return std::holds_alternative<Dict>(value_); }
  const T& leaf() const { return std::get<T>(value_); }
  T& leaf() { return std::get<T>(value_); }
  const Tuple& tuple() const { return std::get<Tuple>(value_); }
  Tuple& tuple() { return std::get<Tuple>(value_); }
  const Dict& dict() const { return std::get<Dict>(value_); }
  Dict& dict() { return std::get<Dict>(value_); }

  // Call `function` with each leaf, in order.
  template <class Function>
  void for_each(Function&& function) const {
    if (is_leaf()) {
      function(leaf());
    } else if (is_tuple()) {
      for (const Nest& nest : tuple()) nest.for_each(function);
    } else {
      for (const auto& item : dict()) item.second.for_each(function);
    }
  }

  // A nest of the same structure that holds `function(leaf)`.
  template <class Function>
  auto map(Function&& function) const {
    using Result = Nest<decltype(function(std::declval<const T&>()))>;
    if (is_leaf()) return Result(function(leaf()));
    if (is_tuple()) {
      typename Result::Tuple result;
      result.reserve(tuple().size());
      for (const Nest& nest : tuple()) result.push_back(nest.map(function));
      return Result(std::move(result));
    }
    typename Result::Dict result;
    for (const auto& [key, nest] : dict()) result.emplace(key, nest.map(function));
    return Result(std::move(result));
  }

  std::vector<T> flatten() const {
    std::vector<T> leaves;
    for_each([&](const T& leaf) { leaves.push_back(leaf); });
    return leaves;
  }

  // The first leaf. Throws std::invalid_argument where there is none.
  const T& front() const {
    const T* first = find_front();
    if (first == nullptr) throw std::invalid_argument("the nest is empty: it has no leaf");
    return *first;
  }

  bool empty() const { return find_front() == nullptr; }

  // Of a tuple or a dict; 0 for a leaf.
  size_t num_items() const {
    if (is_leaf()) return 0;
    return is_tuple() ? tuple().size() : dict().size();
  }

  // A nest of this structure that holds `leaves`. Throws std::invalid_argument where there are too
  // many or too few of them.
  template <class U>
  Nest<U> pack(std::vector<U> leaves) const {
    size_t next = 0;
    Nest<U> result = map([&](const T&) -> U {
      if (next == leaves.size()) {
        throw std::invalid_argument("too few leaves to fill the nest: " + std::to_string(next));
      }
      return std::move(leaves[next++]);
    });
    if (next < leaves.size()) {
      throw std::invalid_argument("too many leaves for the nest: it takes " + std::to_string(next) +
                                  ", not " + std::to_string(leaves.size()));
    }
    return result;
  }

  // `on_wire`: where an empty tuple is like an empty dict.
  template <class U>
  bool same_structure(const Nest<U>& other, bool on_wire = false) const {
    if (is_leaf() || other.is_leaf()) return is_leaf() && other.is_leaf();
    if (on_wire && num_items() == 0 && other.num_items() == 0) return true;
    if (is_tuple()) {
      if (!other.is_tuple() || tuple().size() != other.tuple().size()) return false;
      for (size_t i = 0; i < tuple().size(); ++i) {
        if (!tuple()[i].same_structure(other.tuple()[i], on_wire)) return false;
      }
      return true;
    }
    if (!other.is_dict() || dict().size() != other.dict().size()) return false;
    auto theirs = other.dict().begin();
    for (const auto& [key, nest] : dict()) {
      if (key != theirs->first || !nest.same_structure(theirs->second, on_wire)) return false;
      ++theirs;
    }
    return true;
  }

 private:
  const T* find_front() const {
    if (is_leaf()) return &leaf();
    if (is_tuple()) {
      for (const Nest& nest : tuple()) {
        if (const T* first = nest.find_front()) return first;
      }
      return nullptr;
    }
    for (const auto& item : dict()) {
      if (const T* first = item.second.find_front()) return first;
    }
    return nullptr;
  }

  std::variant<T, Tuple, Dict> value_;
};

}  // namespace torchbeast
