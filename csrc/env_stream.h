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

  // Throws std::invalid_argument for credentials that make no sense.
  EnvStream(std::string address, const StreamOptions& options, const Credentials& credentials);
  ~EnvStream();
  EnvStream(const EnvStream&) = delete;
  EnvStream& operator=(const EnvStream&) = delete;

  // Connect and return the server's first message, which has a handshake of our protocol version
  // and comes once the environments are made. Throws TimeoutError, ConnectionError, of which
  // RefusedError where the server does not take our token.
  const rpcenv::Step& open(std::chrono::duration<double> connect_timeout,
                           std::chrono::duration<double> answer_timeout);

  // End the whole stream after this time. To be called before open().
  void limit(std::chrono::duration<double> timeout);

  // Send actions [1, N, ...]. Throws ConnectionError.
  void write(const Nest<Array>& action, std::chrono::duration<double> timeout);

  // The answer to what was written; valid until the next call. Throws ConnectionError.
  const rpcenv::Step& read();

  // Send the reason why this server is not used, and end the stream. To be called after open().
  void refuse(const std::string& reason);

  // Have open(), write() and read() fail soon.
  void cancel();

  // Cancel if what goes on has taken longer than its timeout. To be called now and then, since a
  // synchronous stream has no time limit of its own for a message.
  void cancel_if_late();

  // Give what goes on so much more time: nobody could answer while this process was stopped.
  void extend(Clock::duration time);

 private:
  void begin_wait(std::chrono::duration<double> timeout);
  std::string why_unreachable();
  [[noreturn]] void fail();

  const std::string address_;
  std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<rpcenv::Action, rpcenv::Step>> stream_;
  // Used again for each message, since their memory is.
  rpcenv::Step step_;
  rpcenv::Action action_;

  std::atomic<bool> cancelled_{false};
  std::atomic<bool> late_{false};
  std::atomic<Clock::rep> deadline_{0};  // ticks of Clock; 0: none
};

}  // namespace torchbeast
