// SPDX-License-Identifier: Apache-2.0
// Log lines that C++ threads write and a Python thread reads.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "mutex.h"

namespace torchbeast {

class EventLog {
 public:
  // `state`, if given, returns what next() adds to events that were reported rarely.
  explicit EventLog(std::function<std::string()> state = nullptr) : state_(std::move(state)) {}

  // Beyond kMaxEvents the oldest are dropped, since nobody may ask for them.
  void report(std::string event) {
    {
      Lock lock(mutex_);
      if (events_.size() == kMaxEvents) events_.pop_front();
      events_.push_back(std::move(event));
    }
    changed_.notify_all();
  }

  // For events that strangers cause, who could fill the disk: of each kind, next() returns one in
  // kInterval, the latest, with the number of events.
  void report_rarely(const std::string& kind, std::string event) {
    {
      Lock lock(mutex_);
      Kind& rare = kinds_[kind];
      ++rare.count;
      rare.latest = std::move(event);
    }
    changed_.notify_all();
  }

  // Blocks for the next one; nullopt once all are read after close().
  std::optional<std::string> next() {
    bool is_rare = false;
    std::optional<std::string> event = wait(&is_rare);
    if (is_rare && state_) *event += state_();
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
  };

  std::optional<std::string> wait(bool* is_rare) {
    Lock lock(mutex_);
    while (true) {
      if (!events_.empty()) {
        std::string event = std::move(events_.front());
        events_.pop_front();
        return event;
      }
      const auto now = Clock::now();
      auto wake = now + kInterval;
      for (auto& item : kinds_) {
        Kind& rare = item.second;
        if (rare.count == 0) continue;
        wake = std::min(wake, rare.next_line);
        if (!closed_ && now < rare.next_line) continue;
        *is_rare = true;
        rare.next_line = now + kInterval;
        const int64_t count = std::exchange(rare.count, 0);
        return (count > 1 ? std::to_string(count) + " events, the latest: " : "") + rare.latest;
      }
      if (closed_) return std::nullopt;
      changed_.wait_until(lock, wake);
    }
  }

  static constexpr size_t kMaxEvents = 1000;
  static constexpr auto kInterval = std::chrono::seconds(10);

  const std::function<std::string()> state_;
  Mutex mutex_;
  Condition changed_;
  std::deque<std::string> events_ TB_GUARDED_BY(mutex_);
  std::map<std::string, Kind> kinds_ TB_GUARDED_BY(mutex_);
  bool closed_ TB_GUARDED_BY(mutex_) = false;
};

}  // namespace torchbeast
