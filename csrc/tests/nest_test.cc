// SPDX-License-Identifier: Apache-2.0
#include "nest.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"

using torchbeast::Nest;

namespace {

using Ints = Nest<int>;

// (1, {a: 2, b: (3,)}, ())
Ints example() {
  return Ints::Tuple{1, Ints::Dict{{"b", Ints::Tuple{3}}, {"a", 2}}, Ints::Tuple{}};
}

TEST(a_nest_is_a_leaf_a_tuple_or_a_dict) {
  const Ints nest = example();
  CHECK(nest.is_tuple() && !nest.is_leaf() && !nest.is_dict());
  CHECK(nest.tuple()[0].is_leaf() && nest.tuple()[0].leaf() == 1);
  CHECK(nest.tuple()[1].is_dict() && nest.tuple()[1].dict().at("a").leaf() == 2);
  CHECK(Ints().is_tuple() && Ints().tuple().empty());
}

TEST(leaves_come_in_order_dicts_by_their_keys) {
  CHECK((example().flatten() == std::vector<int>{1, 2, 3}));
  std::vector<int> seen;
  example().for_each([&](int leaf) { seen.push_back(leaf); });
  CHECK(seen == example().flatten());
  CHECK(Ints(7).flatten() == std::vector<int>{7});
}

TEST(map_keeps_the_structure) {
  const Nest<std::string> texts = example().map([](int leaf) { return std::to_string(leaf * 10); });
  CHECK(texts.same_structure(example()));
  CHECK((texts.flatten() == std::vector<std::string>{"10", "20", "30"}));
}

TEST(front_is_the_first_leaf_even_behind_empty_parts) {
  CHECK(example().front() == 1);
  const Ints nest = Ints::Tuple{Ints::Tuple{}, Ints::Dict{}, Ints::Dict{{"x", 5}}};
  CHECK(nest.front() == 5);
  CHECK(!nest.empty());
}

TEST(a_nest_without_leaves_is_empty_and_has_no_front) {
  const Ints nest = Ints::Tuple{Ints::Tuple{}, Ints::Dict{{"x", Ints::Tuple{}}}};
  CHECK(nest.empty());
  CHECK_THROWS(std::invalid_argument, nest.front());
}

TEST(pack_takes_as_many_leaves_as_there_are) {
  const Ints packed = example().pack(std::vector<int>{7, 8, 9});
  CHECK(packed.same_structure(example()));
  CHECK((packed.flatten() == std::vector<int>{7, 8, 9}));
  CHECK_THROWS(std::invalid_argument, example().pack(std::vector<int>{7, 8}));
  CHECK_THROWS(std::invalid_argument, example().pack(std::vector<int>{7, 8, 9, 10}));
}

TEST(structures_differ_in_kind_length_and_keys) {
  const auto differ = [](const Ints& a, const Ints& b) {
    return !a.same_structure(b) && !b.same_structure(a);
  };
  CHECK(differ(1, Ints::Tuple{1}));
  CHECK(differ(1, Ints::Tuple{}));
  CHECK(differ(Ints::Tuple{}, Ints::Dict{}));
  CHECK(Ints(Ints::Tuple{}).same_structure(Ints(Ints::Dict{}), true));
  CHECK(!Ints(Ints::Tuple{}).same_structure(Ints(1), true));
  CHECK(differ(Ints::Tuple{}, Ints::Dict{{"a", 1}}));
  CHECK(differ(Ints::Tuple{1}, Ints::Tuple{1, 2}));
  CHECK(differ(Ints::Dict{{"a", 1}}, Ints::Dict{{"b", 1}}));
  CHECK(differ(Ints::Dict{{"a", 1}}, Ints::Dict{{"a", 1}, {"b", 1}}));
  CHECK(differ(Ints::Tuple{Ints(Ints::Tuple{1})}, Ints::Tuple{1}));
}

}  // namespace
