// SPDX-License-Identifier: Apache-2.0
// The rollout that an actor is filling.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "array.h"
#include "nest.h"
#include "rpcenv.pb.h"

namespace torchbeast {

// T + 1 rows of N environments: arrays [T + 1, N, ...] that are filled row by row and handed on
// without a copy. For one thread.
class Rollout {
 public:
  // Limits by keys of a row: for each array [N, ...], [2, ...] of the smallest and the largest
  // integers, or [0, ...] for no limit. They fix structure, dtype and shape, too.
  using Ranges = Nest<Array>::Dict;

  // With `dict_outputs`, env outputs are a dict by all keys of a row; else the tuple
  // (frame, reward, done, episode_step, episode_return).
  //
  // `first` is the first message of the stream and becomes row 0; later rows must have its shapes.
  // An `actor` is added to rows under that key. Throws WireError as set_env_outputs does, and if
  // the rollout does not fit into memory.
  Rollout(int64_t unroll_length, bool dict_outputs, const rpcenv::Step& first,
          std::shared_ptr<MemoryPool> pool, std::optional<int32_t> actor = std::nullopt,
          Ranges ranges = {});

  // Env outputs of row t, [1, N, ...]: views, not to be changed.
  Nest<Array> env_outputs(int64_t t) const;

  // Throws WireError for a row that differs from the first one in structure, dtype or shape, has
  // numbers outside the ranges, or (with `dict_outputs`) a last action other than `sent`, [1, N,
  // ...]; in the very first row, other than 0. Without such an array, last actions are not
  // compared.
  void set_env_outputs(int64_t t, const rpcenv::Step& step, const Nest<Array>* sent = nullptr);

  // `outputs` are [1, N, ...], for t > 0. Throws std::invalid_argument for other shapes, and where
  // they differ from the first ones. Row 0 of the first rollout holds zeros.
  void set_agent_outputs(int64_t t, const Nest<Array>& outputs);

  // Return (env outputs, agent outputs), and keep only a copy of their last row.
  Nest<Array> finish();

  // Begin the next rollout with that row. To be called once the finished one is in the queue:
  // before, each stream that waits for room there would hold the memory of two rollouts.
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
