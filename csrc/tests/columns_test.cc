// SPDX-License-Identifier: Apache-2.0
#include "columns.h"

#include <stdexcept>

#include "check.h"

namespace torchbeast {
namespace {

using Arrays = Nest<Array>;

TEST(all_arrays_of_a_nest_have_as_many_columns) {
  const Array two = int64_array({1, 2}, {1, 2});
  const Array three = int64_array({1, 3}, {1, 2, 3});
  CHECK(count_columns(Arrays::Tuple{two, Arrays::Dict{{"a", two}}}, 1) == 2);
  CHECK(count_columns(Arrays::Tuple{two, three}, 0) == 1);
  CHECK(count_columns(int64_array({1, 0}, {}), 1) == 0);
  CHECK_THROWS(std::invalid_argument, count_columns(Arrays::Tuple{two, three}, 1));
  CHECK_THROWS(std::invalid_argument, count_columns(two, 2));
  CHECK_THROWS(std::invalid_argument, count_columns(int64_array({}, {1}), 0));
  CHECK_THROWS(std::invalid_argument, count_columns(Arrays(), 1));
  CHECK_THROWS(std::invalid_argument, count_columns(Arrays::Tuple{Arrays::Dict{}}, 1));
}

TEST(nests_are_joined_leaf_by_leaf) {
  const auto pool = new_pool();
  const Arrays a = Arrays::Tuple{int64_array({1, 2}, {1, 2}), int64_array({1, 2, 1}, {3, 4})};
  const Arrays b = Arrays::Tuple{int64_array({1, 2}, {5, 6}), int64_array({1, 2, 1}, {7, 8})};
  const Arrays joined = join_columns({{a, 0, 2}, {b, 1, 2}}, 1, *pool);
  CHECK((values_of(joined.tuple().at(0).leaf()) == Values{1, 2, 6}));
  CHECK((values_of(joined.tuple().at(1).leaf()) == Values{3, 4, 8}));
  CHECK((joined.tuple().at(1).leaf().shape == Shape{1, 3, 1}));
  CHECK(join_columns({{Arrays(), 0, 1}, {Arrays(), 0, 1}}, 1, *pool).empty());
}

TEST(nests_that_differ_are_not_joined) {
  const auto pool = new_pool();
  const Array array = int64_array({1, 2}, {1, 2});
  const Arrays pair = Arrays::Tuple{array, array};
  CHECK_THROWS(std::invalid_argument, join_columns({{pair, 0, 2}, {array, 0, 2}}, 1, *pool));
  const Array floats{DType::kFloat64, array.shape, array.data};
  CHECK_THROWS(std::invalid_argument, join_columns({{array, 0, 2}, {floats, 0, 2}}, 1, *pool));
}

TEST(columns_are_repeated) {
  const auto pool = new_pool();
  const Arrays state = Arrays::Tuple{int64_array({2, 1}, {1, 2})};
  const Arrays repeated = repeat_columns(state, 3, 1, *pool);
  CHECK((repeated.front().shape == Shape{2, 3}));
  CHECK((values_of(repeated.front()) == Values{1, 1, 1, 2, 2, 2}));
  CHECK(repeat_columns(Arrays(), 3, 1, *pool).same_structure(Arrays()));
}

}  // namespace
}  // namespace torchbeast
