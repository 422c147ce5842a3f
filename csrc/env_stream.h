// SPDX-License-Identifier: Apache-2.0
// The learner's end of one stream of environments, whichever side has opened it.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <string>

#include "array.h"
#include "nest.h"
#include "rpcenv.pb.h"

namespace torchbeast {

// One thread opens, reads and writes; any thread may cancel.
class EnvStream {
 public:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  virtual ~EnvStream() = default;
  EnvStream(const EnvStream&) = delete;
  EnvStream& operator=(const EnvStream&) = delete;

  // Who is at the other end, for messages: "the environment server at host:port", say.
  const std::string& peer() const { return peer_; }

  // Begin, and return the environments' first message, which has a handshake of our protocol
  // version and comes once they are made. Throws TimeoutError, ConnectionError and, for a wrong
  // token, protocol version or number of environments, RefusedError.
  const rpcenv::Step& open(Seconds connect_timeout, Seconds answer_timeout);

  // Send actions [1, N, ...]. Throws ConnectionError.
  void write(const Nest<Array>& action, Seconds timeout);

  // The answer to what was written; valid until the next call. Throws ConnectionError.
  const rpcenv::Step& read();

  // Send the reason why these environments are not used, and end the stream. To be called after
  // open().
  virtual void refuse(const std::string& reason) = 0;

  // Make open(), write() and read() fail soon.
  void cancel();

  // Cancel if the current open(), write() or read() is past its timeout. To be called periodically,
  // since gRPC's synchronous streams have no timeout for a single message.
  void cancel_if_late();

  // Extend the current timeout, by the time for which this process was stopped.
  void extend(Clock::duration time);

 protected:
  explicit EnvStream(std::string peer) : peer_(std::move(peer)) {}

  virtual void begin(Seconds connect_timeout, Seconds answer_timeout) = 0;
  virtual bool write_message(const rpcenv::Action& action) = 0;
  virtual bool read_message(rpcenv::Step* step) = 0;
  virtual void try_cancel() = 0;
  // Why the stream has ended, after a message failed.
  virtual grpc::Status finish() = 0;

  void begin_wait(Seconds timeout);
  void end_wait() { deadline_ = 0; }
  [[noreturn]] void fail();
  bool is_cancelled() const { return cancelled_; }

  static constexpr Seconds kGrace{1};      // for a failed stream to end
  static constexpr Seconds kLongest{1e9};  // a longer timeout would overflow

 private:
  const std::string peer_;
  // Reused for each message, to reuse their memory.
  rpcenv::Step step_;
  rpcenv::Action action_;

  std::atomic<bool> cancelled_{false};
  std::atomic<bool> late_{false};
  std::atomic<Clock::rep> deadline_{0};  // in ticks of Clock; 0: none
  Seconds timeout_{0};                   // of the latest wait, without what extend() has added
};

}  // namespace torchbeast
