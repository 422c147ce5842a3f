// SPDX-License-Identifier: Apache-2.0
// The learner's end of one stream to an environment server.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include "array.h"
#include "credentials.h"
#include "nest.h"
#include "rpcenv.grpc.pb.h"
#include "stream_options.h"

namespace torchbeast {

// One thread opens, reads and writes; any thread may cancel.
class EnvStream {
 public:
  using Clock = std::chrono::steady_clock;

  // Throws std::invalid_argument for invalid credentials.
  EnvStream(std::string address, const StreamOptions& options, const Credentials& credentials);
  ~EnvStream();
  EnvStream(const EnvStream&) = delete;
  EnvStream& operator=(const EnvStream&) = delete;

  // Connect and return the server's first message, which has a handshake of our protocol version
  // and comes once the environments are made. Throws TimeoutError, ConnectionError and, for a wrong
  // token, protocol version or number of environments, RefusedError.
  const rpcenv::Step& open(std::chrono::duration<double> connect_timeout,
                           std::chrono::duration<double> answer_timeout);

  // Set a timeout for the whole stream. To be called before open().
  void limit(std::chrono::duration<double> timeout);

  // Send actions [1, N, ...]. Throws ConnectionError.
  void write(const Nest<Array>& action, std::chrono::duration<double> timeout);

  // The answer to what was written; valid until the next call. Throws ConnectionError.
  const rpcenv::Step& read();

  // Send the reason why this server is not used, and end the stream. To be called after open().
  void refuse(const std::string& reason);

  // Make open(), write() and read() fail soon.
  void cancel();

  // Cancel if the current open(), write() or read() is past its timeout. To be called periodically,
  // since gRPC's synchronous streams have no timeout for a single message.
  void cancel_if_late();

  // Extend the current timeout, by the time for which this process was stopped.
  void extend(Clock::duration time);

 private:
  void begin_wait(std::chrono::duration<double> timeout);
  std::string why_unreachable();
  [[noreturn]] void fail();

  const std::string address_;
  std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<rpcenv::Action, rpcenv::Step>> stream_;
  // Reused for each message, to reuse their memory.
  rpcenv::Step step_;
  rpcenv::Action action_;

  std::atomic<bool> cancelled_{false};
  std::atomic<bool> late_{false};
  std::atomic<Clock::rep> deadline_{0};  // in ticks of Clock; 0: none
};

}  // namespace torchbeast
