// SPDX-License-Identifier: Apache-2.0
// Log lines that C++ threads write and a Python thread reads.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "mutex.h"

namespace torchbeast {

class EventLog {
 public:
  // `state`, if given, returns what next() adds to an event.
  explicit EventLog(std::function<std::string()> state = nullptr) : state_(std::move(state)) {}

  // Of each kind next() returns `num_at_once` events at once, and from then on one in kInterval:
  // the latest, with their number. Peers cause events, and could fill the disk.
  void report(const std::string& kind, std::string event, int num_at_once = 1) {
    {
      Lock lock(mutex_);
      Kind& of_kind = kinds_[kind];
      ++of_kind.count;
      of_kind.burst = (num_at_once - 1) * kInterval;
      of_kind.latest = std::move(event);
    }
    changed_.notify_all();
  }

  // Blocks for the next one; nullopt once all are read after close().
  std::optional<std::string> next() {
    std::optional<std::string> event = wait();
    if (event && state_) *event += state_();
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
  using Clock = std::chrono::steady_clock;
  struct Kind {
    int64_t count = 0;  // events since the last line
    std::string latest;
    Clock::time_point next_line{};  // no line before
    Clock::duration burst{};        // earlier time without lines that counts
  };

  std::optional<std::string> wait() {
    Lock lock(mutex_);
    while (true) {
      const auto now = Clock::now();
      auto wake = now + kInterval;
      for (auto& item : kinds_) {
        Kind& kind = item.second;
        if (kind.count == 0) continue;
        wake = std::min(wake, kind.next_line);
        if (!closed_ && now < kind.next_line) continue;
        kind.next_line = std::max(kind.next_line, now - kind.burst) + kInterval;
        const int64_t count = std::exchange(kind.count, 0);
        return (count > 1 ? std::to_string(count) + " events, the latest: " : "") + kind.latest;
      }
      if (closed_) return std::nullopt;
      changed_.wait_until(lock, wake);
    }
  }

  static constexpr auto kInterval = std::chrono::seconds(10);

  const std::function<std::string()> state_;
  Mutex mutex_;
  Condition changed_;
  std::map<std::string, Kind> kinds_ TB_GUARDED_BY(mutex_);
  bool closed_ TB_GUARDED_BY(mutex_) = false;
};

}  // namespace torchbeast
