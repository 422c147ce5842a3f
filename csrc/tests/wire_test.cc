// SPDX-License-Identifier: Apache-2.0
#include "wire.h"

#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "steps.h"

namespace torchbeast {
namespace {

using Arrays = Nest<Array>;
using Views = Nest<ArrayView>;

Views views_of(const Arrays& arrays) {
  return arrays.map([](const Array& array) { return array.view(); });
}

template <class T>
std::string bytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// A row of n environments with frames [n, 3].
rpcenv::Step valid_step(int n) {
  rpcenv::Step step = make_step(n, 5);
  *step.mutable_observation()->mutable_array() =
      message(rpcenv::UINT8, {n, 3}, std::string(static_cast<size_t>(3 * n), '\7'));
  return step;
}

rpcenv::Nest tuple_of_depth(int depth) {
  rpcenv::Nest nest;
  rpcenv::Nest* inner = &nest;
  for (int i = 1; i < depth; ++i) inner = inner->add_items();
  *inner->mutable_array() = message(rpcenv::BOOL, {}, std::string(1, '\1'));
  return nest;
}

TEST(arrays_of_every_dtype_survive_the_way) {
  for (int i = 0; i < rpcenv::DType_ARRAYSIZE; ++i) {
    const auto dtype = static_cast<DType>(i);
    CHECK(rpcenv::DType_IsValid(i));
    for (const Shape& shape : {Shape{}, Shape{2}, Shape{2, 3, 1}, Shape{0}, Shape{2, 0, 3}}) {
      const auto pool = new_pool();
      const Array array = make_array(dtype, shape, *pool);
      for (size_t k = 0; k < array.num_bytes(); ++k) array.data.get()[k] = std::byte(k % 2);
      rpcenv::Array sent;
      encode(array.view(), &sent);
      rpcenv::Array arrived;
      CHECK(arrived.ParseFromString(sent.SerializeAsString()));
      const ArrayView decoded = decode(arrived);
      CHECK(decoded.dtype == dtype && decoded.shape == shape);
      CHECK(std::memcmp(decoded.data, array.data.get(), array.num_bytes()) == 0);
    }
  }
}

TEST(the_names_of_dtypes_are_the_same_on_the_wire) {
  for (int i = 0; i < rpcenv::DType_ARRAYSIZE; ++i) {
    std::string name = name_of(static_cast<DType>(i));
    for (char& c : name) c = static_cast<char>(std::toupper(c));
    CHECK(rpcenv::DType_Name(static_cast<rpcenv::DType>(i)) == name);
  }
  rpcenv::Array array;
  CHECK_THROWS(std::invalid_argument,
               (encode(ArrayView{DType::kBFloat16, {0}, nullptr}, &array), 0));
}

TEST(nests_survive_the_way_and_messages_may_be_used_again) {
  const Array a = int64_array({2}, {1, 2});
  const Array b = int64_array({}, {3});
  rpcenv::Nest sent;
  for (const Arrays& nest : {Arrays(a), Arrays(Arrays::Tuple{a, Arrays::Dict{{"x", b}, {"y", a}}}),
                             Arrays(), Arrays(Arrays::Dict{{"", b}}), Arrays(b)}) {
    encode(views_of(nest), &sent);
    const Views decoded = decode(sent);
    CHECK(decoded.same_structure(nest));
    const std::vector<Array> arrays = nest.flatten();
    const std::vector<ArrayView> arrived = decoded.flatten();
    for (size_t i = 0; i < arrays.size(); ++i) CHECK(values_of(arrived[i]) == values_of(arrays[i]));
  }
}

TEST(what_is_decoded_is_not_copied) {
  const rpcenv::Array array = message(rpcenv::UINT8, {4}, "abcd");
  CHECK(static_cast<const void*>(decode(array).data) == array.data().data());
}

TEST(data_must_be_as_long_as_dtype_and_shape_say) {
  for (const size_t length : {0, 1, 23, 25, 48}) {
    CHECK_THROWS(WireError, decode(message(rpcenv::INT64, {3}, std::string(length, '\0'))));
  }
  CHECK_THROWS(WireError, decode(message(rpcenv::FLOAT32, {}, "")));
  CHECK_THROWS(WireError, decode(message(rpcenv::FLOAT32, {0}, "abcd")));
  CHECK_THROWS(WireError, decode(message(rpcenv::FLOAT32, {3, 0}, "abcd")));
}

TEST(sizes_are_neither_negative_nor_huge_and_their_product_does_not_overflow) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  const int64_t half = int64_t{1} << 32;
  for (const Shape& shape :
       {Shape{-1}, Shape{-1, -1}, Shape{kMin}, Shape{kMax}, Shape{half, half},
        Shape{half, half, half, half}, Shape{1 << 28, 1 << 28, 1 << 8}, Shape{1 << 20, 1 << 20},
        Shape{0, -1}, Shape{0, kMax}, Shape{1 << 28, 1 << 28, 0}}) {
    CHECK_THROWS(WireError, decode(message(rpcenv::UINT8, shape, "")));
    CHECK_THROWS(WireError, decode(message(rpcenv::FLOAT64, shape, std::string(8, '\0'))));
  }
  CHECK_THROWS(WireError, decode(message(rpcenv::UINT8, Shape(1000, 1), "a")));
}

TEST(a_bool_is_0_or_1) {
  CHECK(decode(message(rpcenv::BOOL, {2}, std::string("\0\1", 2))).num_bytes() == 2);
  for (const char byte : {'\2', '\3', '\x7f', '\x80', '\xff'}) {
    CHECK_THROWS(WireError, decode(message(rpcenv::BOOL, {2}, std::string("\1") + byte)));
  }
}

TEST(an_unknown_dtype_is_refused) {
  for (const int dtype : {-1, 12, 13, 1000}) {
    CHECK_THROWS(WireError, decode(message(static_cast<rpcenv::DType>(dtype), {1}, "a")));
  }
}

TEST(nests_are_leaves_or_have_items_and_as_many_keys) {
  rpcenv::Nest both = tuple_of_depth(2);
  *both.mutable_array() = message(rpcenv::UINT8, {1}, "a");
  CHECK_THROWS(WireError, decode(both));
  rpcenv::Nest array_with_key = tuple_of_depth(1);
  array_with_key.add_keys("a");
  CHECK_THROWS(WireError, decode(array_with_key));
  rpcenv::Nest too_many_keys = tuple_of_depth(2);
  too_many_keys.add_keys("a");
  CHECK(decode(too_many_keys).is_dict());
  too_many_keys.add_keys("b");
  CHECK_THROWS(WireError, decode(too_many_keys));
  rpcenv::Nest same_key_twice = tuple_of_depth(2);
  *same_key_twice.add_items() = tuple_of_depth(1);
  same_key_twice.add_keys("a");
  same_key_twice.add_keys("a");
  CHECK_THROWS(WireError, decode(same_key_twice));
}

TEST(nests_are_not_too_deep) {
  CHECK(decode(tuple_of_depth(kMaxNestDepth)).front().num_bytes() == 1);
  CHECK_THROWS(WireError, decode(tuple_of_depth(kMaxNestDepth + 1)));
  CHECK_THROWS(WireError, decode(tuple_of_depth(10'000)));
}

TEST(nests_have_not_too_many_items_wherever_they_are) {
  rpcenv::Nest wide;
  *wide.add_items() = tuple_of_depth(1);
  rpcenv::Nest* inner = wide.add_items();
  while (wide.items_size() + inner->items_size() < kMaxNestItems) inner->add_items();
  CHECK(decode(wide).tuple().at(1).tuple().size() == kMaxNestItems - 2);
  wide.add_items();
  CHECK_THROWS(WireError, decode(wide));
}

TEST(a_row_has_all_keys) {
  const rpcenv::Step step = valid_step(2);
  const Views::Dict row = decode_row(step, 2);
  CHECK(row.size() == 11);
  CHECK((row.at("frame").leaf().shape == Shape{2, 3}));
  CHECK(row.at("reward").leaf().dtype == DType::kFloat32);
  CHECK(row.at("done").leaf().dtype == DType::kBool);
  CHECK(row.at("episode_step").leaf().dtype == DType::kInt32);
  CHECK((values_of(row.at("last_action").leaf()) == Values{5, 5}));
}

TEST(the_last_action_may_be_an_array) {
  rpcenv::Step step = valid_step(2);
  step.clear_last_action();
  *step.mutable_last_action_array() = message(rpcenv::UINT8, {2, 3}, "123456");
  const ArrayView array = decode_row(step, 2).at("last_action").leaf();
  CHECK(array.dtype == DType::kUInt8);
  CHECK((array.shape == Shape{2, 3}));
}

TEST(a_row_with_anything_wrong_is_refused) {
  const auto refused = [](const std::function<void(rpcenv::Step*)>& spoil) {
    rpcenv::Step step = valid_step(2);
    spoil(&step);
    CHECK_THROWS(WireError, decode_row(step, 2));
  };
  refused([](rpcenv::Step* step) { step->clear_observation(); });
  refused([](rpcenv::Step* step) { step->mutable_observation()->Clear(); });
  refused([](rpcenv::Step* step) { step->mutable_observation()->mutable_array()->Clear(); });
  refused([](rpcenv::Step* step) {
    *step->mutable_observation()->mutable_array() = message(rpcenv::UINT8, {3, 3}, "123456789");
  });
  refused([](rpcenv::Step* step) { step->clear_reward(); });
  refused([](rpcenv::Step* step) { step->mutable_reward()->push_back('\0'); });
  refused([](rpcenv::Step* step) { step->set_done(std::string("\1\2")); });
  refused([](rpcenv::Step* step) { step->set_truncated(std::string("\1\xff")); });
  refused([](rpcenv::Step* step) { step->set_terminated(std::string(3, '\0')); });
  refused([](rpcenv::Step* step) { step->clear_game_done(); });
  refused([](rpcenv::Step* step) { step->mutable_episode_return()->pop_back(); });
  refused([](rpcenv::Step* step) { step->clear_episode_step(); });
  refused([](rpcenv::Step* step) { step->clear_game_return(); });
  refused([](rpcenv::Step* step) { step->clear_game_step(); });
  refused([](rpcenv::Step* step) { step->mutable_last_action()->resize(4); });
  refused([](rpcenv::Step* step) { step->mutable_last_action_array(); });
  refused([](rpcenv::Step* step) {
    *step->mutable_last_action_array() = message(rpcenv::UINT8, {3}, "123");
  });
  refused([](rpcenv::Step* step) {
    *step->mutable_last_action_array() = message(rpcenv::UINT8, {2}, "123");
  });
  CHECK_THROWS(WireError, decode_row(valid_step(3), 2));
  CHECK_THROWS(WireError, decode_row(valid_step(0), 0));
}

TEST(numbers_that_are_not_finite_or_negative_counts_are_refused_in_every_field) {
  using Field = void (*)(rpcenv::Step*, const std::string&);
  const Field floats[] = {
      [](rpcenv::Step* step, const std::string& data) { step->set_reward(data); },
      [](rpcenv::Step* step, const std::string& data) { step->set_episode_return(data); },
      [](rpcenv::Step* step, const std::string& data) { step->set_game_return(data); },
      [](rpcenv::Step* step, const std::string& data) {
        *step->mutable_last_action_array() = message(rpcenv::FLOAT32, {2, 1}, data);
      },
      [](rpcenv::Step* step, const std::string& data) {
        *step->mutable_observation()->mutable_array() = message(rpcenv::FLOAT32, {2}, data);
      }};
  const Field counts[] = {
      [](rpcenv::Step* step, const std::string& data) { step->set_episode_step(data); },
      [](rpcenv::Step* step, const std::string& data) { step->set_game_step(data); }};
  rpcenv::Step step = valid_step(2);
  constexpr float kLargest = std::numeric_limits<float>::max();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const Field set : floats) {
    set(&step, bytes(std::vector<float>{-kLargest, kLargest}));
    decode_row(step, 2);
    for (const float value : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
      rpcenv::Step spoiled = step;
      set(&spoiled, bytes(std::vector<float>{0, value}));
      CHECK_THROWS(WireError, decode_row(spoiled, 2));
    }
  }
  for (const Field set : counts) {
    rpcenv::Step spoiled = step;
    set(&spoiled, bytes(std::vector<int32_t>{0, -1}));
    CHECK_THROWS(WireError, decode_row(spoiled, 2));
  }
}

TEST(floats_of_every_size_are_finite_as_float32) {
  const auto is_refused = [](rpcenv::DType dtype, auto bits) {
    try {
      decode(message(dtype, {2}, bytes(std::vector<decltype(bits)>{0, bits})));
    } catch (const WireError&) {
      return true;
    }
    return false;
  };
  for (const uint16_t bits : {0x7c00, 0xfc00, 0x7e00}) CHECK(is_refused(rpcenv::FLOAT16, bits));
  for (const uint16_t bits : {0x7bff, 0xfbff, 0x8000}) CHECK(!is_refused(rpcenv::FLOAT16, bits));
  for (const double value : {1e300, -1e39, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK(is_refused(rpcenv::FLOAT64, value));
  }
  for (const double value : {3.4e38, -3.4e38, 1e-300}) CHECK(!is_refused(rpcenv::FLOAT64, value));
}

}  // namespace
}  // namespace torchbeast
