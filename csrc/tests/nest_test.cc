// SPDX-License-Identifier: Apache-2.0
#include "nest.h"

#include "check.h"

using torchbeast::Nest;

namespace {

using Ints = Nest<int>;

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
