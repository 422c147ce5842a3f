// SPDX-License-Identifier: Apache-2.0
// Log lines that C++ threads write and a Python thread reads.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "mutex.h"

namespace torchbeast {

class EventLog {
 public:
  // Beyond kMaxEvents the oldest are dropped, since nobody may ask for them.
  void report(std::string event) {
    {
      Lock lock(mutex_);
      if (events_.size() == kMaxEvents) events_.pop_front();
      events_.push_back(std::move(event));
    }
    changed_.notify_all();
  }

  // Blocks for the next one; nullopt once all are read after close().
  std::optional<std::string> next() {
    Lock lock(mutex_);
    while (events_.empty() && !closed_) changed_.wait(lock);
    if (events_.empty()) return std::nullopt;
    std::string event = std::move(events_.front());
    events_.pop_front();
    return event;
  }

  void close() {
    {
      Lock lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

 private:
  static constexpr size_t kMaxEvents = 1000;

  Mutex mutex_;
  Condition changed_;
  std::deque<std::string> events_ TB_GUARDED_BY(mutex_);
  bool closed_ TB_GUARDED_BY(mutex_) = false;
};

}  // namespace torchbeast
