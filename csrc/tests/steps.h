// SPDX-License-Identifier: Apache-2.0
// Valid messages of a server, for tests to use or to spoil.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "array.h"
#include "rpcenv.pb.h"

namespace torchbeast {

template <class T>
std::string repeated(int64_t count, T value) {
  const std::vector<T> values(static_cast<size_t>(count), value);
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

inline rpcenv::Array message(rpcenv::DType dtype, const Shape& shape, const std::string& data) {
  rpcenv::Array array;
  array.set_dtype(dtype);
  for (const int64_t size : shape) array.add_shape(size);
  array.set_data(data);
  return array;
}

// A row of n environments, all of whose numbers are `value`; the frame is int64 [n].
inline rpcenv::Step make_step(int64_t n, int64_t value) {
  rpcenv::Step step;
  step.mutable_handshake()->set_num_envs(static_cast<uint32_t>(n));
  *step.mutable_observation()->mutable_array() = message(rpcenv::INT64, {n}, repeated(n, value));
  step.set_reward(repeated(n, static_cast<float>(value)));
  step.set_done(repeated<char>(n, value == 0));
  step.set_truncated(repeated<char>(n, 0));
  step.set_terminated(repeated<char>(n, 0));
  step.set_episode_return(repeated(n, static_cast<float>(value)));
  step.set_episode_step(repeated(n, static_cast<int32_t>(value)));
  step.set_game_done(repeated<char>(n, 0));
  step.set_game_return(repeated(n, static_cast<float>(value)));
  step.set_game_step(repeated(n, static_cast<int32_t>(value)));
  step.set_last_action(repeated(n, value));
  return step;
}

}  // namespace torchbeast
