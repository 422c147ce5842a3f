// SPDX-License-Identifier: Apache-2.0
#include "wire.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace torchbeast {

namespace {

ArrayView view_of(const std::string& data, DType dtype, Shape shape) {
  return {dtype, std::move(shape), reinterpret_cast<const std::byte*>(data.data())};
}

void check_bools(const std::string& data, const std::string& what) {
  // Compiled code may misbehave with other values.
  if (std::any_of(data.begin(), data.end(), [](char c) { return (c & ~1) != 0; })) {
    throw WireError(what + " is bool, but holds bytes other than 0 and 1");
  }
}

// Whether any float is an infinity, a NaN or of a larger magnitude than the one with bits
// `largest`.
template <class Bits>
bool any_exceeds(const ArrayView& array, Bits largest) {
  constexpr auto kMagnitude = static_cast<Bits>(std::numeric_limits<Bits>::max() / 2);
  bool exceeds = false;  // no branch, so that the compiler can vectorize the loop
  for (size_t i = 0; i < array.num_bytes(); i += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, array.data + i, sizeof(Bits));  // may be unaligned
    exceeds |= (bits & kMagnitude) > largest;
  }
  return exceeds;
}

// float64 must fit into float32, since nets convert it.
void check_finite(const ArrayView& array, const std::string& what) {
  const bool exceeds = array.dtype == DType::kFloat16   ? any_exceeds<uint16_t>(array, 0x7bff)
                       : array.dtype == DType::kFloat32 ? any_exceeds<uint32_t>(array, 0x7f7fffff)
                       : array.dtype == DType::kFloat64
                           ? any_exceeds<uint64_t>(array, 0x47efffffe0000000)
                           : false;
  if (exceeds) throw WireError(what + " has numbers that are not finite (as float32)");
}

// *num_items counts the items of the whole nest.
Nest<ArrayView> decode_nest(const rpcenv::Nest& message, int depth, int* num_items) {
  if (depth > kMaxNestDepth) {
    throw WireError("a nest is more than " + std::to_string(kMaxNestDepth) + " levels deep");
  }
  if (message.items_size() > kMaxNestItems - *num_items) {
    throw WireError("a nest has more than " + std::to_string(kMaxNestItems) + " items");
  }
  *num_items += message.items_size();
  if (message.has_array()) {
    if (message.items_size() > 0 || message.keys_size() > 0) {
      throw WireError("a nest is an array and has items too");
    }
    return torchbeast::decode(message.array());
  }
  if (message.keys_size() == 0) {
    Nest<ArrayView>::Tuple tuple;
    tuple.reserve(static_cast<size_t>(message.items_size()));
    for (const rpcenv::Nest& item : message.items()) {
      tuple.push_back(decode_nest(item, depth + 1, num_items));
    }
    return tuple;
  }
  if (message.keys_size() != message.items_size()) {
    throw WireError("a dict has " + std::to_string(message.keys_size()) + " keys and " +
                    std::to_string(message.items_size()) + " items");
  }
  Nest<ArrayView>::Dict dict;
  for (int i = 0; i < message.keys_size(); ++i) {
    const std::string& key = message.keys(i);
    if (!dict.emplace(key, decode_nest(message.items(i), depth + 1, num_items)).second) {
      throw WireError("a dict has the key " + key.substr(0, 100) + " twice");
    }
  }
  return dict;
}

struct Field {
  const char* key;
  DType dtype;
  const std::string& (rpcenv::Step::*data)() const;
};

constexpr std::array<Field, 10> kFields{{
    {"reward", DType::kFloat32, &rpcenv::Step::reward},
    {"done", DType::kBool, &rpcenv::Step::done},
    {"truncated", DType::kBool, &rpcenv::Step::truncated},
    {"terminated", DType::kBool, &rpcenv::Step::terminated},
    {"episode_return", DType::kFloat32, &rpcenv::Step::episode_return},
    {"episode_step", DType::kInt32, &rpcenv::Step::episode_step},
    {"game_done", DType::kBool, &rpcenv::Step::game_done},
    {"game_return", DType::kFloat32, &rpcenv::Step::game_return},
    {"game_step", DType::kInt32, &rpcenv::Step::game_step},
    {"last_action", DType::kInt64, &rpcenv::Step::last_action},
}};

}  // namespace

ArrayView decode(const rpcenv::Array& message) {
  if (!rpcenv::DType_IsValid(message.dtype())) {
    throw WireError("an array has the unknown dtype " + std::to_string(message.dtype()));
  }
  if (message.shape_size() > kMaxNestDepth) throw WireError("an array has too many dimensions");
  // The enum on the wire and DType have the same numbers.
  const auto dtype = static_cast<DType>(message.dtype());
  const Shape shape(message.shape().begin(), message.shape().end());
  size_t count = 1;
  for (const int64_t size : shape) {
    // No message is longer than kMaxMessageBytes, and the product of sizes must not overflow.
    if (size < 0 || size > kMaxMessageBytes) {
      throw WireError("an array's shape has the size " + std::to_string(size));
    }
    count *= static_cast<size_t>(size);
    if (count > kMaxMessageBytes) throw WireError("an array's shape is too large");
  }
  ArrayView array = view_of(message.data(), dtype, shape);
  if (message.data().size() != array.num_bytes()) {
    throw WireError("an array's data are " + std::to_string(message.data().size()) +
                    " bytes, but " + array.description() + " has " +
                    std::to_string(array.num_bytes()));
  }
  if (dtype == DType::kBool) check_bools(message.data(), "an array");
  check_finite(array, "an array");
  return array;
}

