// SPDX-License-Identifier: Apache-2.0
// The rollout that a stream is writing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "array.h"
#include "nest.h"
#include "rpcenv.pb.h"

namespace torchbeast {

// T + 1 rows of N environments, each array [T + 1, N, ...] in memory of its own, which is written
// in place and handed on as it is. One thread.
class Rollout {
 public:
  // Of keys of a row, what they may hold: for each array [N, ...], [2, ...] of the least and the
  // largest integers, or [0, ...] where there is no limit.
  using Ranges = Nest<Array>::Dict;

  // With `dict_outputs`, env outputs are a dict by all keys of a row; else the tuple
  // (frame, reward, done, episode_step, episode_return).
  //
  // `first` is the first message of the stream and makes row 0; its shapes hold from here on. With
  // an `actor`, rows hold it under that key. Throws WireError, as set_env_outputs does.
  Rollout(int64_t unroll_length, bool dict_outputs, const rpcenv::Step& first,
          std::shared_ptr<MemoryPool> pool, std::optional<int32_t> actor = std::nullopt,
          Ranges ranges = {});

  // Env outputs of row t, [1, N, ...]: views, to be read only.
  Nest<Array> env_outputs(int64_t t) const;

  // Throws WireError where the row is not like the first one, has numbers outside the ranges, or
  // (with `dict_outputs`) names another last action than `sent`, [1, N, ...], or 0 in the very
  // first row. What is no such array is not compared.
  void set_env_outputs(int64_t t, const rpcenv::Step& step, const Nest<Array>* sent = nullptr);

  // `outputs` are [1, N, ...], for t > 0. Throws std::invalid_argument where they are not, or are
  // not like the first ones. In row 0 of the first rollout there are zeros.
  void set_agent_outputs(int64_t t, const Nest<Array>& outputs);

  // Return (env outputs, agent outputs); of these, a copy of the last row alone is kept.
  Nest<Array> finish();

  // Begin the next rollout with that row. To be called once the finished one is in the queue: each
  // stream that waits for room there would hold the memory of two.
  void begin();

  int64_t num_envs() const { return num_envs_; }

 private:
  Nest<ArrayView>::Dict decode(const rpcenv::Step& step) const;
  void check_ranges(int64_t t) const;
  void check_last_action(int64_t t, const Nest<Array>* sent) const;
  Nest<Array> arrange(const Nest<Array>::Dict& rows) const;
  void begin_buffers(int64_t t, int64_t num_rows);

  const int64_t unroll_length_;
  const bool dict_outputs_;
  const int64_t num_envs_;
  const int64_t stack_size_;  // 0: frames arrive whole
  const std::shared_ptr<MemoryPool> pool_;
  const Ranges ranges_;
  std::optional<Array> actor_;  // [N]
  Nest<Array>::Dict rows_;
  std::optional<Nest<Array>> agent_outputs_;
};

}  // namespace torchbeast
