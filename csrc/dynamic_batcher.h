// SPDX-License-Identifier: Apache-2.0
// Joins the calls of many threads into batches, for a few threads to answer.
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

// Callers of compute() wait while other threads take batches with next() and set their outputs. A
// call is never split between batches; one with more columns than maximum_batch_size is a batch of
// its own.
//
// Any number of threads may call any method. close() wakes all who wait, including callers whose
// batch has been taken.
class DynamicBatcher : public std::enable_shared_from_this<DynamicBatcher> {
 public:
  struct Options {
    int64_t batch_dim = 1;
    int64_t minimum_batch_size = 1;  // columns
    int64_t maximum_batch_size = 1024;
    // Milliseconds after the newest call until a smaller batch is returned.
    std::optional<int64_t> timeout_ms = 100;
  };

  // Inputs of batches are allocated in `input_pool` (default: `pool`), outputs of calls in `pool`.
  // Throws std::invalid_argument for invalid options.
  DynamicBatcher(Options options, std::shared_ptr<MemoryPool> pool,
                 std::shared_ptr<MemoryPool> input_pool = nullptr);

  // Blocks until the batch of `inputs` has outputs, and returns this call's columns of them, in
  // memory of their own. Throws std::invalid_argument as count_columns does, and for inputs that
  // cannot be joined with the others of the batch; AsyncError if the batch is dropped; ClosedError
  // when closed, or when *cancelled is true after a wake().
  Nest<Array> compute(Nest<Array> inputs, const std::atomic<bool>* cancelled = nullptr);

  // Blocks until there is a batch; null once closed.
  std::unique_ptr<Batch> next();

  // Never blocks. Throws std::runtime_error the second time.
  void close();
  bool is_closed() const;

  // Columns that are in no batch yet.
  int64_t size() const;

  // Make blocked callers check their `cancelled`.
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
  // Unanswered calls: the pending ones and those in batches.
  std::set<std::shared_ptr<Call>> waiting_ TB_GUARDED_BY(mutex_);
  int64_t columns_ TB_GUARDED_BY(mutex_) = 0;  // columns of the pending calls
  bool closed_ TB_GUARDED_BY(mutex_) = false;
};

// The joined inputs of some calls. For one thread at a time.
class Batch {
 public:
  Batch(std::shared_ptr<DynamicBatcher> batcher, DynamicBatcher::Calls calls, Nest<Array> inputs);
  ~Batch();  // fails the calls with AsyncError if they have no outputs
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // The same arrays each time, which belong to this batch alone.
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
