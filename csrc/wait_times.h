// SPDX-License-Identifier: Apache-2.0
// What the streams of a pool wait for, and for how long.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mutex.h"

namespace torchbeast {

// Any number of threads may call any method.
class WaitTimes {
 public:
  // Inference, the server's next row, room in the learner's queue.
  enum Wait { kInference, kEnvironments, kLearner, kNumWaits };
  static constexpr std::array<const char*, kNumWaits> kNames{"inference", "environments",
                                                             "learner"};

  explicit WaitTimes(size_t num_streams) : streams_(num_streams) {}

  // Records a wait of a stream, from its construction to its destruction.
  class Timer {
   public:
    Timer(WaitTimes* times, size_t stream, Wait wait);
    ~Timer();

   private:
    WaitTimes* const times_;
    const size_t stream_;
  };

  // A stream in the place of one that has gone, or one more. Streams begin without a connection.
  void begin_stream(size_t stream);
  void set_connected(size_t stream, bool connected);
  int64_t num_connected();

  // Seconds that all streams together have waited so far, current waits included.
  std::array<double, kNumWaits> totals();

  // For each stream, what it waits for now (one of kNames, or "connection") and for how many
  // seconds: 0 while it works.
  std::vector<std::pair<std::string, double>> silences();

 private:
  using Clock = std::chrono::steady_clock;
  struct Stream {
    bool connected = false;
    std::optional<Wait> wait;
    // Start of that wait; without a connection, start of the search for one.
    Clock::time_point began = Clock::now();
  };

  Mutex mutex_;
  std::vector<Stream> streams_ TB_GUARDED_BY(mutex_);
  // Finished waits; current ones are in streams_.
  std::array<std::chrono::duration<double>, kNumWaits> finished_ TB_GUARDED_BY(mutex_){};
};

}  // namespace torchbeast
