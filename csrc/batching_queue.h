// SPDX-License-Identifier: Apache-2.0
// A queue that joins nests into batches.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "array.h"
#include "columns.h"
#include "errors.h"
#include "mutex.h"
#include "nest.h"

namespace torchbeast {

using Milliseconds = std::chrono::milliseconds;

// Nests go in, each with some columns along the batch dimension; batches of columns come out, in
// order. A batch may hold parts of several nests, and a nest may be split between batches.
//
// Any number of threads may call any method. close() wakes all who wait.
class BatchingQueue {
 public:
  struct Options {
    int64_t batch_dim = 1;
    int64_t minimum_batch_size = 1;  // columns
    int64_t maximum_batch_size = 1024;
    // Milliseconds after the oldest nest's arrival until a smaller batch is returned.
    std::optional<int64_t> timeout_ms;
    std::optional<int64_t> maximum_queue_size;  // columns from which on producers block
  };

  // Batches are allocated in `pool`; with `hand_over`, an owned nest that is a whole batch is
  // returned without a copy. Throws std::invalid_argument for invalid options.
  BatchingQueue(Options options, std::shared_ptr<MemoryPool> pool, bool hand_over = true);

  // Add a nest; blocks while the queue is full. `owned`: nobody else will use its memory. Throws
  // std::invalid_argument as count_columns does, ClosedError when closed, and also when *cancelled
  // is true after a wake().
  void enqueue(Nest<Array> nest, bool owned = false, const std::atomic<bool>* cancelled = nullptr);

  // Blocks until there is a batch; nullopt once closed, when remaining columns are dropped.
  std::optional<Nest<Array>> dequeue();

  // Never blocks. Throws std::runtime_error the second time.
  void close();
  bool is_closed() const;

  // Columns in the queue.
  int64_t size() const;

  // Make blocked producers check their `cancelled`.
  void wake();

 private:
  using Clock = std::chrono::steady_clock;

  struct Item {
    Nest<Array> nest;
    int64_t columns;  // columns not taken yet
    int64_t begin;    // index of the first of them
    bool owned;
    Clock::time_point arrival;
  };

  bool has_room() const TB_REQUIRES(mutex_);
  bool wait_for_batch(Lock& lock) TB_REQUIRES(mutex_);
  std::vector<Item> take() TB_REQUIRES(mutex_);

  const Options options_;
  const std::shared_ptr<MemoryPool> pool_;
  const bool hand_over_;

  mutable Mutex mutex_;
  Condition filled_;
  Condition emptied_;
  std::deque<Item> items_ TB_GUARDED_BY(mutex_);
  int64_t columns_ TB_GUARDED_BY(mutex_) = 0;
  bool closed_ TB_GUARDED_BY(mutex_) = false;
};

// Throws std::invalid_argument for invalid options that queues and batchers share.
void check_batch_sizes(int64_t batch_dim, int64_t minimum_batch_size, int64_t maximum_batch_size,
                       std::optional<int64_t> timeout_ms);

}  // namespace torchbeast
