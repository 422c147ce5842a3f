// SPDX-License-Identifier: Apache-2.0
// Accepts streams of environments that dial in: here the learner is the server.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "credentials.h"
#include "env_stream.h"
#include "event_log.h"
#include "mutex.h"
#include "rpcenv.grpc.pb.h"
#include "stream_options.h"

namespace torchbeast {

// Others may keep it after its stream has ended.
class IncomingStream final : public EnvStream {
 public:
  using Messages = grpc::ServerReaderWriter<rpcenv::Action, rpcenv::Step>;

  IncomingStream(grpc::ServerContext* context, Messages* messages);

  // To be called before open(). Unset fields are the environments' choice.
  void set_options(StreamOptions options) { options_ = std::move(options); }

  // The reason goes with the end of the stream.
  void refuse(const std::string& reason) override { refusal_ = reason; }
  const std::string& refusal() const { return refusal_; }

  // Forget context and messages, which are about to be destroyed.
  void end();

  bool is_gone();

 private:
  void begin(Seconds connect_timeout, Seconds answer_timeout) override;
  bool write_message(const rpcenv::Action& action) override { return messages_->Write(action); }
  bool read_message(rpcenv::Step* step) override { return messages_->Read(step); }
  void try_cancel() override;
  grpc::Status finish() override;

  Messages* const messages_;
  StreamOptions options_;
  std::string refusal_;
  Mutex mutex_;
  grpc::ServerContext* context_ TB_GUARDED_BY(mutex_);  // null after the end
};

// Streams wait until somebody uses them. Each has a thread of its own.
class Listener final : private rpcenv::RPCLearner::Service {
 public:
  // What is done with a stream, which ends when this returns: why it failed; empty: it did not.
  using Play = std::function<std::string(const std::shared_ptr<IncomingStream>&)>;
  struct Use {
    const Play play;
    int64_t max_streams;      // that it may have at the same time
    int64_t num_streams = 0;  // that it has now
  };
  // Throws RefusedError for environments that are not used; other errors end the query.
  using Check = std::function<void(const std::string& peer, const rpcenv::Step& first)>;

  // `socket` listens already, and is closed by the caller after close(). `max_streams` is the
  // largest number of streams at the same time. Throws std::invalid_argument for invalid
  // credentials, std::runtime_error where the system has no threads left.
  Listener(int socket, int64_t max_streams, Credentials credentials);
  ~Listener() override;

  // Have streams used, those that wait first. It takes the place of an earlier use, which keeps the
  // streams that it has.
  std::shared_ptr<Use> begin_use(Play play,
                                 int64_t max_streams = std::numeric_limits<int64_t>::max());

  // Blocks until this use has no stream any more; others wait for another use.
  void end_use(const std::shared_ptr<Use>& use);

  // Blocks for environments that open a stream and pass the check; their streams end. Those that
  // fail or are refused are events. Throws what the check does, and ClosedError after close(), or
  // when another use has taken the place of this one.
  void query(const StreamOptions& options, EnvStream::Seconds answer_timeout, const Check& check);

  // Streams that are there, used or not.
  int64_t num_streams();

  EventLog& events() { return events_; }

  // End all streams, and refuse new ones. Blocks until all have ended.
  void close();

 private:
  grpc::Status StreamingLearner(grpc::ServerContext* context,
                                IncomingStream::Messages* messages) override;
  grpc::Status refuse_stranger(const grpc::ServerContext& context);
  std::string serve(const std::shared_ptr<IncomingStream>& stream);
  void accept_connections();

  const int socket_;
  const int64_t max_streams_;
  const Credentials credentials_;
  EventLog events_;

  Mutex mutex_;
  Condition changed_;
  std::shared_ptr<Use> use_ TB_GUARDED_BY(mutex_);  // which is guarded, too, but for `play`
  int64_t num_streams_ TB_GUARDED_BY(mutex_) = 0;

  std::atomic<bool> closed_{false};
  std::once_flag closing_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::unique_ptr<grpc::Server> server_;
  std::thread accepting_;
};

}  // namespace torchbeast
