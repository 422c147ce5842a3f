// SPDX-License-Identifier: Apache-2.0
#include "wait_times.h"

#include <algorithm>

namespace torchbeast {

WaitTimes::Timer::Timer(WaitTimes* times, size_t stream, Wait wait)
    : times_(times), stream_(stream) {
  Lock lock(times_->mutex_);
  times_->streams_[stream_].wait = wait;
  times_->streams_[stream_].began = Clock::now();
}

WaitTimes::Timer::~Timer() {
  Lock lock(times_->mutex_);
  Stream& stream = times_->streams_[stream_];
  times_->finished_[*stream.wait] += Clock::now() - stream.began;
  stream.wait.reset();
}

void WaitTimes::begin_stream(size_t stream) {
  Lock lock(mutex_);
  if (stream == streams_.size()) streams_.emplace_back();
  streams_[stream] = Stream();
}

void WaitTimes::set_connected(size_t stream, bool connected) {
  Lock lock(mutex_);
  if (streams_[stream].connected && !connected) streams_[stream].began = Clock::now();
  streams_[stream].connected = connected;
}

int64_t WaitTimes::num_connected() {
  Lock lock(mutex_);
  return std::count_if(streams_.begin(), streams_.end(),
                       [](const Stream& stream) { return stream.connected; });
}

std::array<double, WaitTimes::kNumWaits> WaitTimes::totals() {
  Lock lock(mutex_);
  auto totals = finished_;
  const auto now = Clock::now();
  for (const Stream& stream : streams_) {
    if (stream.wait) totals[*stream.wait] += now - stream.began;
  }
  return {totals[kInference].count(), totals[kEnvironments].count(), totals[kLearner].count()};
}

std::vector<std::pair<std::string, double>> WaitTimes::silences() {
  Lock lock(mutex_);
  const auto now = Clock::now();
  std::vector<std::pair<std::string, double>> silences;
  for (const Stream& stream : streams_) {
    const bool works = stream.connected && !stream.wait;
    const std::chrono::duration<double> seconds = works ? Clock::duration(0) : now - stream.began;
    silences.emplace_back(stream.wait ? kNames[*stream.wait] : "connection", seconds.count());
  }
  return silences;
}

}  // namespace torchbeast