Nest<ArrayView> decode(const rpcenv::Nest& message) {
  int num_items = 0;
  return decode_nest(message, 1, &num_items);
}

void encode(const ArrayView& array, rpcenv::Array* message) {
  if (array.dtype == DType::kBFloat16) throw std::invalid_argument("bfloat16 cannot be sent");
  message->set_dtype(static_cast<rpcenv::DType>(array.dtype));
  message->clear_shape();
  for (const int64_t size : array.shape) message->add_shape(size);
  message->set_data(array.data, array.num_bytes());
}

void encode(const Nest<ArrayView>& nest, rpcenv::Nest* message) {
  message->Clear();
  if (nest.is_leaf()) {
    encode(nest.leaf(), message->mutable_array());
  } else if (nest.is_tuple()) {
    for (const Nest<ArrayView>& item : nest.tuple()) encode(item, message->add_items());
  } else {
    for (const auto& [key, item] : nest.dict()) {
      message->add_keys(key);
      encode(item, message->add_items());
    }
  }
}

Nest<ArrayView>::Dict decode_row(const rpcenv::Step& step, int64_t num_envs) {
  if (num_envs < 1) throw WireError("a row of " + std::to_string(num_envs) + " environments");
  Nest<ArrayView>::Dict row;
  if (step.has_last_action_array()) {
    ArrayView array = decode(step.last_action_array());
    if (array.shape.empty() || array.shape[0] != num_envs) {
      throw WireError("the last action is an array " + array.description() + ", but there are " +
                      std::to_string(num_envs) + " environments");
    }
    row.emplace("last_action", std::move(array));
  }
  for (const Field& field : kFields) {
    if (row.count(field.key) > 0) continue;
    const std::string& data = (step.*field.data)();
    ArrayView array = view_of(data, field.dtype, {num_envs});
    if (data.size() != array.num_bytes()) {
      throw WireError(std::string(field.key) + " is " + std::to_string(data.size()) +
                      " bytes, but " + array.description() + " has " +
                      std::to_string(array.num_bytes()));
    }
    if (field.dtype == DType::kBool) check_bools(data, field.key);
    check_finite(array, field.key);
    for (int64_t i = 0; field.dtype == DType::kInt32 && i < num_envs; ++i) {
      if (array.integer_at(i) < 0) throw WireError(std::string(field.key) + " is negative");
    }
    row.emplace(field.key, std::move(array));
  }
  if (!step.has_observation()) throw WireError("a row has no observation");
  Nest<ArrayView> frame = decode(step.observation());
  frame.for_each([&](const ArrayView& array) {
    if (array.shape.empty() || array.shape[0] != num_envs) {
      throw WireError("the observation has an array " + array.description() + ", but there are " +
                      std::to_string(num_envs) + " environments");
    }
  });
  if (frame.empty()) throw WireError("the observation is empty");
  row.emplace("frame", std::move(frame));
  return row;
}

Shape stacked_shape(const rpcenv::Step& step, int64_t num_envs, int64_t stack_size) {
  if (!step.has_full() || !step.has_observation() || !step.observation().has_array()) {
    throw WireError("frames are stacked, but the first row has no whole stacks");
  }
  const ArrayView full = decode(step.full());
  const ArrayView newest = decode(step.observation().array());
  Shape expected = newest.shape;
  if (expected.size() < 2 || full.shape.size() != expected.size()) {
    throw WireError("frames are stacked, but are " + newest.description());
  }
  expected[1] *= stack_size;
  if (full.dtype != newest.dtype || full.shape != expected || expected[0] != num_envs) {
    throw WireError("a stack of " + std::to_string(stack_size) + " frames " + newest.description() +
                    " cannot be " + full.description());
  }
  return full.shape;
}

void restack(const rpcenv::Step& step, const ArrayView& newest, int64_t stack_size,
             const Array* previous, const Array& target) {
  const int64_t num_envs = newest.shape.at(0);
  const std::string& is_full = step.is_full();
  if (is_full.size() != static_cast<size_t>(num_envs)) {
    throw WireError("is_full is " + std::to_string(is_full.size()) + " bytes for " +
                    std::to_string(num_envs) + " environments");
  }
  check_bools(is_full, "is_full");
  const int64_t num_full = std::count(is_full.begin(), is_full.end(), '\1');
  if (previous == nullptr && num_full != num_envs) {
    throw WireError("the first row has stacks that are not whole");
  }
  Shape shape(target.shape.begin() + 1, target.shape.end());
  shape[0] = num_full;
  ArrayView full;
  if (num_full > 0) {
    full = decode(step.full());
    if (full.dtype != target.dtype || full.shape != shape) {
      throw WireError("the whole stacks are " + full.description() + ", but should be " +
                      ArrayView{target.dtype, shape, nullptr}.description());
    }
  }
  shape[0] = num_envs;
  shape.at(1) /= stack_size;
  if (newest.dtype != target.dtype || newest.shape != shape) {
    throw WireError("the newest frames are " + newest.description() + ", but should be " +
                    ArrayView{target.dtype, shape, nullptr}.description());
  }

  const size_t frame = newest.num_bytes() / static_cast<size_t>(num_envs);
  const size_t stack = frame * static_cast<size_t>(stack_size);
  const std::byte* whole = full.data;
  for (size_t i = 0; i < static_cast<size_t>(num_envs); ++i) {
    std::byte* to = target.data.get() + i * stack;
    if (is_full[i] != 0) {
      std::memcpy(to, whole, stack);
      whole += stack;
    } else {
      std::memcpy(to, previous->data.get() + i * stack + frame, stack - frame);
      std::memcpy(to + stack - frame, newest.data + i * frame, frame);
    }
  }
}

}  // namespace torchbeast
