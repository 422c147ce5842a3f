// SPDX-License-Identifier: Apache-2.0
// Joins the calls of many threads into batches that a few threads answer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "array.h"
#include "columns.h"
#include "errors.h"
#include "mutex.h"
#include "nest.h"

namespace torchbeast {

class Batch;

// Callers of compute() wait while others iterate over batches and answer them. Calls are never
// parted: a batch holds whole ones. One with more columns than maximum_batch_size is a batch of its
// own.
//
// Any number of threads may call any method. close() wakes all who wait, also the callers whose
// batch is being answered.
class DynamicBatcher : public std::enable_shared_from_this<DynamicBatcher> {
 public:
  struct Options {
    int64_t batch_dim = 1;
    int64_t minimum_batch_size = 1;  // columns
    int64_t maximum_batch_size = 1024;
    // So long after the last call that came, batches below the minimum are given out too.
    std::optional<int64_t> timeout_ms = 100;
  };

  // Batches are in memory of `input_pool`, by default `pool`, which answers are in. Throws
  // std::invalid_argument for options that make no sense.
  DynamicBatcher(Options options, std::shared_ptr<MemoryPool> pool,
                 std::shared_ptr<MemoryPool> input_pool = nullptr);

  // Wait for the answer to `inputs`: the caller's own columns of the batch's outputs, in memory of
  // their own. Throws std::invalid_argument as count_columns does, and where the inputs do not fit
  // those of others in the batch; AsyncError if the batch is dropped; ClosedError when closed, or
  // when *cancelled is true after a wake().
  Nest<Array> compute(Nest<Array> inputs, const std::atomic<bool>* cancelled = nullptr);

  // Blocks for a batch; null once closed.
  std::unique_ptr<Batch> next();

  // Never blocks. Throws std::runtime_error the second time.
  void close();
  bool is_closed() const;

  // Columns that wait to become part of a batch.
  int64_t size() const;

  // Have those who wait look at their `cancelled`.
  void wake();

 private:
  friend class Batch;
  using Clock = std::chrono::steady_clock;

  struct Call {
    Nest<Array> inputs;
    int64_t columns;
    Clock::time_point arrival;

    // Guarded by the batcher's mutex, which the analysis cannot express.
    Condition answered;
    bool done = false;
    Nest<Array> outputs;
    std::exception_ptr error;
  };
  using Calls = std::vector<std::shared_ptr<Call>>;

  bool wait_for_calls(Lock& lock) TB_REQUIRES(mutex_);
  Calls take() TB_REQUIRES(mutex_);
  void forget(const std::shared_ptr<Call>& call) TB_REQUIRES(mutex_);
  void answer(const Calls& calls, std::vector<Nest<Array>> outputs);
  void fail(const Calls& calls, std::exception_ptr error);

  const Options options_;
  const std::shared_ptr<MemoryPool> pool_;
  const std::shared_ptr<MemoryPool> input_pool_;

  mutable Mutex mutex_;
  Condition filled_;
  std::deque<std::shared_ptr<Call>> pending_ TB_GUARDED_BY(mutex_);
  // The pending ones and those in batches.
  std::set<std::shared_ptr<Call>> waiting_ TB_GUARDED_BY(mutex_);
  int64_t columns_ TB_GUARDED_BY(mutex_) = 0;  // of the pending ones
  bool closed_ TB_GUARDED_BY(mutex_) = false;
};

// The inputs of some calls, to be answered together. One thread at a time.
class Batch {
 public:
  Batch(std::shared_ptr<DynamicBatcher> batcher, DynamicBatcher::Calls calls, Nest<Array> inputs);
  ~Batch();  // fails the calls with AsyncError if they have no outputs
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // Each call to this returns the same arrays, which belong to this batch alone.
  const Nest<Array>& inputs() const { return inputs_; }

  // Copies `outputs` and wakes the callers. Throws std::runtime_error the second time,
  // std::invalid_argument for arrays of too few dimensions or of another batch size.
  void set_outputs(const Nest<Array>& outputs);

 private:
  const std::shared_ptr<DynamicBatcher> batcher_;
  const DynamicBatcher::Calls calls_;
  const Nest<Array> inputs_;
  std::atomic<bool> answered_{false};
};

}  // namespace torchbeast
